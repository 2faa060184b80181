"""Factors: how an equation acts on array dims, and which shardings follow from that.

A factor is an index of the equation written as a loop nest, as in an einsum:
`out[b, m, n] += lhs[b, m, k] * rhs[b, k, n]` has the factors b, m, n and k. A mesh axis that is
assigned to a factor shards every dim in which the factor is outermost. Factors that are summed over
leave partial results, which an all_reduce or reduce_scatter completes. Shardy describes its
operations in the same way.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

from autopar.ir.spec import LogicalMesh, Spec, divides

Kind = Literal["parallel", "sum", "max", "min", "whole"]
"""What sharding a factor means.

parallel: shards are independent. sum, max, min: results are partial, and completed by that
operation. whole: the factor must not be sharded.
"""

PARTIAL: frozenset[Kind] = frozenset({"sum", "max", "min"})
"""The kinds of factors that leave partial results."""

type Dims = tuple[tuple[int, ...], ...]
"""The factors of each dim of an array, major first; a dim of size one has none."""

type Assignment = tuple[tuple[str, ...], ...]
"""The mesh axes that each factor is sharded over."""


@dataclass(frozen=True, slots=True)
class OpFactors:
    """One equation in terms of its factors.

    Attributes:
        sizes: trip count of each factor.
        kinds: what sharding each factor means.
        operands: the factors of each operand's dims.
        results: the factors of each result's dims.
        decides: True if the sharding of the equation is a decision of its own, False if the
            equation follows the sharding of its largest operand.
        once: operands that only the first device adds where results are partial sums: the array
            that a scatter adds to. XLA's partitioner does the same.
        leader: the operand to follow; None: the largest.
    """

    sizes: tuple[int, ...]
    kinds: tuple[Kind, ...]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    decides: bool = False
    once: tuple[int, ...] = ()
    leader: int | None = None

    def assignments(self, mesh: LogicalMesh) -> list[Assignment]:
        """Return every assignment of mesh axes to factors that divides all dims evenly.

        An axis is assigned to one factor or to none. The assignment of no axis is the first.
        """
        axes = mesh.nontrivial_axes
        free = [f for f, kind in enumerate(self.kinds) if kind != "whole"]
        allowed = []
        for chosen in product((None, *free), repeat=len(axes)):
            factor_of = dict(zip(axes, chosen, strict=True))
            assignment = tuple(
                tuple(axis for axis in axes if factor_of[axis] == factor)
                for factor in range(len(self.sizes))
            )
            if self.allows(assignment, mesh):
                allowed.append(assignment)
        return allowed

    def allows(self, assignment: Assignment, mesh: LogicalMesh) -> bool:
        """Return whether each sharded factor is divided evenly and is outermost in its dims."""
        if not divides(self.sizes, assignment, mesh):
            return False
        for dims in (*self.operands, *self.results):
            for factors in dims:
                inner = factors[1:] if factors and self.sizes[factors[0]] > 1 else ()
                if any(assignment[f] for f in inner):
                    return False
        return True

    def assign(self, operand: int, spec: Spec, mesh: LogicalMesh) -> Assignment | None:
        """Return the assignment under which `operand` has exactly `spec`; None if there is none."""
        chosen: dict[int, tuple[str, ...]] = {}
        for factors, axes in zip(self.operands[operand], spec, strict=True):
            if not axes:
                continue
            if not factors or self.kinds[factors[0]] == "whole":
                return None
            chosen[factors[0]] = axes
        assignment = self.assignment(chosen)
        return assignment if self.allows(assignment, mesh) else None

    def assignment(self, axes: Mapping[int, tuple[str, ...]]) -> Assignment:
        """Return the assignment of these mesh axes to factors; other factors have none."""
        return tuple(axes.get(factor, ()) for factor in range(len(self.sizes)))

    def operand_spec(self, operand: int, assignment: Assignment) -> Spec:
        """Return the spec that an operand must have under an assignment."""
        return _spec(self.operands[operand], assignment)

    def result_spec(self, result: int, assignment: Assignment) -> Spec:
        """Return the spec of a result after its partial sums are completed by an all_reduce."""
        return _spec(self.results[result], assignment)

    def partial_axes(self, assignment: Assignment) -> tuple[str, ...]:
        """Return the mesh axes over which results are partial."""
        kinds = zip(self.kinds, assignment, strict=True)
        return tuple(axis for kind, axes in kinds if kind in PARTIAL for axis in axes)


def assignment_of(
    factors: OpFactors, operands: Sequence[Spec | None], results: Sequence[Spec | None]
) -> Assignment:
    """Return the assignment under which an equation has these specs.

    Args:
        factors: the factors of the equation.
        operands: specs of its operands; None for a spec that the others imply.
        results: specs of its results. They decide only the factors that no operand with a spec has,
            without the axes that operands use: over those the result was scattered.
    """
    chosen: dict[int, tuple[str, ...]] = {}
    used: set[str] = set()

    def add(dims: Dims, spec: Spec, decided: frozenset[int]) -> None:
        for dim, axes in zip(dims, spec, strict=True):
            free = tuple(axis for axis in axes if axis not in used)
            if free and dim and dim[0] not in decided and dim[0] not in chosen:
                chosen[dim[0]] = free
                used.update(free)

    for dims, spec in zip(factors.operands, operands, strict=True):
        if spec is not None:
            add(dims, spec, frozenset())
    with_spec = [
        dims for dims, spec in zip(factors.operands, operands, strict=True) if spec is not None
    ]
    of_operands = frozenset(dim[0] for dims in with_spec for dim in dims if dim)
    for dims, spec in zip(factors.results, results, strict=False):
        if spec is not None:
            add(dims, spec, of_operands)
    return factors.assignment(chosen)


def _spec(dims: Dims, assignment: Assignment) -> Spec:
    return tuple(assignment[factors[0]] if factors else () for factors in dims)


class FactorBuilder:
    """Collects the factors of one equation; `build` returns the frozen result."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.kinds: list[Kind] = []

    def new(self, size: int, kind: Kind = "parallel") -> tuple[int, ...]:
        """Return a dim of one new factor; a dim of size one has no factor."""
        if size == 1:
            return ()
        self.sizes.append(size)
        self.kinds.append(kind)
        return (len(self.sizes) - 1,)

    def dims(self, shape: Sequence[int], kind: Kind = "parallel") -> Dims:
        """Return a new factor for each dim of `shape`."""
        return tuple(self.new(size, kind) for size in shape)

    def build(
        self,
        operands: Iterable[Dims],
        results: Iterable[Dims],
        decides: bool = False,
        once: tuple[int, ...] = (),
    ) -> OpFactors:
        """Return the factors of the equation; see `OpFactors` for the arguments."""
        return OpFactors(
            tuple(self.sizes), tuple(self.kinds), tuple(operands), tuple(results), decides, once
        )
