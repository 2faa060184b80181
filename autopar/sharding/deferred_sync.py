"""Deferred gradient synchronization: once per step instead of once per microbatch.

Along *deferred* mesh axes each device runs its own examples through all microbatches. In the body
of the microbatch loop these axes shard only examples, sums over examples stay partial along them,
and the accumulated values are completed after the loop (`autopar.microbatch.accumulation`). That
takes one synchronization instead of one per microbatch, and memory for gradients that are not
sharded along the deferred axes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, product
from math import prod

from autopar.ir.control_flow import OPENING
from autopar.ir.graph import aval_of
from autopar.ir.spec import LogicalMesh, Spec, Specs, divides, local_shape, spec_with_axes
from autopar.ir.step_graph import MicrobatchError, StepGraph
from autopar.primitives.factors import PARTIAL, Assignment, OpFactors
from autopar.sharding.candidates import Option, completing_steps, completions

type Axes = tuple[str, ...]


def candidates(step: StepGraph, mesh: LogicalMesh, data_parallel: bool) -> Iterator[Axes]:
    """Yield the sets of axes that may be deferred: those that divide a microbatch evenly.

    Several microbatches save synchronizations; with one there is nothing to defer.
    For pure data parallelism only the set of all axes counts. So it does if a loop or branch of a
    microbatch acts, as by `jax.debug.print`: JAX can't lower it on shards that XLA is to partition
    along other axes.
    """
    micro = step.microbatching
    if micro is None or step.num_micro_batches == 1:
        return
    acts = any(eqn.effects and eqn.primitive in OPENING for _, eqn in micro.body)
    axes = mesh.nontrivial_axes
    rows = [aval_of(step.jaxpr.invars[i]).shape[0] for i in step.batch]
    for count in range(len(axes), len(axes) - 1 if data_parallel or acts else 0, -1):
        for deferred in combinations(axes, count):
            if deferred and all(n % mesh.ways(deferred) == 0 for n in rows):
                yield deferred


def check_parts(step: StepGraph, mesh: LogicalMesh, deferred: Axes) -> None:
    """Check that microbatches can be split further, into the parts of the devices.

    If the compiler partitions the body along other axes, the equations of the parts must be those
    that were planned.

    Raises:
        MicrobatchError: they can't be split, or have other equations.
    """
    if not deferred or step.divides_evenly(mesh.ways(deferred)):
        return
    parts = step.split_microbatches(mesh.ways(deferred))
    is_partitioned = mesh.ways(deferred) < mesh.num_devices
    if is_partitioned and step.equation_forms != parts.equation_forms:
        raise MicrobatchError(
            "the step does different things for the few examples that a device has of a microbatch"
        )


def fits(assignment: Assignment, marked: frozenset[int], deferred: Axes) -> bool:
    """Return whether the deferred axes shard `marked` factors (if there are any) and no others."""
    along_batch = {axis for f in marked for axis in assignment[f]}
    used = {axis for axes in assignment for axis in axes}
    return (
        used.intersection(deferred)
        == (set(deferred) if marked else set())
        == along_batch.intersection(deferred)
    )


def leads(spec: Spec, deferred: Axes) -> bool:
    """Return whether deferred axes come first in each dim: a device's part is contiguous then."""
    flags = ([axis in deferred for axis in axes] for axes in spec)
    return all(sorted(of_dim, reverse=True) == of_dim for of_dim in flags)


def partial_completions(
    factors: OpFactors,
    assignment: Assignment,
    results: tuple[tuple[tuple[int, ...], int], ...],
    scatter: bool,
    mesh: LogicalMesh,
    deferred: Axes,
) -> tuple[Option, ...]:
    """Return `candidates.completions`, with results that stay partial along the deferred axes."""
    rest = tuple(
        tuple(axis for axis in axes if kind not in PARTIAL or axis not in deferred)
        for kind, axes in zip(factors.kinds, assignment, strict=True)
    )
    return tuple(
        replace(o, assignment=assignment)
        for o in completions(factors, rest, results, scatter, mesh)
    )


def synchronizations(
    shape: Sequence[int],
    width: int,
    sources: Specs,
    scatter: bool,
    mesh: LogicalMesh,
    deferred: Axes,
) -> list[tuple[Spec, Option]]:
    """Return the ways to complete an accumulated value, each with the spec that it starts from.

    Each deferred axis is completed by an all_reduce, or by a reduce_scatter onto some dim.

    Args:
        shape: shape of the value.
        width: bytes per element.
        sources: specs that it may start from.
        scatter: whether a reduce_scatter is allowed.
        mesh: the logical mesh.
        deferred: the deferred axes.
    """
    ways = []
    for source in dict.fromkeys(sources):
        for dims in product(
            (None, *range(len(shape))) if scatter else (None,), repeat=len(deferred)
        ):
            onto = spec_with_axes(deferred, dims, len(shape))
            spec = tuple(new + old for new, old in zip(onto, source, strict=True))
            if not divides(shape, spec, mesh):
                continue
            num_bytes = prod(local_shape(shape, source, mesh)) * width
            steps, copied = completing_steps(num_bytes, deferred, onto, mesh)
            ways.append((source, Option((), (spec,), tuple(steps), copied)))
    return ways
