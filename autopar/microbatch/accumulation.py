"""Run the body of a step in a loop over microbatches, and accumulate gradients and losses.

Along *deferred* mesh axes each device accumulates locally: it runs the loop on its own examples, as
if they were further microbatches, and one synchronization after the loop completes the sums. Along
the other axes the compiler partitions the body and synchronizes within it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Var

from autopar.ir import graph
from autopar.ir.evaluate import Hook
from autopar.ir.graph import Atom
from autopar.ir.spec import AnyMesh, Spec, axes_of, partition_spec
from autopar.ir.step_graph import Combine, Loop, StepGraph
from autopar.microbatch.batch_rows import put_rows, rows_dim, take_rows

type Env = dict[Var, Any]
"""Values by variable."""


def accumulate(step: StepGraph, env: Env, evaluate: Callable[..., None], pin: Hook) -> None:
    """Run the body for one microbatch after the other.

    Args:
        step: a step with microbatches.
        env: values of the step. The accumulated values are added.
        evaluate: evaluates numbered equations and adds their results to an env.
        pin: constrains the shardings of the operands or totals of a numbered equation.
    """
    assert step.microbatching is not None
    count, combine = step.num_micro_batches, _combine(step)
    env.update((total, env[var]) for total, var in _whole_inputs(step).items())
    for loop in step.microbatching.loops:
        totals = _loop(step, loop, count, env, evaluate, pin)
        env.update(
            (var, finish_total(combine[var], total, count, count)) for var, total in totals.items()
        )


@dataclass(frozen=True, slots=True)
class LocalAccumulation:
    """Local accumulation: each device accumulates over its own examples.

    Attributes:
        parts: the step for one device's examples of a microbatch, by
            `StepGraph.split_microbatches`.
        mesh: the mesh of the step.
        axes: the deferred mesh axes.
        inputs: specs of the inputs of the step. Inputs that are sharded along `axes` are gathered
            for each microbatch.
        results: specs of the accumulated values. A reduce_scatter completes those that are sharded
            along `axes`, an all_reduce the others.
    """

    parts: StepGraph
    mesh: AnyMesh
    axes: tuple[str, ...]
    inputs: tuple[Spec, ...]
    results: tuple[Spec, ...]


def accumulate_locally(
    step: StepGraph,
    accumulation: LocalAccumulation,
    env: Env,
    evaluate: Callable[..., None],
    pin: Hook,
) -> None:
    """Accumulate with one synchronization along `accumulation.axes`, after the last microbatch.

    The result doesn't depend on shardings: each device computes on unsharded arrays along these
    axes, and `split` has derived how to combine the results of that many microbatches.

    Args:
        step: a step with microbatches.
        accumulation: the local accumulation.
        env: values of the step. The accumulated values are added.
        evaluate: evaluates numbered equations and adds their results to an env.
        pin: constrains the shardings of the operands or totals of a numbered equation.
    """
    parts = accumulation.parts
    micro = parts.microbatching
    assert micro is not None
    combine, accumulated = _combine(parts), _accumulated(parts)
    inputs, results = _specs_along_axes(step, accumulation)
    sharded = {
        var: spec
        for i, (var, spec) in enumerate(zip(parts.jaxpr.invars, inputs, strict=True))
        if i not in step.batch and axes_of(spec)
    }

    def evaluate_gathered(eqns: Any, inner: Env) -> None:
        inner.update((var, gather(inner[var], spec)) for var, spec in sharded.items())
        evaluate(eqns, inner)

    spec_of = dict(zip(accumulated, results, strict=True))

    def local(*shards: jax.Array) -> list[jax.Array]:
        inner = dict(zip(parts.jaxpr.invars, shards, strict=True))
        inner.update(zip(parts.jaxpr.constvars, parts.jaxpr.consts, strict=True))
        inner.update((total, inner[var]) for total, var in _whole_inputs(parts).items())
        count = step.num_micro_batches
        for loop in micro.loops:
            for var, total in _loop(parts, loop, count, inner, evaluate_gathered, pin).items():
                value = finish_total(combine[var], total, count, parts.num_micro_batches)
                inner[var] = (
                    value
                    if combine[var] in ("same", "rows")
                    else complete_sum(value, spec_of[var], accumulation.axes)
                )
        return [inner[var] for var in accumulated]

    ones = (axis for axis, size in accumulation.mesh.shape.items() if size == 1)
    run = jax.shard_map(
        local,
        mesh=accumulation.mesh,
        in_specs=tuple(map(partition_spec, inputs)),
        out_specs=list(map(partition_spec, results)),
        axis_names={*accumulation.axes, *ones},
        # The equations are traced without a mesh, and the shard_map is not differentiated.
        check_vma=False,
    )
    values = run(*(env[var] for var in step.jaxpr.invars))
    env.update(zip(_accumulated(step), values, strict=True))


def _specs_along_axes(
    step: StepGraph, accumulation: LocalAccumulation
) -> tuple[list[Spec], list[Spec]]:
    """Return the specs of inputs and accumulated values along the axes of an accumulation.

    The batch is sharded along all of them, and so are results with a row for each example.
    """
    axes, parts = accumulation.axes, accumulation.parts
    inputs = [
        ((*axes,), *spec_along(spec, axes)[1:]) if i in step.batch else spec_along(spec, axes)
        for i, spec in enumerate(accumulation.inputs)
    ]
    rows = _row_dims(parts)
    results = []
    for var, spec in zip(_accumulated(parts), accumulation.results, strict=True):
        dim = rows.get(var)
        if dim is None:
            results.append(spec_along(spec, axes))
        else:
            results.append((*((),) * dim, axes, *((),) * (len(spec) - dim - 1)))
    return inputs, results


def _loop(
    step: StepGraph, loop: Loop, count: int, env: Env, evaluate: Callable[..., None], pin: Hook
) -> dict[Var, jax.Array]:
    """Return the totals of a loop over `count` microbatches, each of the size of `step`'s batch.

    Every device has its part of each microbatch in its own shard (`autopar.microbatch.batch_rows`).
    """
    micro = step.microbatching
    assert micro is not None
    combine, rows, whole_inputs = _combine(step), _row_dims(step), _whole_inputs(step)
    batch = [step.jaxpr.invars[i] for i in sorted(step.batch)]

    def zeros(atom: Atom, var: Var) -> jax.Array:
        shape = graph.aval_of(atom).shape
        if (dim := rows.get(var)) is not None:
            shape = (*shape[:dim], count * shape[dim], *shape[dim + 1 :])
        return jnp.zeros(shape, graph.aval_of(var).dtype)

    def add(totals: list[jax.Array], index: jax.Array) -> tuple[list[jax.Array], None]:
        inner = env | {var: take_rows(env[var], index, count, micro.chunks) for var in batch}
        evaluate(loop.body, inner)
        values: Env = {}
        for number, eqn in loop.marks:
            operands = pin(number, [graph.read(atom, inner) for atom in eqn.invars])
            values.update(zip(eqn.outvars, operands, strict=True))
        sums = [
            put_rows(total, values[var], index, count, micro.chunks)
            if var in rows
            else add_to_total(combine[var], total, values[var], count)
            for var, total in zip(results, totals, strict=True)
        ]
        return sums, None

    initial: Env = {}
    for number, eqn in loop.marks:
        start = pin(number, list(map(zeros, eqn.invars, eqn.outvars)))
        initial.update(zip(eqn.outvars, start, strict=True))
    results = [var for var in initial if var not in whole_inputs]
    totals, _ = jax.lax.scan(add, [initial[var] for var in results], jnp.arange(count))
    return dict(zip(results, totals, strict=True))


def _whole_inputs(step: StepGraph) -> dict[Var, Var]:
    """Return for each total that is a whole input of the batch that input."""
    assert step.microbatching is not None
    combine, inputs = _combine(step), {step.jaxpr.invars[i] for i in step.batch}
    return {
        var: atom
        for _, eqn in step.microbatching.marks
        for atom, var in zip(eqn.invars, eqn.outvars, strict=True)
        if combine[var] == "rows" and isinstance(atom, Var) and atom in inputs
    }


def _row_dims(step: StepGraph) -> dict[Var, int]:
    """Return the dim of the rows of each total that has the rows of all examples."""
    assert step.microbatching is not None
    combine = _combine(step)
    return {
        var: rows_dim(graph.aval_of(var).shape, graph.aval_of(atom).shape)
        for _, eqn in step.microbatching.marks
        for atom, var in zip(eqn.invars, eqn.outvars, strict=True)
        if combine[var] == "rows"
    }


def _accumulated(step: StepGraph) -> list[Var]:
    assert step.microbatching is not None
    return [var for _, eqn in step.microbatching.marks for var in eqn.outvars]


def _combine(step: StepGraph) -> dict[Var, Combine]:
    assert step.microbatching is not None
    return dict(zip(_accumulated(step), step.microbatching.combine, strict=True))


def add_to_total(how: Combine, total: jax.Array, value: jax.Array, count: int) -> jax.Array:
    """Return the running total after one more microbatch.

    A microbatch adds `1 / count` of its value to a mean in float16, so that the total overflows
    only if the mean does.

    Args:
        how: how the values of microbatches are combined.
        total: the running total.
        value: the value of the microbatch.
        count: number of microbatches.
    """
    if how == "same":
        return value.astype(total.dtype)
    if not _adds_shares(how, total):
        return total + value
    # Division and addition in a wider dtype round once.
    wide = jnp.promote_types(total.dtype, jnp.float32)
    return (total.astype(wide) + value.astype(wide) / count).astype(total.dtype)


def finish_total(how: Combine, total: jax.Array, count: int, parts: int) -> jax.Array:
    """Return the contribution of a complete total to the whole batch's value.

    Args:
        how: how the values of microbatches are combined.
        total: the total of `count` microbatches.
        count: number of microbatches in the total.
        parts: number of such microbatches in the whole batch; more than `count` if devices
            accumulate locally.
    """
    if how != "mean":
        return total
    return (total / (parts // count if _adds_shares(how, total) else parts)).astype(total.dtype)


def _adds_shares(how: Combine, total: jax.Array) -> bool:
    """Return whether to add shares of a mean instead of dividing the sum by the count.

    In float16 the sum may overflow. In other dtypes the sum is cheaper, because XLA adds products
    to it in place.
    """
    return how == "mean" and total.dtype == jnp.float16


def spec_along(spec: Spec, axes: tuple[str, ...]) -> Spec:
    """Return `spec` without the axes that are not in `axes`."""
    return tuple(tuple(axis for axis in dim if axis in axes) for dim in spec)


def gather(shard: jax.Array, spec: Spec) -> jax.Array:
    """Return the unsharded array of a shard inside of `jax.shard_map`.

    Args:
        shard: this device's shard.
        spec: the axes along which each dim is sharded.
    """
    for dim, axes in enumerate(spec):
        if axes:
            shard = jax.lax.all_gather(shard, axes, axis=dim, tiled=True)
    return shard


def complete_sum(partial: jax.Array, spec: Spec, axes: tuple[str, ...]) -> jax.Array:
    """Return the sum over the devices along `axes`, inside of `jax.shard_map`.

    Args:
        partial: this device's summand.
        spec: the axes along which each dim of the sum is sharded.
        axes: the axes to sum over.
    """
    for dim, scattered in enumerate(spec):
        if scattered:
            partial = jax.lax.psum_scatter(partial, scattered, scatter_dimension=dim, tiled=True)
    rest = tuple(axis for axis in axes if axis not in axes_of(spec))
    return jax.lax.psum(partial, rest) if rest else partial
