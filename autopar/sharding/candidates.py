"""Candidates of an equation: ways to shard its factors, and to complete the partial results that some leave."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

from jax.extend.core import JaxprEqn
from jax.extend.core.primitives import gather_p

from autopar.ir.spec import LogicalMesh, Spec, Specs, divides, local_shape
from autopar.primitives.factors import Assignment, OpFactors
from autopar.sharding.distinct_options import each_once
from autopar.sharding.mesh_costs import Step


@dataclass(frozen=True, slots=True)
class Option:
    """One candidate of an equation: how its factors are sharded and how partial results are completed.

    Attributes:
        results: specs of the completed results.
        collectives: what completes them.
        copied: bytes that completing them moves within device memory (a reduce_scatter along any but the leading dim).
    """

    assignment: Assignment
    results: tuple[Spec, ...]
    collectives: tuple[Step, ...] = ()
    copied: float = 0.0


@dataclass(frozen=True, eq=False, slots=True)
class Candidates:
    """The candidates of an equation, and for each operand and result its spec under each of them.

    They are made once for all equations alike and compared by identity: layers repeat, and so looking them up is cheap.
    """

    options: tuple[Option, ...]
    operands: tuple[Specs, ...]
    results: tuple[Specs, ...]

    @classmethod
    def of(cls, factors: OpFactors, options: Iterable[Option]) -> "Candidates":
        options = tuple(options)
        assignments = [o.assignment for o in options]
        operands = (
            each_once(lambda a, k=k: factors.operand_spec(k, a), assignments)
            for k in range(len(factors.operands))
        )
        results = (tuple(o.results[r] for o in options) for r in range(len(factors.results)))
        return cls(options, tuple(operands), tuple(results))


@lru_cache(maxsize=65536)
def followed(
    factors: OpFactors, leader: int, specs: Specs, mesh: LogicalMesh
) -> tuple[Assignment, ...] | None:
    """The assignment under each spec of the operand that an equation follows; None when it can't keep one of them."""
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
    """The ways to complete partial results: an all_reduce, or (when `scatter`) a reduce_scatter onto some dim per axis.

    `results` are (shape, bytes of an element) of each result. The plain all_reduce comes first.
    """
    specs = tuple(factors.result_spec(r, assignment) for r in range(len(results)))
    partial = factors.partial_axes(assignment)
    if not partial:
        return (Option(assignment, specs),)
    shape, _ = results[0]
    scatter = scatter and len(results) == 1 and not {"max", "min"} & set(factors.kinds)
    options = []
    for dims in product((None, *range(len(shape))) if scatter else (None,), repeat=len(partial)):
        spec = tuple(
            (*axes, *(axis for axis, onto in zip(partial, dims, strict=True) if onto == dim))
            for dim, axes in enumerate(specs[0])
        )
        if not divides(shape, spec, mesh):
            continue
        steps: list[Step] = []
        copied = 0.0
        for r, (size, width) in enumerate(results):
            local: float = prod(local_shape(size, specs[r], mesh)) * width
            for dim in (*range(len(shape)), None):
                axes = tuple(axis for axis, onto in zip(partial, dims, strict=True) if onto == dim)
                if axes and dim is not None:
                    steps.append(("reduce_scatter", local, axes))
                    copied += 2 * local if dim > 0 else 0.0
                    local /= mesh.ways(axes)
                elif axes:
                    steps.append(("all_reduce", local, axes))
        options.append(Option(assignment, (spec, *specs[1:]), tuple(steps), copied))
    return tuple(options)


def is_compilable(eqn: JaxprEqn, factors: OpFactors, option: Option) -> bool:
    """Return whether XLA's partitioner can compile an equation under an option.

    It aborts the process (jaxlib 0.11.2, spmd_partitioner_util.cc) where the partial sums of a gather are scattered onto a dim of its
    slices that is split already. A dim that the indices have may be split further.
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
    """The assignments that shard the factors in `marked` as far as can be, and no others."""

    def ways(assignment: Assignment) -> int:
        return mesh.ways(axis for axes in assignment for axis in axes)

    allowed = [a for a in assignments if all(not axes or f in marked for f, axes in enumerate(a))]
    most = max(map(ways, allowed))
    return [a for a in allowed if ways(a) == most]


def batch_on(
    assignments: Iterable[Assignment], marked: frozenset[int], axis: str
) -> list[Assignment]:
    """The assignments that shard a factor in `marked` along `axis`, if any does; otherwise all."""
    assignments = list(assignments)
    return [a for a in assignments if any(axis in a[f] for f in marked)] or assignments


def scattered_if_possible(options: Sequence[Option]) -> list[Option]:
    """Without all_reduces where a reduce_scatter completes the same partial results."""

    def reduces(option: Option) -> bool:
        return any(kind == "all_reduce" for kind, _, _ in option.collectives)

    scattered = {
        option.assignment for option in options if option.collectives and not reduces(option)
    }
    return [
        option for option in options if not (reduces(option) and option.assignment in scattered)
    ]
