"""Candidates of an equation: ways to shard its factors and to complete partial results."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

import numpy as np
from jax.extend.core import JaxprEqn
from jax.extend.core.primitives import gather_p

from autopar.ir.spec import (
    LogicalMesh,
    Spec,
    Specs,
    axes_of,
    divides,
    local_shape,
    spec_with_axes,
)
from autopar.primitives.factors import Assignment, OpFactors
from autopar.sharding.distinct_options import each_once
from autopar.sharding.mesh_costs import Step
from simulator.work import CollectiveKind


@dataclass(frozen=True, slots=True)
class Option:
    """A candidate of an equation: how factors are sharded and partial results completed.

    Attributes:
        assignment: the mesh axes of its factors.
        results: specs of the completed results.
        collectives: the collectives that complete partial results.
        copied: bytes that they move within device memory; a reduce_scatter along any dim but the
            leading one transposes.
    """

    assignment: Assignment
    results: tuple[Spec, ...]
    collectives: tuple[Step, ...] = ()
    copied: float = 0.0


@dataclass(frozen=True, eq=False, slots=True)
class Candidates:
    """The candidates of an equation, with the spec of each operand and result under each of them.

    Equal equations share one object, which is compared by identity: layers repeat, and look-ups are
    cheap.

    Attributes:
        options: the candidates.
        operands: for each operand, its spec under each candidate.
        results: for each result, its spec under each candidate.
        partial_bytes: for each kind of collective that some candidate has, the bytes of the largest
            array that such a collective completes under each candidate.
    """

    options: tuple[Option, ...]
    operands: tuple[Specs, ...]
    results: tuple[Specs, ...]
    partial_bytes: Mapping[CollectiveKind, np.ndarray]

    @classmethod
    def of(cls, factors: OpFactors, options: Iterable[Option]) -> "Candidates":
        """Return the candidates of an equation with the given factors."""
        options = tuple(options)
        assignments = [o.assignment for o in options]
        operands = (
            each_once(lambda a, k=k: factors.operand_spec(k, a), assignments)
            for k in range(len(factors.operands))
        )
        results = (tuple(o.results[r] for o in options) for r in range(len(factors.results)))
        return cls(options, tuple(operands), tuple(results), _partial_bytes(options))


def _partial_bytes(options: Sequence[Option]) -> Mapping[CollectiveKind, np.ndarray]:
    """Return `Candidates.partial_bytes`."""
    found: dict[CollectiveKind, np.ndarray] = {}
    for number, option in enumerate(options):
        for kind, size, _ in option.collectives:
            sizes = found.setdefault(kind, np.zeros(len(options)))
            sizes[number] = max(sizes[number], size)
    return found


@lru_cache(maxsize=65536)
def followed(
    factors: OpFactors, leader: int, specs: Specs, mesh: LogicalMesh
) -> tuple[Assignment, ...] | None:
    """Return the assignment under each spec of the operand that an equation follows.

    None if the equation can't run under one of the specs.
    """
    assignments = each_once(lambda spec: factors.assign(leader, spec, mesh), specs)
    kept = tuple(assignment for assignment in assignments if assignment is not None)
    return kept if len(kept) == len(specs) else None


@lru_cache(maxsize=65536)
def completions(
    factors: OpFactors,
    assignment: Assignment,
    results: tuple[tuple[tuple[int, ...], int], ...],
    scatter: bool,
    mesh: LogicalMesh,
) -> tuple[Option, ...]:
    """Return the ways to complete partial results, the plain all_reduce first.

    Args:
        factors: factors of the equation.
        assignment: the mesh axes of the factors.
        results: shape and bytes per element of each result.
        scatter: whether each axis may reduce_scatter onto a dim instead.
        mesh: the logical mesh.
    """
    specs = tuple(factors.result_spec(r, assignment) for r in range(len(results)))
    partial = factors.partial_axes(assignment)
    if not partial:
        return (Option(assignment, specs),)
    shape, _ = results[0]
    scatter = scatter and len(results) == 1 and not {"max", "min"} & set(factors.kinds)
    options = []
    for dims in product((None, *range(len(shape))) if scatter else (None,), repeat=len(partial)):
        onto = spec_with_axes(partial, dims, len(shape))
        spec = tuple(old + new for old, new in zip(specs[0], onto, strict=True))
        if not divides(shape, spec, mesh):
            continue
        steps: list[Step] = []
        copied = 0.0
        for r, (size, width) in enumerate(results):
            num_bytes = prod(local_shape(size, specs[r], mesh)) * width
            more_steps, more_copied = completing_steps(num_bytes, partial, onto, mesh)
            steps += more_steps
            copied += more_copied
        options.append(Option(assignment, (spec, *specs[1:]), tuple(steps), copied))
    return tuple(options)


def completing_steps(
    num_bytes: float, partial: Sequence[str], onto: Spec, mesh: LogicalMesh
) -> tuple[list[Step], float]:
    """Return the collectives that complete a partial result, and the bytes that they copy.

    Args:
        num_bytes: the bytes of the result on one device.
        partial: the mesh axes along which it is partial.
        onto: for each dim the axes of a reduce_scatter onto it; an all_reduce has the others.
        mesh: the logical mesh.
    """
    steps: list[Step] = []
    copied = 0.0
    for dim, axes in enumerate(onto):
        if axes:
            steps.append(("reduce_scatter", num_bytes, axes))
            copied += 2 * num_bytes if dim > 0 else 0.0
            num_bytes /= mesh.ways(axes)
    scattered = axes_of(onto)
    if rest := tuple(axis for axis in partial if axis not in scattered):
        steps.append(("all_reduce", num_bytes, rest))
    return steps, copied


def is_compilable(eqn: JaxprEqn, factors: OpFactors, option: Option) -> bool:
    """Return whether XLA's partitioner can compile an equation under an option.

    jaxlib 0.11.2 aborts the process (spmd_partitioner_util.cc) if the partial sums of a gather are
    scattered onto an offset dim that is sharded already. Dims of the indices may be sharded
    further.
    """
    if eqn.primitive is not gather_p:
        return True
    own, (completed,) = factors.result_spec(0, option.assignment), option.results
    return not any(
        own[dim] and completed[dim] != own[dim]
        for dim in eqn.params["dimension_numbers"].offset_dims
    )


def batch_only(
    assignments: Sequence[Assignment], marked: frozenset[int], mesh: LogicalMesh
) -> list[Assignment]:
    """Return the assignments that shard only `marked` factors, over as many devices as possible."""

    def ways(assignment: Assignment) -> int:
        return mesh.ways(axis for axes in assignment for axis in axes)

    allowed = [a for a in assignments if all(not axes or f in marked for f, axes in enumerate(a))]
    most = max(map(ways, allowed))
    return [a for a in allowed if ways(a) == most]


def batch_on(
    assignments: Iterable[Assignment], marked: frozenset[int], axis: str
) -> list[Assignment]:
    """Return the assignments that shard a `marked` factor along `axis`; all if there are none."""
    assignments = list(assignments)
    return [a for a in assignments if any(axis in a[f] for f in marked)] or assignments


def scattered_if_possible(options: Sequence[Option]) -> list[Option]:
    """Drop all_reduces of partial results that a reduce_scatter can complete."""

    def reduces(option: Option) -> bool:
        return any(kind == "all_reduce" for kind, _, _ in option.collectives)

    scattered = {
        option.assignment for option in options if option.collectives and not reduces(option)
    }
    return [
        option for option in options if not (reduces(option) and option.assignment in scattered)
    ]
