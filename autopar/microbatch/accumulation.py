"""Run a step in microbatches: its body in a loop, and the sums that the loop accumulates.

Along *deferred* mesh axes each device runs the loop on its own examples, as if devices were more microbatches, and what they
accumulated is completed once, after the loop. Along the other axes the compiler partitions the body, and completes in it
whatever it must.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Var

from autopar.ir import graph
from autopar.ir.evaluate import Hook
from autopar.ir.spec import AnyMesh, Spec, axes_of, partition_spec
from autopar.ir.step_graph import Combine, Loop, StepGraph
from autopar.microbatch.batch_rows import cut_rows

type Env = dict[Var, Any]


def accumulate(step: StepGraph, env: Env, evaluate: Callable[..., None], pin: Hook) -> None:
    """Run the body for one microbatch after the other and add to `env` what they accumulate."""
    assert step.microbatching is not None
    count, combine = step.num_micro_batches, _combine(step)
    for loop in step.microbatching.loops:
        totals = _loop(step, loop, count, env, evaluate, pin)
        env.update(
            (var, finish_total(combine[var], total, count, count)) for var, total in totals.items()
        )


@dataclass(frozen=True, slots=True)
class LocalAccumulation:
    """How each device accumulates over examples of its own.

    Attributes:
        parts: the step for one device's examples of a microbatch, `StepGraph.cut`.
        axes: the mesh axes along which devices do so.
        inputs: where the inputs of the step are. What is sharded along `axes` is gathered for each microbatch.
        results: where the accumulated values go; a reduce_scatter completes them along the axes that they have there.
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
    """As `accumulate`, with one synchronisation along `accumulation.axes`, after the last microbatch.

    Right whatever the shardings are: each device computes with plain arrays along `accumulation.axes`, and how their results are put
    together was proved by `microbatch.split` for as many microbatches.
    """
    parts = accumulation.parts
    micro = parts.microbatching
    assert micro is not None
    combine = _combine(parts)
    inputs = [
        ((*accumulation.axes,), *spec[1:])
        if i in step.batch
        else spec_along(spec, accumulation.axes)
        for i, spec in enumerate(accumulation.inputs)
    ]
    results = [spec_along(spec, accumulation.axes) for spec in accumulation.results]
    sharded = {
        var: spec
        for i, (var, spec) in enumerate(zip(parts.jaxpr.invars, inputs, strict=True))
        if i not in step.batch and axes_of(spec)
    }

    def one(eqns: Any, inner: Env) -> None:
        inner.update((var, gather(inner[var], spec)) for var, spec in sharded.items())
        evaluate(eqns, inner)

    accumulated = _accumulated(parts)
    places = dict(zip(accumulated, results, strict=True))

    def local(*shards: jax.Array) -> list[jax.Array]:
        inner = dict(zip(parts.jaxpr.invars, shards, strict=True))
        inner.update(zip(parts.jaxpr.constvars, parts.jaxpr.consts, strict=True))
        count = step.num_micro_batches
        for loop in micro.loops:
            for var, total in _loop(parts, loop, count, inner, one, pin).items():
                value = finish_total(combine[var], total, count, parts.num_micro_batches)
                inner[var] = (
                    value
                    if combine[var] == "same"
                    else complete_sum(value, places[var], accumulation.axes)
                )
        return [inner[var] for var in accumulated]

    ones = (axis for axis, size in accumulation.mesh.shape.items() if size == 1)
    run = jax.shard_map(
        local,
        mesh=accumulation.mesh,
        in_specs=tuple(map(partition_spec, inputs)),
        out_specs=list(map(partition_spec, results)),
        axis_names={*accumulation.axes, *ones},
        check_vma=False,  # the equations were traced without a mesh, and nothing is differentiated through this
    )
    values = run(*(env[var] for var in step.jaxpr.invars))
    env.update(zip(_accumulated(step), values, strict=True))


