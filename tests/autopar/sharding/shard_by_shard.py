"""Compare an equation on every sharding that its rule allows with one device.

Each device slices its shards of the operands, binds the primitive to them
(`autopar.primitives.shards`) and takes part in the collectives of the candidate.
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

from autopar.directives.shard_execution import slice_shard as shard_of
from autopar.ir.evaluate import evaluate
from autopar.ir.flatten import flatten
from autopar.ir.spec import LogicalMesh, Spec, partition_spec, replicated
from autopar.primitives import bind_shards, op_factors
from autopar.primitives.factors import Assignment, OpFactors
from autopar.sharding.candidates import Option, completions, is_compilable

FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def candidates(eqn: JaxprEqn, factors: OpFactors, mesh: LogicalMesh) -> list[Option]:
    """Return every assignment of the equation with every completion that XLA can compile."""
    results = tuple((v.aval.shape, v.aval.dtype.itemsize) for v in eqn.outvars)
    options = [
        o for a in factors.assignments(mesh) for o in completions(factors, a, results, True, mesh)
    ]
    return [option for option in options if is_compilable(eqn, factors, option)]


def equations(
    name: str, fun: Callable[..., Any], args: Sequence[Any]
) -> list[tuple[JaxprEqn, list[Any]]]:
    """Return the equations of primitive `name` in `fun`, each with its operands' values."""
    jaxpr = flatten(jax.make_jaxpr(fun)(*args))
    matches: list[tuple[JaxprEqn, list[Any]]] = []

    def record(number: int, operands: list[Any]) -> list[Any]:
        if jaxpr.eqns[number].primitive.name == name:
            matches.append((jaxpr.eqns[number], operands))
        return operands

    env = dict(
        zip((*jaxpr.constvars, *jaxpr.invars), (*jaxpr.consts, *jax.tree.leaves(args)), strict=True)
    )
    evaluate(enumerate(jaxpr.eqns), env, record, lambda _, results: results)
    return matches


def device_mesh(mesh: LogicalMesh) -> Mesh:
    devices = np.array(jax.devices()[: mesh.num_devices]).reshape(mesh.shape)
    return Mesh(devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.shape))


def check(eqn: JaxprEqn, operands: Sequence[Any], mesh: LogicalMesh) -> int:
    """Assert that every candidate of `eqn` on `mesh` equals one device, and return their number."""
    factors = op_factors(eqn)
    options = candidates(eqn, factors, mesh)

    def run(*values: Any) -> list[list[Any]]:
        @cache
        def shard(operand: int, spec: Spec) -> Any:
            # XLA merges a slice of a slice as if no index were out of bounds; the barrier
            # prevents it
            return lax.optimization_barrier(
                shard_of(values[operand], replicated(values[operand].ndim), spec, mesh)
            )

        @cache
        def partial(assignment: Assignment) -> list[Any]:
            return _partial_results(eqn, factors, assignment, mesh, shard)

        return [
            [_complete(x, r, factors, o) for r, x in enumerate(partial(o.assignment))]
            for o in options
        ]

    specs = [[partition_spec(spec) for spec in option.results] for option in options]
    mapped = jax.shard_map(
        run, mesh=device_mesh(mesh), in_specs=P(), out_specs=specs, check_vma=False
    )
    expected = _bind(eqn, operands)
    for option, results in zip(
        options, jax.jit(mapped, compiler_options=FAST)(*operands), strict=True
    ):
        for result, expected_value in zip(results, expected, strict=True):
            message = (
                f"{eqn.primitive.name} {eqn.params} with {factors} on {mesh.shape} under {option}"
            )
            np.testing.assert_allclose(
                result, expected_value, rtol=1e-5, atol=1e-5, err_msg=message
            )
    return len(options)


def _bind(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    result = eqn.primitive.bind(*operands, **eqn.params)
    return list(result) if eqn.primitive.multiple_results else [result]


def _partial_results(
    eqn: JaxprEqn,
    factors: OpFactors,
    assignment: Assignment,
    mesh: LogicalMesh,
    shard: Callable[[int, Spec], Any],
) -> list[Any]:
    """Return what one device computes from its shards under `assignment`."""
    specs = [factors.operand_spec(k, assignment) for k in range(len(eqn.invars))]
    shards = [shard(k, spec) for k, spec in enumerate(specs)]
    if partial := factors.partial_axes(assignment):
        first = lax.axis_index(partial) == 0
        shards = [
            jnp.where(first, s, jnp.zeros_like(s)) if k in factors.once else s
            for k, s in enumerate(shards)
        ]
    result_specs = [factors.result_spec(r, assignment) for r in range(len(eqn.outvars))]
    return bind_shards(eqn, specs, result_specs, shards, mesh)


def _complete(result: Any, number: int, factors: OpFactors, option: Option) -> Any:
    """Combine partial results with the collectives of the candidate and no others."""
    kind_of = {
        axis: kind
        for kind, axes in zip(factors.kinds, option.assignment, strict=True)
        for axis in axes
    }
    reduced = [
        axis for kind, _, axes in option.collectives if kind == "all_reduce" for axis in axes
    ]
    scattered = [
        axis for kind, _, axes in option.collectives if kind == "reduce_scatter" for axis in axes
    ]
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
