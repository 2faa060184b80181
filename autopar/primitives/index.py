"""Primitives that read or write at indices known only when they run.

Dims that are indexed one element at a time may be sharded all the same: each device looks up, or writes, what it has.
"""

from jax.extend.core import JaxprEqn

from autopar.primitives.factors import FactorBuilder, Kind, OpFactors
from autopar.primitives.rule_helpers import Rule, shape_of


def _gather(eqn: JaxprEqn) -> OpFactors:
    """Over an indexed dim the results add up: those who don't have the element contribute zero."""
    numbers, slice_sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    operand_shape, indices_shape, out_shape = (
        shape_of(atom) for atom in (*eqn.invars, *eqn.outvars)
    )
    build = FactorBuilder()
    indices = (*build.dims(indices_shape[:-1]), ())
    looked_up = iter(indices[:-1])
    result = [
        () if dim in numbers.offset_dims else next(looked_up) for dim in range(len(out_shape))
    ]
    batching = dict(
        zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    )
    offsets = iter(sorted(numbers.offset_dims))
    operand = []
    for dim, size in enumerate(operand_shape):
        if dim in batching:
            operand.append(indices[batching[dim]])
        elif dim in numbers.collapsed_slice_dims:
            operand.append(build.new(size, "sum" if dim in numbers.start_index_map else "whole"))
        else:
            offset = next(offsets)
            full = slice_sizes[dim] == size
            operand.append(build.new(size, "parallel" if full else "whole"))
            result[offset] = operand[-1] if full else build.new(slice_sizes[dim], "whole")
    return build.build([tuple(operand), indices], [tuple(result)], decides=True)


def _scatter(combine: Kind) -> Rule:
    """Dims of the operand may be sharded where an update covers one element of them or all; dims of the updates as
    `combine` says: `sum` counts the operand on one device only.
    """

    def rule(eqn: JaxprEqn) -> OpFactors:
        numbers = eqn.params["dimension_numbers"]
        operand_shape, indices_shape, updates_shape = map(shape_of, eqn.invars)
        build = FactorBuilder()
        batching = dict(
            zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True)
        )
        batched = set(batching.values())
        indices = tuple(
            build.new(size, "parallel" if dim in batched else combine)
            for dim, size in enumerate(indices_shape[:-1])
        )
        scattered = iter(indices)
        updates = [
            () if dim in numbers.update_window_dims else next(scattered)
            for dim in range(len(updates_shape))
        ]
        windows = iter(sorted(numbers.update_window_dims))
        operand = []
        for dim, size in enumerate(operand_shape):
            if dim in batching:
                operand.append(indices[batching[dim]])
            elif dim in numbers.inserted_window_dims:
                operand.append(
                    build.new(
                        size, "parallel" if dim in numbers.scatter_dims_to_operand_dims else "whole"
                    )
                )
            else:
                window = next(windows)
                full = updates_shape[window] == size
                operand.append(build.new(size, "parallel" if full else "whole"))
                updates[window] = operand[-1] if full else build.new(updates_shape[window], "whole")
        operands = [tuple(operand), (*indices, ()), tuple(updates)]
        return build.build(
            operands, [tuple(operand)], decides=True, once=(0,) if combine == "sum" else ()
        )

    return rule


RULES: dict[str, Rule] = {
    "gather": _gather,
    "scatter": _scatter("whole"),
    "scatter-add": _scatter("sum"),
    "scatter-max": _scatter("max"),
    "scatter-min": _scatter("min"),
    "scatter-mul": _scatter("whole"),
    "scatter-sub": _scatter("sum"),
}
