"""Kernels that XLA:GPU joins into one kernel with several results (multi-output fusion).

Kernels over the same elements are joined if they read the same value, or one reads what the other
writes.
"""

from collections import defaultdict
from itertools import combinations
from math import prod

from jax.extend.core import Var

from autopar.ir.graph import aval_of
from autopar.xla_fusion.fused_kernels import FusedKernels, Kernel
from autopar.xla_fusion.views import is_view


def merge_kernels(fused: FusedKernels) -> None:
    """Join kernels, and write no results that only the kernel that computes them reads."""
    merger = _Merger(fused)
    merger.merge()
    merger.drop()


class _Merger:
    """Joins the kernels of a step.

    Attributes:
        fused: the kernels; changed.
        index: the number of each root among the roots.
        before: for each equation the roots that it depends on, itself included, as bits.
    """

    def __init__(self, fused: FusedKernels) -> None:
        self.fused = fused
        self.index = {root: i for i, root in enumerate(fused.kernels)}
        self.before = self._ancestors()

    def merge(self) -> None:
        """Join kernels that run over the same elements and share a value."""
        fused = self.fused
        by_value: dict[Var, list[int]] = defaultdict(list)
        for root, kernel in fused.kernels.items():
            for var in kernel.reads:
                if aval_of(var).size > 1:
                    by_value[var].append(root)
        for var in (
            *fused.values.inputs,
            *(v for eqn in fused.eqns for v in eqn.outvars),
        ):
            roots = by_value.get(var, ())
            for a, b in combinations(roots, 2):
                self._join(a, b)
            maker = fused.makers.get(var)
            if maker in fused.kernels:
                for b in roots:
                    if self._may_take_over(fused.kernels[maker], fused.kernels[b], var):
                        self._join(maker, b)

    def drop(self) -> None:
        """Do not write results that are only read by the kernel that computes them."""
        fused = self.fused
        inside: dict[Var, set[int]] = defaultdict(set)
        for number, eqn in enumerate(fused.eqns):
            kernels = {id(fused.kernels[root]) for root in fused.inside[number]} or {-number}
            for atom in eqn.invars:
                if (var := fused.values.shown(atom)) is not None and not is_view(eqn):
                    inside[var] |= kernels
        for root, kernel in fused.kernels.items():
            for var in fused.eqns[root].outvars:
                if (
                    inside[var] == {id(kernel)}
                    and var not in fused.wanted
                    and var not in fused.onto
                ):
                    fused.written.discard(var)
                    kernel.makes.discard(var)
                    kernel.reads.pop(var, None)

    @staticmethod
    def _may_take_over(maker: Kernel, reader: Kernel, var: Var) -> bool:
        """Return whether a kernel that reads `var` may become part of the kernel that writes it.

        A reduction may if the writer has no other result and the reduction no other large operand.
        """
        others = (
            v for v in reader.reads if v is not var and 2 * aval_of(v).size > aval_of(var).size
        )
        return reader.reduced is None or (len(maker.makes) == 1 and not any(others))

    def _join(self, a: int, b: int) -> None:
        """Join the kernels of two roots if they may run as one."""
        first, second = self.fused.kernels[a], self.fused.kernels[b]
        if (
            first is second
            or (first.region, first.space) != (second.region, second.space)
            or not (
                self.fused.carried.isdisjoint(first.makes)
                or self.fused.carried.isdisjoint(second.makes)
            )
        ):
            return
        if None not in (first.reduced, second.reduced) and first.reduced != second.reduced:
            return
        if self._waits(first, second) or self._waits(second, first):
            return
        first.roots += second.roots
        first.reduced = first.reduced or second.reduced
        first.makes |= second.makes
        for var, where in second.reads.items():
            first.reads.setdefault(var, where)
        for root in second.roots:
            self.fused.kernels[root] = first

    def _waits(self, first: Kernel, second: Kernel) -> bool:
        """Return whether the second kernel must run after the first one.

        It need not if it reads a result of the first element by element.
        """
        mine = sum(1 << self.index[root] for root in first.roots)
        for var in second.reads:
            maker = self.fused.makers.get(var)
            if maker is None:
                continue
            if var in first.makes:
                if aval_of(var).size != prod(first.space) or var in self.fused.onto:
                    return True
            elif self.before[maker] & mine:
                return True
        return False

    def _ancestors(self) -> list[int]:
        """Return for each equation the roots that it depends on, itself included, as bits."""
        before: list[int] = []
        for number, eqn in enumerate(self.fused.eqns):
            bits = 1 << self.index[number] if number in self.fused.kernels else 0
            for atom in eqn.invars:
                if isinstance(atom, Var) and (maker := self.fused.makers.get(atom)) is not None:
                    bits |= before[maker]
            before.append(bits)
        return before
