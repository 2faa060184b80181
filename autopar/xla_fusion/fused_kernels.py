"""Which values XLA:GPU writes to memory, and which kernels compute the others.

A value that is not written is computed again by every kernel that reads it, and each of these
kernels reads its sources again. A cheap equation writes its result only where that moves fewer
bytes, which is what XLA's priority fusion weighs.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from jax.extend.core import JaxprEqn, Var
from jax.lax import optimization_barrier_p

from autopar.ir import control_flow
from autopar.ir.array_sizes import value_bytes
from autopar.ir.graph import aval_of, variables
from autopar.ir.step_graph import StepGraph
from autopar.primitives import record_of
from autopar.xla_fusion.epilogues import find_epilogues, find_scattered
from autopar.xla_fusion.reductions import fused_rows, is_cheap
from autopar.xla_fusion.step_values import Values
from autopar.xla_fusion.views import is_view

_HANDFUL = 3
"""Operations per element from which on a value is computed once before it is broadcast."""

_MOST_SOURCES = 16
"""A value with more sources than this is expensive to compute again."""


@dataclass(slots=True)
class Kernel:
    """A kernel of fused equations.

    Attributes:
        roots: numbers of the equations that write its results.
        region: the loop body, branch or microbatch loop that it runs in.
        space: the dims that it iterates over, without dims of size one.
        reduced: the positions in `space` of the dims that it reduces; None without a reduction.
        reads: the values that it reads, each with an (equation, operand) that reads it.
        makes: its results.
    """

    roots: list[int]
    region: object
    space: tuple[int, ...]
    reduced: tuple[int, ...] | None
    reads: dict[Var, tuple[int, int]] = field(default_factory=dict)
    makes: set[Var] = field(default_factory=set)


class FusedKernels:
    """The kernels of a step.

    Attributes:
        eqns: its equations.
        values: its values.
        epilogues: for each equation that is an epilogue, its product.
        ends: for each product with epilogues, the result of the last one.
        cheap: for each equation, whether it may be computed in every kernel that reads it.
        exponentials: see `Traffic`.
        rows: the reductions that are part of the kernel of their rows.
        scattered: results of scatters that are only added to another value.
        onto: values that scatters write onto.
        written: values that are written to memory.
        wanted: values that something other than a fused kernel reads from memory.
        kernels: for each root, its kernel.
        inside: for each equation, the roots of the kernels that compute it.
        region: for each equation, the region that it runs in.
        carried: final values of loop carries, which are updated in place; no kernel that writes
            one is joined with a kernel that writes another.
    """

    def __init__(self, step: StepGraph, row_padding: float) -> None:
        self.eqns = step.jaxpr.eqns
        self.values = values = Values(step)
        self.makers, self.readers = values.makers, values.readers
        self.epilogues = find_epilogues(values)
        self.ends = {
            product: self.eqns[number].outvars[0]
            for number, product in sorted(self.epilogues.items())
        }
        self.cheap = [is_cheap(eqn) for eqn in self.eqns]
        self.rows, self.exponentials = fused_rows(values, self.cheap, row_padding)
        self.scattered = find_scattered(values)
        self.onto: set[Var] = set()
        self.written: set[Var] = set(values.inputs)
        self.kernels: dict[int, Kernel] = {}
        self.inside: list[tuple[int, ...]] = [()] * len(self.eqns)
        self.region = _regions(step)
        finals = (eqn.invars[1] for eqn in self.eqns if eqn.primitive is control_flow.loop_result_p)
        self.carried = set(variables(finals))

        self._place()
        self._note_reads()

    def _users(self, var: Var) -> Iterable[int]:
        """Yield the kernels that compute `var` if it is not written.

        The kernel of a look-up into `var` needs `var` in memory.
        """
        for reader in self.readers[var]:
            eqn = self.eqns[reader]
            if not _is_lookup(eqn) or eqn.invars[0] is not var:
                yield from self.inside[reader]

    def _place(self) -> None:
        """Decide from the last equation to the first which values are written.

        For values that are not, record the kernels that compute them.
        """
        sources, work = self._sources(), self._work()
        wanted: set[Var] = set(self.values.outputs)
        for number in reversed(range(len(self.eqns))):
            eqn = self.eqns[number]
            operands = [v for v in map(self.values.shown, eqn.invars) if v is not None]
            fusion = record_of(eqn).fusion
            users = tuple(dict.fromkeys(k for var in eqn.outvars for k in self._users(var)))
            if eqn.primitive in control_flow.MARKERS or eqn.primitive is optimization_barrier_p:
                self.written.update(eqn.outvars)
                wanted.update(operands)
            elif number in self.epilogues:
                wanted.update(
                    self.values.shown(self.values.unspread(var)) or var for var in operands
                )
                self.written.update(
                    v for v in eqn.outvars if v is self.ends[self.epilogues[number]]
                )
            elif is_view(eqn):
                self.inside[number] = users
            elif number in self.rows or self.cheap[number]:
                forced = not (wanted | self.exponentials).isdisjoint(eqn.outvars)
                if not self.scattered.isdisjoint(variables(eqn.invars)):
                    self.onto.update(eqn.outvars)
                    forced = True
                if (
                    forced
                    or self._is_spread(number, work)
                    or (len(users) > 1 and self._is_kept(number, len(users), sources))
                ):
                    self._open(number, eqn)
                else:
                    self.inside[number] = users
            elif fusion in ("input", "reduction"):
                self._open(number, eqn)
            else:
                if number not in self.ends and self.scattered.isdisjoint(eqn.outvars):
                    self.written.update(eqn.outvars)
                fresh = fusion == "update" and self.values.is_constant(eqn.invars[0])
                wanted.update(
                    operands[1:] if fresh and isinstance(eqn.invars[0], Var) else operands
                )
        self.wanted = wanted

    def _note_reads(self) -> None:
        """Record the written values that each kernel reads, by the equations inside it."""
        for number, eqn in enumerate(self.eqns):
            if is_view(eqn):
                continue
            first = 1 if _is_lookup(eqn) else 0  # a lookup reads only some elements of its array
            for operand, atom in enumerate(eqn.invars[first:], first):
                var = self.values.shown(atom)
                if var is None or var not in self.written:
                    continue
                for kernel in self.inside[number]:
                    self.kernels[kernel].reads.setdefault(var, (number, operand))

    def _open(self, number: int, eqn: JaxprEqn) -> None:
        """Make the equation the root of a kernel, which writes its results."""
        self.written.update(eqn.outvars)
        self.inside[number] = (number,)
        is_input = record_of(eqn).fusion in ("input", "reduction")
        reduces = is_input and "axes" in eqn.params and number not in self.rows
        over = aval_of(eqn.invars[0] if reduces else eqn.outvars[0]).shape
        axes = None
        if reduces:
            lost = set(eqn.params.get("axes", ()))
            axes = tuple(sum(1 for d in range(axis) if over[d] > 1) for axis in sorted(lost))
        space = tuple(size for size in over if size > 1)
        self.kernels[number] = Kernel(
            [number], self.region[number], space, axes, makes=set(eqn.outvars)
        )

    def _is_kept(
        self, number: int, users: int, sources: Mapping[Var, frozenset[Var] | None]
    ) -> bool:
        """Return whether a value is written rather than computed again by each of its readers."""
        eqn = self.eqns[number]
        if not record_of(eqn).is_recomputed:
            return True
        value_sources = sources[eqn.outvars[0]]
        if value_sources is None:
            return True
        source_bytes = sum(map(value_bytes, value_sources))
        result_bytes = sum(map(value_bytes, eqn.outvars))
        return users * source_bytes > source_bytes + (users + 1) * result_bytes

    def _work(self) -> list[int]:
        """Return the operations per element of each equation since the last written value."""
        found: list[int] = []
        for number, eqn in enumerate(self.eqns):
            if not self.cheap[number] or number in self.epilogues:
                found.append(0)
                continue
            makers = (
                self.makers.get(a)
                for a in eqn.invars
                if isinstance(a, Var) and aval_of(a).size == aval_of(eqn.outvars[0]).size
            )
            before = max((found[maker] for maker in makers if maker is not None), default=0)
            found.append(before + (record_of(eqn).movement is None))
        return found

    def _is_spread(self, number: int, work: Sequence[int]) -> bool:
        """Return whether a result that takes much arithmetic per element is broadcast to many."""
        (var, *_) = self.eqns[number].outvars
        wide = 16 * aval_of(var).size
        return work[number] >= _HANDFUL and any(
            aval_of(self.eqns[reader].outvars[0]).size >= wide
            for reader in self.readers[var]
            if self.inside[reader]
        )

    def _sources(self) -> dict[Var, frozenset[Var] | None]:
        """Return the values that each value is computed from, if no more is written than must be.

        None for values with more than `_MOST_SOURCES` sources.
        """
        found: dict[Var, frozenset[Var] | None] = {}
        for number, eqn in enumerate(self.eqns):
            through = number not in self.epilogues and (
                is_view(eqn) or number in self.rows or self.cheap[number]
            )
            for r, var in enumerate(eqn.outvars):
                if number in self.rows:  # its reader reads the row anyway
                    found[var] = frozenset()
                    continue
                if (
                    not through
                    or eqn.primitive in control_flow.MARKERS
                    or eqn.primitive is optimization_barrier_p
                ):
                    found[var] = frozenset((var,))
                    continue
                atoms = eqn.invars[r : r + 1] if record_of(eqn).passes_through else eqn.invars
                parts = [found.get(var, frozenset((var,))) for var in variables(atoms)]
                union = frozenset().union(*(p for p in parts if p is not None))
                found[var] = None if None in parts or len(union) > _MOST_SOURCES else union
        return found


def _is_lookup(eqn: JaxprEqn) -> bool:
    """Return whether a kernel of its own reads only the elements that it returns."""
    record = record_of(eqn)
    return record.reads_part and record.fusion == "input"


def _regions(step: StepGraph) -> list[object]:
    """Return the region of each equation: its loop body or branch, in or after microbatches."""
    body = {number for number, _ in step.microbatching.body} if step.microbatching else ()
    found, around = [], [-1]
    for number, eqn in enumerate(step.jaxpr.eqns):
        if eqn.primitive in control_flow.OPENING:
            around.append(number)
        elif eqn.primitive is control_flow.branch_p:
            around[-1] = number
        elif eqn.primitive is control_flow.end_p:
            around.pop()
        found.append((around[-1], number in body))
    return found
