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
from jax.extend.core import JaxprEqn, Literal, Var
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
    eqns = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == name]
    values = dict(
        zip((*jaxpr.constvars, *jaxpr.invars), (*jaxpr.consts, *jax.tree.leaves(args)), strict=True)
    )
    if all(isinstance(atom, Literal) or atom in values for eqn in eqns for atom in eqn.invars):
        return [
            (eqn, [a.val if isinstance(a, Literal) else values[a] for a in eqn.invars])
            for eqn in eqns
        ]

    def operands_of(values: dict[Var, Any]) -> list[list[Any]]:
        matches: list[list[Any]] = []

        def record(number: int, operands: list[Any]) -> list[Any]:
            if jaxpr.eqns[number].primitive.name == name:
                matches.append(operands)
            return operands

        evaluate(enumerate(jaxpr.eqns), values, record, lambda _, results: results)
        return matches

    variables, arrays = list(values), list(values.values())
    operands = jax.jit(lambda arrays: operands_of(dict(zip(variables, arrays, strict=True))))(
        arrays
    )
    return list(zip(eqns, operands, strict=True))


def device_mesh(mesh: LogicalMesh) -> Mesh:
    devices = np.array(jax.devices()[: mesh.num_devices]).reshape(mesh.shape)
    return Mesh(devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.shape))


def check(eqn: JaxprEqn, operands: Sequence[Any], mesh: LogicalMesh) -> int:
    """Assert that every candidate of `eqn` on `mesh` equals one device, and return their number."""
    return check_all([(eqn, operands)], mesh)[0]


def check_all(
    cases: Sequence[tuple[JaxprEqn, Sequence[Any]]], mesh: LogicalMesh, tolerance: float = 1e-5
) -> list[int]:
    """Check equations with the values of their operands as `check` does, in a single program.

    Args:
        cases: the equations and their operands.
        mesh: the mesh.
        tolerance: relative and absolute error that results may have.
    """
    factors = [op_factors(eqn) for eqn, _ in cases]
    options = [candidates(eqn, op, mesh) for (eqn, _), op in zip(cases, factors, strict=True)]

    def run(values: Any) -> Any:
        return [
            _all_results(eqn, op, of_eqn, mesh, arrays)
            for (eqn, _), op, of_eqn, arrays in zip(cases, factors, options, values, strict=True)
        ]

    specs = [
        [[partition_spec(spec) for spec in option.results] for option in of_eqn]
        for of_eqn in options
    ]
    mapped = jax.shard_map(
        run, mesh=device_mesh(mesh), in_specs=P(), out_specs=specs, check_vma=False
    )
    arrays = [list(operands) for _, operands in cases]
    results = jax.jit(mapped, compiler_options=FAST)(arrays)
    on_one_device = jax.jit(
        lambda values: [_bind(eqn, x) for (eqn, _), x in zip(cases, values, strict=True)]
    )(arrays)
    for (eqn, _), op, of_eqn, of_options, expected in zip(
        cases, factors, options, results, on_one_device, strict=True
    ):
        for option, arrays in zip(of_eqn, of_options, strict=True):
            message = f"{eqn.primitive.name} {eqn.params} with {op} on {mesh.shape} under {option}"
            for array, value in zip(arrays, expected, strict=True):
                np.testing.assert_allclose(array, value, tolerance, tolerance, err_msg=message)
    return [len(of_eqn) for of_eqn in options]


def _all_results(
    eqn: JaxprEqn,
    factors: OpFactors,
    options: Sequence[Option],
    mesh: LogicalMesh,
    values: Sequence[Any],
) -> list[list[Any]]:
    """Return what one device computes under each option, from the whole operands."""

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
        [_complete(x, r, factors, o) for r, x in enumerate(partial(o.assignment))] for o in options
    ]


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
