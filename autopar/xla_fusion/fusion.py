"""Fusion: which equations share a kernel, and what each kernel reads and writes.

A model of what XLA:GPU does with a step:

- A value that is not written is computed again by every kernel that reads it, and each of these
  kernels reads its sources again. A cheap equation writes its result only where that moves fewer
  bytes, which is what XLA's priority fusion weighs.
- Kernels over the same elements become one kernel with several results if they read the same value,
  or one reads what the other writes (XLA's multi-output fusion).
- A reduction of rows whose result is only read by an equation on those rows is part of the kernel
  of the rows. A softmax, which has two, is one kernel if its rows are hardly padded; otherwise the
  kernel ends at the exponentials.
- A product or convolution adds a bias, and another addend of its result, before it writes the
  result (epilogues of cuBLAS and cuDNN).

The model works on whole arrays, so that all shardings share it. `experiments.validation.fidelity`
compares it with compiled programs.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import prod

from jax.extend.core import JaxprEqn, Var
from jax.extend.core.primitives import dot_general_p, exp_p
from jax.lax import optimization_barrier_p, split_p

from autopar.ir import control_flow
from autopar.ir.array_sizes import value_bytes
from autopar.ir.graph import aval_of, variables
from autopar.ir.memo import memoized_on_step
from autopar.ir.step_graph import StepGraph
from autopar.primitives import record_of
from autopar.primitives.linearity import data_operands
from autopar.primitives.operand_layouts import GRADIENT, ORDER
from autopar.primitives.registry import OperandLayout
from autopar.xla_fusion.epilogues import Values, find_epilogues, find_scattered
from autopar.xla_fusion.views import is_view

_LONGEST_ROW = 16384
"""Longest row that one kernel reduces; longer rows take two kernels, with partial sums between."""

_LONGEST_COLUMN = 4096
"""Longest column that one kernel reduces."""

_HANDFUL = 3
"""Operations per element from which on a value is computed once before it is broadcast."""

_MOST_SOURCES = 16
"""A value with more sources than this is expensive to compute again."""


@dataclass(frozen=True, slots=True)
class Moved:
    """What an equation adds to the memory traffic of its kernels.

    Attributes:
        reads: for each operand, the number of kernels that read it for this equation.
        writes: for each result, how often it is written.
        kernels: the number of kernels that are counted with this equation.
        copies: for each operand and then each result, the number of copies that change its layout
            or size.
        together: the number of reductions in the kernel; their partial results over several devices
            are completed together.
    """

    reads: tuple[int, ...]
    writes: tuple[int, ...]
    kernels: int
    copies: tuple[int, ...] = ()
    together: int = 1


@dataclass(slots=True)
class _Kernel:
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


@dataclass(frozen=True, slots=True)
class Traffic:
    """The memory traffic of a step.

    Attributes:
        moved: the traffic of each equation.
        leaders: for each equation that writes results of a fused kernel, the equation that the
            kernel is counted with.
        exponentials: values that kernels of rows write because a second reduction of the rows,
            which reads them, is not part of the kernel.
    """

    moved: tuple[Moved, ...]
    leaders: Mapping[int, int]
    exponentials: frozenset[Var]


@memoized_on_step
def traffic(step: StepGraph, row_padding: float = math.inf) -> Traffic:
    """Return the memory traffic of a step.

    Args:
        step: the step.
        row_padding: `MeshCosts.row_padding`.
    """
    fused = _Fusion(step, row_padding)
    leaders = {root: kernel.roots[0] for root, kernel in fused.kernels.items()}
    return Traffic(fused.moved(), leaders, frozenset(fused.exponentials))


class _Fusion:
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
        wanted: values that are read from memory by what is no fused kernel.
        kernels: for each root, its kernel.
        inside: for each equation, the roots of the kernels that compute it.
        region: for each equation, the region that it runs in.
        carried: final values of loop carries, each of which is updated in place by itself.
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
        self.cheap = [_is_cheap(eqn) for eqn in self.eqns]
        self.rows, self.exponentials = self._fused_rows(row_padding)
        self.scattered = find_scattered(values)
        self.onto: set[Var] = set()
        self.written: set[Var] = set(values.inputs)
        self.kernels: dict[int, _Kernel] = {}
        self.inside: list[tuple[int, ...]] = [()] * len(self.eqns)
        self.region = _regions(step)
        finals = (eqn.invars[1] for eqn in self.eqns if eqn.primitive is control_flow.loop_result_p)
        self.carried = set(variables(finals))

        self._place()
        self._merge()
        self._drop()

    def moved(self) -> tuple[Moved, ...]:
        """Return the traffic of each equation."""
        reads: dict[int, Counter[int]] = defaultdict(Counter)
        launches: Counter[int] = Counter()
        kernels = {id(kernel): kernel for kernel in self.kernels.values()}.values()
        for kernel in kernels:
            launches[kernel.roots[0]] += 1
            for var, (number, operand) in kernel.reads.items():
                if var not in kernel.makes:
                    reads[number][operand] += 1
        copied: dict[Var, set[OperandLayout]] = defaultdict(set)
        return tuple(
            self._of(n, eqn, reads[n], launches[n], copied) for n, eqn in enumerate(self.eqns)
        )

    # -- kernels

    def _users(self, var: Var) -> Iterable[int]:
        """Yield the kernels that compute `var` if it is not written.

        The kernel of a look-up into `var` needs `var` in memory.
        """
        for reader in self.readers[var]:
            eqn = self.eqns[reader]
            if not _is_lookup(eqn) or eqn.invars[0] is not var:
                yield from self.inside[reader]

    def _fused_rows(self, row_padding: float) -> tuple[set[int], set[Var]]:
        """Return the reductions in kernels of their rows, and exponentials that such kernels write.

        Args:
            row_padding: `MeshCosts.row_padding`.
        """
        rows: set[int] = set()
        written: set[Var] = set()
        for number, eqn in enumerate(self.eqns):
            (result, *_) = (*eqn.outvars, None)
            if row_padding and self._is_inside_row(eqn):
                if written.isdisjoint(self._behind(eqn)):
                    rows.add(number)
            elif eqn.primitive is exp_p and aval_of(result).shape:
                (*_, length) = aval_of(result).shape
                behind = map(self.makers.get, self._behind(eqn))
                if _power_of_two(length) > row_padding * length and not rows.isdisjoint(behind):
                    written.add(result)
        return rows, written

    def _behind(self, eqn: JaxprEqn) -> set[Var]:
        """Return the values that a kernel of rows has on the way to an equation.

        Args:
            eqn: an equation on rows, of the kernel.
        """
        found: set[Var] = set()
        rows = aval_of(eqn.invars[0]).shape[:-1]
        left = list(eqn.invars)
        while left:
            atom = left.pop()
            if not isinstance(atom, Var) or atom in found:
                continue
            found.add(atom)
            maker = self.makers.get(atom)
            if maker is not None and self.cheap[maker] and aval_of(atom).size >= prod(rows):
                left += self.eqns[maker].invars
        return found

    def _is_inside_row(self, eqn: JaxprEqn) -> bool:
        """Return whether a reduction of rows may be part of the kernel of the rows.

        It may if only one equation on the elements of the rows reads its broadcast result.
        """
        if not _is_reduction(eqn) or len(eqn.outvars) != 1 or _is_cheap(eqn):
            return False
        whole, axes = aval_of(eqn.invars[0]).shape, tuple(eqn.params.get("axes", ()))
        if axes != (len(whole) - 1,) or not 1 < whole[-1] <= _LONGEST_ROW or len(whole) < 2:
            return False
        var = eqn.outvars[0]
        while (reader := self.values.only_reader(var)) is not None:
            after = self.eqns[reader]
            if not self.cheap[reader]:
                return False
            if aval_of(after.outvars[0]).size == prod(whole):
                return True
            var = after.outvars[0]
        return False

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
        for number, eqn in enumerate(self.eqns):
            for kernel in self.inside[number]:
                for operand, atom in enumerate(eqn.invars):
                    var = self.values.shown(atom)
                    if (
                        var in self.written
                        and not is_view(eqn)
                        and not (operand == 0 and _is_lookup(eqn))
                    ):
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
        self.kernels[number] = _Kernel(
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

    # -- merging

    def _merge(self) -> None:
        """Join kernels that run over the same elements and share a value."""
        before = self._ancestors()
        by_value: dict[Var, list[int]] = defaultdict(list)
        for root, kernel in self.kernels.items():
            for var in kernel.reads:
                if aval_of(var).size > 1:
                    by_value[var].append(root)
        for var in (*self.values.inputs, *(v for eqn in self.eqns for v in eqn.outvars)):
            roots = by_value.get(var, ())
            for a, b in combinations(roots, 2):
                self._join(a, b, before)
            maker = self.makers.get(var)
            if maker in self.kernels:
                for b in roots:
                    if self._may_take_over(self.kernels[maker], self.kernels[b], var):
                        self._join(maker, b, before)

    def _drop(self) -> None:
        """Do not write results that are only read by the kernel that computes them."""
        inside: dict[Var, set[int]] = defaultdict(set)
        for number, eqn in enumerate(self.eqns):
            kernels = {id(self.kernels[root]) for root in self.inside[number]} or {-number}
            for atom in eqn.invars:
                if (var := self.values.shown(atom)) is not None and not is_view(eqn):
                    inside[var] |= kernels
        for root, kernel in self.kernels.items():
            for var in self.eqns[root].outvars:
                if inside[var] == {id(kernel)} and var not in self.wanted and var not in self.onto:
                    self.written.discard(var)
                    kernel.makes.discard(var)
                    kernel.reads.pop(var, None)

    @staticmethod
    def _may_take_over(maker: _Kernel, reader: _Kernel, var: Var) -> bool:
        """Return whether a kernel that reads `var` may become part of the kernel that writes it.

        A reduction may if the writer has no other result and the reduction no other large operand.
        """
        others = (
            v for v in reader.reads if v is not var and 2 * aval_of(v).size > aval_of(var).size
        )
        return reader.reduced is None or (len(maker.makes) == 1 and not any(others))

    def _join(self, a: int, b: int, before: Sequence[int]) -> None:
        """Join the kernels of two roots if they may run as one."""
        first, second = self.kernels[a], self.kernels[b]
        if (
            first is second
            or (first.region, first.space) != (second.region, second.space)
            or not (self.carried.isdisjoint(first.makes) or self.carried.isdisjoint(second.makes))
        ):
            return
        if None not in (first.reduced, second.reduced) and first.reduced != second.reduced:
            return
        if self._waits(first, second, before) or self._waits(second, first, before):
            return
        first.roots += second.roots
        first.reduced = first.reduced or second.reduced
        first.makes |= second.makes
        for var, where in second.reads.items():
            first.reads.setdefault(var, where)
        for root in second.roots:
            self.kernels[root] = first

    def _waits(self, first: _Kernel, second: _Kernel, before: Sequence[int]) -> bool:
        """Return whether the second kernel must run after the first one.

        It need not if it reads a result of the first element by element.
        """
        mine = sum(1 << self.index[root] for root in first.roots)
        for var in second.reads:
            maker = self.makers.get(var)
            if maker is None:
                continue
            if var in first.makes:
                if aval_of(var).size != prod(first.space) or var in self.onto:
                    return True
            elif before[maker] & mine:
                return True
        return False

    def _ancestors(self) -> list[int]:
        """Return for each equation the roots that it depends on, itself included, as bits."""
        self.index = {root: i for i, root in enumerate(self.kernels)}
        before: list[int] = []
        for number, eqn in enumerate(self.eqns):
            bits = 1 << self.index[number] if number in self.kernels else 0
            for atom in eqn.invars:
                if isinstance(atom, Var) and (maker := self.makers.get(atom)) is not None:
                    bits |= before[maker]
            before.append(bits)
        return before

    # -- equations

    def _of(
        self,
        number: int,
        eqn: JaxprEqn,
        reads: Counter[int],
        launches: int,
        copied: dict[Var, set[OperandLayout]],
    ) -> Moved:
        """Return the traffic of an equation.

        Args:
            number: number of the equation.
            eqn: the equation.
            reads: for each operand, the number of kernels that read it for this equation.
            launches: the number of kernels that are counted with it.
            copied: the layouts in which each value was copied before; changed.
        """
        if self.inside[number] or eqn.primitive in control_flow.MARKERS:
            writes = tuple(
                int(var in self.written and number in self.kernels) for var in eqn.outvars
            )
            kernel = self.kernels.get(number)
            together = (
                sum(root not in self.rows and not self.cheap[root] for root in kernel.roots)
                if kernel
                else 1
            )
            return Moved(
                tuple(reads[i] for i in range(len(eqn.invars))),
                writes,
                launches,
                together=max(1, together),
            )
        if number in self.epilogues:
            return self._epilogue(number, eqn)
        if is_view(eqn) or (self.cheap[number] and not self.written.intersection(eqn.outvars)):
            return Moved((0,) * len(eqn.invars), (0,) * len(eqn.outvars), 0)
        if record_of(eqn).fusion == "update":
            # Updates are read, summed and written. The operand stays in place, or is made of zeros.
            updates = data_operands(eqn)[-1]
            passes = tuple(
                0 if i == 0 else 3 if i == updates else 1 for i in range(len(eqn.invars))
            )
            fresh = self.values.is_constant(eqn.invars[0]) and eqn.outvars[0] not in self.scattered
            return Moved(passes, (int(fresh),), 1 + fresh)
        copies = self._copies(eqn, copied)
        return Moved(
            tuple(int(isinstance(a, Var)) for a in eqn.invars), (1,) * len(eqn.outvars), 1, copies
        )

    def _epilogue(self, number: int, eqn: JaxprEqn) -> Moved:
        """Return the traffic of an epilogue, which reads its addend.

        A matrix product adds in place, so an addend with other readers is copied.
        """
        product = self.epilogues[number]
        reads, copies = [], []
        for atom in eqn.invars:
            var = self.values.shown(atom)
            maker = self.makers.get(var) if var is not None else None
            is_result = maker is not None and product in (maker, self.epilogues.get(maker))
            reads.append(
                int(var is not None and not is_result and self.values.unspread(var) is var)
            )
            is_whole = reads[-1] and aval_of(atom).size == aval_of(eqn.outvars[0]).size
            shared = var in self.values.inputs or (
                isinstance(atom, Var) and len(self.readers[atom]) > 1
            )
            copies.append(
                int(is_whole and shared and self.eqns[product].primitive is dot_general_p)
            )
        return Moved(tuple(reads), (0,), 0, (*copies, 0))

    def _copies(self, eqn: JaxprEqn, copied: dict[Var, set[OperandLayout]]) -> tuple[int, ...]:
        """Return how many copies change the layout or size of each operand and result of a product.

        Equations that need the same layout share a copy.
        """
        layouts = record_of(eqn).layouts
        if layouts is None:
            return ()
        copies = []
        for atom, layout in zip((*eqn.invars, *eqn.outvars), layouts(eqn), strict=True):
            copies.append(0)
            var = self.values.shown(atom)
            if layout is None or var is None or layout in copied[var]:
                continue
            fused = self.makers.get(var) in self.kernels and layout[0] == ORDER
            # A fused kernel writes its result in the first layout that is needed.
            copies[-1] = int(not fused or bool(copied[var]))
            if layout[0] == GRADIENT:
                copies[-1] = 2  # the gradient, and the state of the optimizer that it is added to
            copied[var].add(layout)
        return tuple(copies)


def _is_cheap(eqn: JaxprEqn) -> bool:
    """Return whether kernels that read the result compute it; sums over unit dims do."""
    if _is_reduction(eqn) and len(eqn.outvars) == 1:
        return aval_of(eqn.invars[0]).size == aval_of(eqn.outvars[0]).size
    return record_of(eqn).is_inlined or eqn.primitive is split_p


def _power_of_two(number: int) -> int:
    """Return the least power of two that is no less than a number from 1."""
    return 1 << (number - 1).bit_length()


def _is_reduction(eqn: JaxprEqn) -> bool:
    return record_of(eqn).fusion == "reduction"


def _is_lookup(eqn: JaxprEqn) -> bool:
    """Return whether a kernel of its own reads only the elements that it returns."""
    record = record_of(eqn)
    return record.reads_part and record.fusion == "input"


def takes_two_kernels(eqn: JaxprEqn, shape: Sequence[int]) -> bool:
    """Return whether a reduction of an operand of `shape` takes two kernels.

    This is XLA's tree reduction, for rows of more than 16384 elements and columns of more than
    4096. Images are stored with channels last, which makes their reductions rows.
    """
    if not _is_reduction(eqn) or not shape:
        return False
    axes = eqn.params.get("axes", ())
    length = prod(shape[axis] for axis in axes)
    is_row = len(shape) - 1 in axes
    return length > _LONGEST_ROW if is_row else length > _LONGEST_COLUMN and len(shape) < 4


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
