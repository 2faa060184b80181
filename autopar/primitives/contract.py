"""Products summed over dims: matrix products and convolutions."""

from collections.abc import Collection

from jax.extend.core import JaxprEqn

from autopar.primitives.factors import FactorBuilder, OpFactors
from autopar.primitives.rule_helpers import Rule, shape_of


def _dot_general(eqn: JaxprEqn) -> OpFactors:
    return _product(eqn, eqn.params["dimension_numbers"])


def _ragged_dot_general(eqn: JaxprEqn) -> OpFactors:
    """A product whose rows (or inner elements) belong to groups of sizes known only when it runs: those dims are whole."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    return _product(
        eqn,
        numbers.dot_dimension_numbers,
        numbers.lhs_ragged_dimensions,
        numbers.rhs_group_dimensions,
    )


def _product(
    eqn: JaxprEqn,
    dimension_numbers: tuple,
    ragged: Collection[int] = (),
    groups: Collection[int] = (),
) -> OpFactors:
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    lhs_shape, rhs_shape = shape_of(eqn.invars[0]), shape_of(eqn.invars[1])
    build = FactorBuilder()
    lhs: dict[int, tuple[int, ...]] = {}
    rhs: dict[int, tuple[int, ...]] = {}
    for left, right in zip(lhs_batch, rhs_batch, strict=True):
        lhs[left] = rhs[right] = build.new(
            lhs_shape[left], "whole" if left in ragged else "parallel"
        )
    for left, right in zip(lhs_contract, rhs_contract, strict=True):
        lhs[left] = rhs[right] = build.new(lhs_shape[left], "whole" if left in ragged else "sum")
    lhs_free = [dim for dim in range(len(lhs_shape)) if dim not in lhs]
    rhs_free = [dim for dim in range(len(rhs_shape)) if dim not in rhs and dim not in groups]
    lhs.update(
        (dim, build.new(lhs_shape[dim], "whole" if dim in ragged else "parallel"))
        for dim in lhs_free
    )
    rhs.update((dim, build.new(rhs_shape[dim])) for dim in rhs_free)
    rhs.update((dim, build.new(rhs_shape[dim], "whole")) for dim in groups)
    result = [lhs[d] for d in lhs_batch] + [lhs[d] for d in lhs_free] + [rhs[d] for d in rhs_free]
    operands = [
        tuple(lhs[d] for d in range(len(lhs_shape))),
        tuple(rhs[d] for d in range(len(rhs_shape))),
    ]
    sizes = [build.dims(shape_of(atom), "whole") for atom in eqn.invars[2:]]
    if (
        extra := len(shape_of(eqn.outvars[0])) - len(result)
    ) > 0:  # a ragged inner dim: one product per group
        result = [build.new(size, "whole") for size in shape_of(eqn.outvars[0])[:extra]] + result
    return build.build([*operands, *sizes], [tuple(result)], decides=True)


def _conv_general_dilated(eqn: JaxprEqn) -> OpFactors:
    """Batch, channels in (summed) and channels out may be sharded, groups of channels or of batch with them; space is whole.

    Gradients are convolutions, too: that of the kernel sums over the examples, its channels in.
    """
    params = eqn.params
    groups, batch_groups = params["feature_group_count"], params["batch_group_count"]
    numbers = params["dimension_numbers"]
    lhs_shape, rhs_shape, out_shape = (shape_of(atom) for atom in (*eqn.invars, *eqn.outvars))
    build = FactorBuilder()
    group = build.new(groups * batch_groups)  # one of the two is 1
    examples = build.new(lhs_shape[numbers.lhs_spec[0]] // batch_groups)
    channels = build.new(rhs_shape[numbers.rhs_spec[1]], "sum")
    features = build.new(rhs_shape[numbers.rhs_spec[0]] // (groups * batch_groups))
    in_groups, in_batch_groups = (group, ()) if groups > 1 else ((), group)

    def dims(
        shape: tuple[int, ...],
        spec: tuple[int, ...],
        first: tuple[int, ...],
        second: tuple[int, ...],
    ):
        found = {spec[0]: first, spec[1]: second}
        return tuple(
            found[dim] if dim in found else build.new(size, "whole")
            for dim, size in enumerate(shape)
        )

    lhs = dims(lhs_shape, numbers.lhs_spec, in_batch_groups + examples, in_groups + channels)
    rhs = dims(rhs_shape, numbers.rhs_spec, group + features, channels)
    out = dims(out_shape, numbers.out_spec, examples, group + features)
    return build.build([lhs, rhs], [out], decides=True)


RULES: dict[str, Rule] = {
    "conv_general_dilated": _conv_general_dilated,
    "dot_general": _dot_general,
    "ragged_dot_general": _ragged_dot_general,
}
