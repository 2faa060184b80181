"""What an equation does to array dims, told through *factors*, and the shardings that follow from it.

A factor is an index of the equation written as a loop nest, as in an einsum: `out[b, m, n] += lhs[b, m, k] * rhs[b, k, n]`
has the factors b, m, n, k. A mesh axis that is given to a factor shards every dim in which the factor is outermost.
Factors that are summed over leave partial results, which an all_reduce or reduce_scatter completes. (Shardy describes its
operations in the same way.)
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

from autopar.ir.spec import LogicalMesh, Spec, divides

Kind = Literal["parallel", "sum", "max", "min", "whole"]
"""Each shard on its own; partial results to be added (or the largest, or smallest, taken); or must not be sharded at all."""

PARTIAL: frozenset[Kind] = frozenset({"sum", "max", "min"})
"""The kinds that leave partial results."""

type Dims = tuple[tuple[int, ...], ...]
"""For each dim of an array, its factors, major first; a dim of size one has none."""

type Assignment = tuple[tuple[str, ...], ...]
"""For each factor the mesh axes it is sharded over."""


@dataclass(frozen=True, slots=True)
class OpFactors:
    """One equation in terms of its factors.

    Attributes:
        sizes: trip count of each factor.
        kinds: what sharding each factor means.
        operands: the factors of each operand's dims.
        results: the factors of each result's dims.
        decides: True when the choice is worth a decision of its own, False when it can follow its largest operand.
        once: operands that count on one device only, the first, where results are partial sums: the array that a scatter
            adds to. (XLA's partitioner does so, too.)
        leader: the operand to follow, when it must be this one.
    """

    sizes: tuple[int, ...]
    kinds: tuple[Kind, ...]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    decides: bool = False
    once: tuple[int, ...] = ()
    leader: int | None = None

    def assignments(self, mesh: LogicalMesh) -> list[Assignment]:
        """Every way to give each mesh axis to one factor or to none, with all dims divided evenly; none first."""
        axes = [axis for axis in mesh.axis_names if mesh.sizes[axis] > 1]
        free = [f for f, kind in enumerate(self.kinds) if kind != "whole"]
        found = []
        for chosen in product((None, *free), repeat=len(axes)):
            factors = range(len(self.sizes))
            assignment = tuple(
                tuple(a for a, c in zip(axes, chosen, strict=True) if c == f) for f in factors
            )
            if self.allows(assignment, mesh):
                found.append(assignment)
        return found

    def allows(self, assignment: Assignment, mesh: LogicalMesh) -> bool:
        """Whether every sharded factor is divided evenly and is outermost wherever it occurs."""
        if not divides(self.sizes, assignment, mesh):
            return False
        for dims in (*self.operands, *self.results):
            for factors in dims:
                inner = factors[1:] if factors and self.sizes[factors[0]] > 1 else ()
                if any(assignment[f] for f in inner):
                    return False
        return True

    def assign(self, operand: int, spec: Spec, mesh: LogicalMesh) -> Assignment | None:
        """The assignment under which `operand` has exactly `spec`, or None when the equation can't keep it."""
        chosen: dict[int, tuple[str, ...]] = {}
        for factors, axes in zip(self.operands[operand], spec, strict=True):
            if not axes:
                continue
            if not factors or self.kinds[factors[0]] == "whole":
                return None
            chosen[factors[0]] = axes
        assignment = tuple(chosen.get(f, ()) for f in range(len(self.sizes)))
        return assignment if self.allows(assignment, mesh) else None

    def operand_spec(self, operand: int, assignment: Assignment) -> Spec:
        return _spec(self.operands[operand], assignment)

    def result_spec(self, result: int, assignment: Assignment) -> Spec:
        """Spec of a result, completed: partial results are whole on every device of their group."""
        return _spec(self.results[result], assignment)

    def partial_axes(self, assignment: Assignment) -> tuple[str, ...]:
        """The mesh axes over which results are partial."""
        kinds = zip(self.kinds, assignment, strict=True)
        return tuple(axis for kind, axes in kinds if kind in PARTIAL for axis in axes)


def assignment_of(
    factors: OpFactors, operands: Sequence[Spec | None], results: Sequence[Spec | None] = ()
) -> Assignment:
    """The assignment under which an equation reads its operands with these specs (None: whatever it needs).

    The specs of results count for the factors that no operand with a spec has, less the axes that operands use: those were
    scattered onto the result.
    """
    chosen: dict[int, tuple[str, ...]] = {}
    used: set[str] = set()

    def add(dims: Sequence[tuple[int, ...]], spec: Spec, known: frozenset[int]) -> None:
        for of, axes in zip(dims, spec, strict=True):
            free = tuple(axis for axis in axes if axis not in used)
            if free and of and of[0] not in known and of[0] not in chosen:
                chosen[of[0]] = free
                used.update(free)

    for dims, spec in zip(factors.operands, operands, strict=True):
        if spec is not None:
            add(dims, spec, frozenset())
    known = zip(factors.operands, operands, strict=True)
    read = frozenset(of[0] for dims, spec in known if spec is not None for of in dims if of)
    for dims, spec in zip(factors.results, results, strict=False):
        if spec is not None:
            add(dims, spec, read)
    return tuple(chosen.get(f, ()) for f in range(len(factors.sizes)))


def _spec(dims: Dims, assignment: Assignment) -> Spec:
    return tuple(assignment[factors[0]] if factors else () for factors in dims)


class FactorBuilder:
    """Collects the factors of one equation; `build` gives the frozen result."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.kinds: list[Kind] = []

    def new(self, size: int, kind: Kind = "parallel") -> tuple[int, ...]:
        """A dim made of one new factor (none, when it has size one)."""
        if size == 1:
            return ()
        self.sizes.append(size)
        self.kinds.append(kind)
        return (len(self.sizes) - 1,)

    def dims(self, shape: Sequence[int], kind: Kind = "parallel") -> Dims:
        return tuple(self.new(size, kind) for size in shape)

    def build(
        self,
        operands: Iterable[Dims],
        results: Iterable[Dims],
        decides: bool = False,
        once: tuple[int, ...] = (),
    ) -> OpFactors:
        return OpFactors(
            tuple(self.sizes), tuple(self.kinds), tuple(operands), tuple(results), decides, once
        )
