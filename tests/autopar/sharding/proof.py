"""Runs an equation under every sharding that its rule allows, shard by shard, and compares with the whole.

Each device slices its shards of the operands, binds the primitive to them and takes part in the collectives that the candidate
claims. Primitives whose parameters speak of shapes or positions get those of the shard, below.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from autopar.evaluate import evaluate
from autopar.flatten import flatten
from autopar.sharding.candidates import Option, completions
from autopar.sharding.factors import Assignment, OpFactors
from autopar.sharding.rules import op_factors
from autopar.sharding.spec import LogicalMesh, Spec, local_shape, partition_spec

FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

type Shapes = Sequence[tuple[int, ...]]


def candidates(eqn: JaxprEqn, factors: OpFactors, mesh: LogicalMesh) -> list[Option]:
    """Every assignment of the equation with every way to complete its results."""
    results = tuple((v.aval.shape, v.aval.dtype.itemsize) for v in eqn.outvars)
    return [o for a in factors.assignments(mesh) for o in completions(factors, a, results, True, mesh)]


def equations(name: str, fun: Callable[..., Any], args: Sequence[Any]) -> list[tuple[JaxprEqn, list[Any]]]:
    """The equations of primitive `name` in `fun`, each with the values of its operands."""
    jaxpr = flatten(jax.make_jaxpr(fun)(*args))
    found: list[tuple[JaxprEqn, list[Any]]] = []

    def keep(number: int, operands: list[Any]) -> list[Any]:
        if jaxpr.eqns[number].primitive.name == name:
            found.append((jaxpr.eqns[number], operands))
        return operands

    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*jaxpr.consts, *jax.tree.leaves(args)), strict=True))
    evaluate(enumerate(jaxpr.eqns), env, keep, lambda _, results: results)
    return found


def device_mesh(mesh: LogicalMesh) -> Mesh:
    devices = np.array(jax.devices()[: mesh.num_devices]).reshape(mesh.shape)
    return Mesh(devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.shape))


def check(eqn: JaxprEqn, operands: Sequence[Any], mesh: LogicalMesh) -> int:
    """Assert that every candidate of `eqn` on `mesh` gives what the equation gives on one device; their number."""
    factors = op_factors(eqn)
    options = candidates(eqn, factors, mesh)

    def run(*values: Any) -> list[list[Any]]:
        @cache
        def shard(operand: int, spec: Spec) -> Any:
            # XLA merges a slice of a slice as if no index were out of bounds: keep it from doing so.
            return lax.optimization_barrier(_shard(values[operand], spec, mesh))

        @cache
        def partial(assignment: Assignment) -> list[Any]:
            return _partial_results(eqn, factors, assignment, mesh, shard)

        return [[_complete(x, r, factors, o) for r, x in enumerate(partial(o.assignment))] for o in options]

    specs = [[partition_spec(spec) for spec in option.results] for option in options]
    mapped = jax.shard_map(run, mesh=device_mesh(mesh), in_specs=P(), out_specs=specs, check_vma=False)
    expected = _bind(eqn, operands)
    for option, results in zip(options, jax.jit(mapped, compiler_options=FAST)(*operands), strict=True):
        for result, wanted in zip(results, expected, strict=True):
            message = f"{eqn.primitive.name} {eqn.params} with {factors} on {mesh.shape} under {option}"
            np.testing.assert_allclose(result, wanted, rtol=1e-5, atol=1e-5, err_msg=message)
    return len(options)


def _bind(eqn: JaxprEqn, operands: Sequence[Any], **params: Any) -> list[Any]:
    result = eqn.primitive.bind(*operands, **{**eqn.params, **params})
    return list(result) if eqn.primitive.multiple_results else [result]


def _partial_results(
    eqn: JaxprEqn, factors: OpFactors, assignment: Assignment, mesh: LogicalMesh, shard: Callable[[int, Spec], Any]
) -> list[Any]:
    """What one device computes of its shards under `assignment`."""
    specs = [factors.operand_spec(k, assignment) for k in range(len(eqn.invars))]
    shards = [shard(k, spec) for k, spec in enumerate(specs)]
    if partial := factors.partial_axes(assignment):
        first = lax.axis_index(partial) == 0
        shards = [jnp.where(first, s, jnp.zeros_like(s)) if k in factors.once else s for k, s in enumerate(shards)]
    result_specs = [factors.result_spec(r, assignment) for r in range(len(eqn.outvars))]
    shapes = [local_shape(v.aval.shape, spec, mesh) for v, spec in zip(eqn.outvars, result_specs, strict=True)]
    local = _LOCAL.get(eqn.primitive.name)
    results = local(eqn, specs, result_specs, shapes, shards) if local else _bind(eqn, shards)
    assert [r.shape for r in results] == shapes, f"{eqn.primitive.name}: shards {shapes} claimed, {results} found"
    return results


def _shard(value: Any, spec: Spec, mesh: LogicalMesh) -> Any:
    for dim, axes in enumerate(spec):
        if axes:
            size = value.shape[dim] // mesh.ways(axes)
            value = lax.dynamic_slice_in_dim(value, lax.axis_index(axes) * size, size, dim)
    return value


def _complete(result: Any, number: int, factors: OpFactors, option: Option) -> Any:
    """Combine partial results with the claimed collectives and no others."""
    kind_of = {axis: kind for kind, axes in zip(factors.kinds, option.assignment, strict=True) for axis in axes}
    reduced = [axis for kind, _, axes in option.collectives if kind == "all_reduce" for axis in axes]
    scattered = [axis for kind, _, axes in option.collectives if kind == "reduce_scatter" for axis in axes]
    dtype = result.dtype
    result = result.astype(np.int32) if dtype == np.bool_ else result
    for axis in dict.fromkeys(scattered):
        (dim,) = [dim for dim, axes in enumerate(option.results[number]) if axis in axes]
        if kind_of[axis] == "sum":
            result = lax.psum_scatter(result, axis, scatter_dimension=dim, tiled=True)
        else:
            size = result.shape[dim] // lax.axis_size(axis)
            result = _REDUCE[kind_of[axis]](result, axis)
            result = lax.dynamic_slice_in_dim(result, lax.axis_index(axis) * size, size, dim)
    for axis in dict.fromkeys(reduced):
        result = _REDUCE[kind_of[axis]](result, axis)
    return result.astype(dtype)


_REDUCE = {"sum": lax.psum, "max": lax.pmax, "min": lax.pmin}


# Shards of primitives that have shapes or positions in their parameters. Each takes the equation, the specs of operands and
# results (before completion), the shapes of the results' shards, and the shards of the operands.


def _with_shape(parameter: str) -> Callable[..., list[Any]]:
    return lambda eqn, _in, _out, shapes, shards: _bind(eqn, shards, **{parameter: shapes[0]})


def _iota(eqn: JaxprEqn, _in: Any, specs: Sequence[Spec], shapes: Shapes, shards: Any) -> list[Any]:
    (made,) = _bind(eqn, shards, shape=shapes[0])
    dim = eqn.params["dimension"]
    return [made + (lax.axis_index(specs[0][dim]) * shapes[0][dim]).astype(made.dtype) if specs[0][dim] else made]


def _slice(eqn: JaxprEqn, _in: Any, specs: Sequence[Spec], shapes: Shapes, shards: Any) -> list[Any]:
    limits = [
        size if axes else limit
        for limit, size, axes in zip(eqn.params["limit_indices"], shapes[0], specs[0], strict=True)
    ]
    return _bind(eqn, shards, limit_indices=tuple(limits))


def _tile(eqn: JaxprEqn, _in: Any, _out: Any, shapes: Shapes, shards: Any) -> list[Any]:
    reps = [result // size for result, size in zip(shapes[0], shards[0].shape, strict=True)]
    return _bind(eqn, shards, reps=tuple(reps))


def _conv(eqn: JaxprEqn, _in: Any, _out: Any, shapes: Shapes, shards: Any) -> list[Any]:
    numbers = eqn.params["dimension_numbers"]
    batch = shards[0].shape[numbers.lhs_spec[0]] // shapes[0][numbers.out_spec[0]]
    channels = shards[0].shape[numbers.lhs_spec[1]] // shards[1].shape[numbers.rhs_spec[1]]
    return _bind(eqn, shards, batch_group_count=batch, feature_group_count=channels)


def _gather(eqn: JaxprEqn, specs: Sequence[Spec], _out: Any, shapes: Shapes, shards: Any) -> list[Any]:
    """Look up the indices that this device has; zeros elsewhere."""
    numbers, whole = eqn.params["dimension_numbers"], eqn.invars[0].aval.shape
    operand, indices = shards
    sizes = [
        local if axes and size == full else size
        for size, full, local, axes in zip(eqn.params["slice_sizes"], whole, operand.shape, specs[0], strict=True)
    ]
    sizes = [1 if dim in numbers.operand_batching_dims else size for dim, size in enumerate(sizes)]
    dims = [d for d in numbers.start_index_map if d in numbers.collapsed_slice_dims]
    indices, own = _own(numbers.start_index_map, dims, eqn, specs[0], operand, indices)
    (result,) = _bind(eqn, (operand, indices), slice_sizes=tuple(sizes))
    batch = [dim for dim in range(result.ndim) if dim not in numbers.offset_dims]
    return [jnp.where(lax.broadcast_in_dim(own, result.shape, batch), result, jnp.zeros_like(result))]


def _scatter(eqn: JaxprEqn, specs: Sequence[Spec], _out: Any, shapes: Shapes, shards: Any) -> list[Any]:
    """Write what belongs to this device; drop the rest."""
    numbers = eqn.params["dimension_numbers"]
    operand, indices, updates = shards
    dims = [d for d in numbers.scatter_dims_to_operand_dims if d in numbers.inserted_window_dims]
    indices, own = _own(numbers.scatter_dims_to_operand_dims, dims, eqn, specs[0], operand, indices)
    indices = jnp.where(own[..., None], indices, max(operand.shape, default=0))
    return _bind(eqn, (operand, indices, updates), mode=lax.GatherScatterMode.FILL_OR_DROP)


def _own(
    index_map: Sequence[int], dims: Sequence[int], eqn: JaxprEqn, spec: Spec, operand: Any, indices: Any
) -> tuple[Any, Any]:
    """Indices into this device's shard of the operand along `dims`, and which of them fall into it."""
    own = jnp.ones(indices.shape[:-1], bool)
    for column, dim in enumerate(index_map):
        if dim in dims and spec[dim]:
            index, size = indices[..., column], operand.shape[dim]
            if eqn.params["mode"] == lax.GatherScatterMode.CLIP:
                index = jnp.clip(index, 0, eqn.invars[0].aval.shape[dim] - 1)
            index = index - lax.axis_index(spec[dim]).astype(index.dtype) * size
            inside = (index >= 0) & (index < size)
            indices, own = indices.at[..., column].set(jnp.where(inside, index, 0)), own & inside
    return indices, own


_LOCAL: dict[str, Callable[..., list[Any]]] = {
    "broadcast_in_dim": _with_shape("shape"),
    "conv_general_dilated": _conv,
    "dynamic_slice": _with_shape("slice_sizes"),
    "gather": _gather,
    "iota": _iota,
    "reshape": _with_shape("new_sizes"),
    "slice": _slice,
    "tile": _tile,
    **dict.fromkeys(("scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul", "scatter-sub"), _scatter),
}
