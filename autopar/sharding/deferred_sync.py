"""Completing gradients once per step instead of once per microbatch.

Along *deferred* mesh axes every device takes examples of its own through all microbatches. So in the body of the loop these axes
divide examples and nothing else, sums over examples stay partial along them, and what is accumulated is completed after the
loop (`autopar.microbatch.accumulation` runs it). That costs one synchronisation instead of one per microbatch, and the memory of gradients
that are whole along the deferred axes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, product
from math import prod

from autopar.ir.graph import aval_of
from autopar.ir.spec import LogicalMesh, Spec, Specs, axes_of, divides, local_shape
from autopar.ir.step_graph import MicrobatchError, StepGraph
from autopar.primitives.factors import PARTIAL, Assignment, OpFactors
from autopar.sharding.candidates import Option, completions
from autopar.sharding.mesh_costs import Step

type Axes = tuple[str, ...]


def candidates(step: StepGraph, mesh: LogicalMesh, data_parallel: bool) -> Iterator[Axes]:
    """The axes that could be deferred: every combination that divides a microbatch; only all axes for pure data parallelism."""
    if step.microbatching is None:
        return
    axes = [axis for axis in mesh.axis_names if mesh.sizes[axis] > 1]
    rows = [aval_of(step.jaxpr.invars[i]).shape[0] for i in step.batch]
    for count in range(len(axes), len(axes) - 1 if data_parallel else 0, -1):
        for deferred in combinations(axes, count):
            if deferred and all(n % mesh.ways(deferred) == 0 for n in rows):
                yield deferred


def check_parts(step: StepGraph, mesh: LogicalMesh, deferred: Axes) -> None:
    """Raise MicrobatchError unless the step can run so: what examples make must come in parts as small as a device's.

    Where the compiler still partitions the body, along other axes, its equations must be those that were planned.
    """
    if not deferred:
        return
    parts = step.split_microbatches(mesh.ways(deferred))
    planned = [eqn.primitive for eqn in step.jaxpr.eqns]
    if mesh.ways(deferred) < mesh.num_devices and planned != [
        eqn.primitive for eqn in parts.jaxpr.eqns
    ]:
        raise MicrobatchError(
            "the step does different things for the few examples that a device has of a microbatch"
        )


def fits(assignment: Assignment, marked: frozenset[int], deferred: Axes) -> bool:
    """Whether the deferred axes divide examples, if the equation has any (its factors in `marked`), and nothing else."""
    along_batch = {axis for f in marked for axis in assignment[f]}
    used = {axis for axes in assignment for axis in axes}
    return (
        used.intersection(deferred)
        == (set(deferred) if marked else set())
        == along_batch.intersection(deferred)
    )


def leads(spec: Spec, deferred: Axes) -> bool:
    """Whether the deferred axes come first in each dim: each device then has a part in one piece."""
    flags = ([axis in deferred for axis in axes] for axes in spec)
    return all(sorted(each, reverse=True) == each for each in flags)


def partial_completions(
    factors: OpFactors,
    assignment: Assignment,
    results: tuple[tuple[tuple[int, ...], int], ...],
    scatter: bool,
    mesh: LogicalMesh,
    deferred: Axes,
) -> tuple[Option, ...]:
    """As `candidates.completions`, results staying partial along the deferred axes."""
    rest = tuple(
        tuple(axis for axis in axes if kind not in PARTIAL or axis not in deferred)
        for kind, axes in zip(factors.kinds, assignment, strict=True)
    )
    return tuple(
        replace(o, assignment=assignment)
        for o in completions(factors, rest, results, scatter, mesh)
    )


def synchronisations(
    shape: Sequence[int],
    width: int,
    sources: Specs,
    scatter: bool,
    mesh: LogicalMesh,
    deferred: Axes,
) -> list[tuple[Spec, Option]]:
    """The ways to complete an accumulated value, each with the spec that it starts from: an all_reduce, or a reduce_scatter
    onto some dim, for each deferred axis. `width` is bytes of an element."""
    found = []
    for source in dict.fromkeys(sources):
        for dims in product(
            (None, *range(len(shape))) if scatter else (None,), repeat=len(deferred)
        ):
            onto = [
                tuple(a for a, d in zip(deferred, dims, strict=True) if d == dim)
                for dim in range(len(shape))
            ]
            spec = tuple(new + old for new, old in zip(onto, source, strict=True))
            if not divides(shape, spec, mesh):
                continue
            local: float = prod(local_shape(shape, source, mesh)) * width
            steps: list[Step] = []
            copied = 0.0
            for dim, axes in enumerate(onto):
                if axes:
                    steps.append(("reduce_scatter", local, axes))
                    copied += 2 * local if dim > 0 else 0.0
                    local /= mesh.ways(axes)
            if rest := tuple(axis for axis in deferred if axis not in axes_of(tuple(onto))):
                steps.append(("all_reduce", local, rest))
            found.append((source, Option((), (spec,), tuple(steps), copied)))
    return found