def _loop(
    step: StepGraph, loop: Loop, count: int, env: Env, evaluate: Callable[..., None], pin: Hook
) -> dict[Var, jax.Array]:
    """Return what `count` microbatches, each like the batch of `step`, add up to.

    Every device finds its part of each microbatch in its own shard (`autopar.microbatch.batch_rows`).
    """
    micro = step.microbatching
    assert micro is not None
    combine = _combine(step)
    results = [var for _, eqn in loop.marks for var in eqn.outvars]
    batch = [step.jaxpr.invars[i] for i in sorted(step.batch)]
    zeros = [
        value
        for number, eqn in loop.marks
        for value in pin(
            number, [jnp.zeros(graph.aval_of(v).shape, graph.aval_of(v).dtype) for v in eqn.outvars]
        )
    ]

    def add(totals: list[jax.Array], shares: list[jax.Array]) -> tuple[list[jax.Array], None]:
        inner = env | dict(zip(batch, shares, strict=True))
        evaluate(loop.body, inner)
        values = [
            v
            for number, eqn in loop.marks
            for v in pin(number, [graph.read(atom, inner) for atom in eqn.invars])
        ]
        kept = zip(results, totals, values, strict=True)
        return [add_to_total(combine[var], total, value, count) for var, total, value in kept], None

    totals, _ = jax.lax.scan(add, zeros, [cut_rows(env[var], count, micro.chunks) for var in batch])
    return dict(zip(results, totals, strict=True))


def _accumulated(step: StepGraph) -> list[Var]:
    assert step.microbatching is not None
    return [var for _, eqn in step.microbatching.marks for var in eqn.outvars]


def _combine(step: StepGraph) -> dict[Var, Combine]:
    assert step.microbatching is not None
    return dict(zip(_accumulated(step), step.microbatching.combine, strict=True))


def add_to_total(how: Combine, total: jax.Array, value: jax.Array, count: int) -> jax.Array:
    """Return the running total of `count` microbatches after one more.

    Of a mean in float16 each microbatch adds its share, so that the total overflows only if the mean does.
    """
    if how == "same":
        return value.astype(total.dtype)
    if not _adds_shares(how, total):
        return total + value
    wide = jnp.promote_types(total.dtype, jnp.float32)  # one rounding for both operations
    return (total.astype(wide) + value.astype(wide) / count).astype(total.dtype)


def finish_total(how: Combine, total: jax.Array, count: int, parts: int) -> jax.Array:
    """Return what a complete total contributes to the whole batch's value.

    Args:
        how: how microbatches are put together.
        total: what `count` microbatches added up to.
        parts: microbatches of this size in the whole batch; more than `count` where devices accumulate apart.
    """
    if how != "mean":
        return total
    return (total / (parts // count if _adds_shares(how, total) else parts)).astype(total.dtype)


def _adds_shares(how: Combine, total: jax.Array) -> bool:
    """Return whether to add up shares of a mean rather than divide a sum: in float16, where the sum may overflow. In other dtypes the
    sum costs less, since XLA adds a product to it in place."""
    return how == "mean" and total.dtype == jnp.float16


def spec_along(spec: Spec, axes: tuple[str, ...]) -> Spec:
    """The part of `spec` that concerns `axes`."""
    return tuple(tuple(axis for axis in dim if axis in axes) for dim in spec)


def gather(shard: jax.Array, spec: Spec) -> jax.Array:
    """The whole of what is sharded as `spec` says, inside of `jax.shard_map`."""
    for dim, axes in enumerate(spec):
        if axes:
            shard = jax.lax.all_gather(shard, axes, axis=dim, tiled=True)
    return shard


def complete_sum(partial: jax.Array, spec: Spec, axes: tuple[str, ...]) -> jax.Array:
    """The sum over devices along `axes`, left where `spec` wants it."""
    for dim, scattered in enumerate(spec):
        if scattered:
            partial = jax.lax.psum_scatter(partial, scattered, scatter_dimension=dim, tiled=True)
    rest = tuple(axis for axis in axes if axis not in axes_of(spec))
    return jax.lax.psum(partial, rest) if rest else partial
