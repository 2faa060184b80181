"""The memory traffic of a step: what each kernel of fused equations reads and writes.

A model of what XLA:GPU does with a step:

- A value that is not written is computed again by every kernel that reads it
  (`autopar.xla_fusion.fused_kernels`).
- Kernels over the same elements become one kernel with several results
  (`autopar.xla_fusion.kernel_merging`).
- A reduction of rows whose result is only read by an equation on those rows is part of the kernel
  of the rows (`autopar.xla_fusion.reductions`). A softmax, which has two, is one kernel if its rows
  are hardly padded; otherwise the kernel ends at the exponentials.
- A product or convolution adds a bias, and another addend of its result, before it writes the
  result: epilogues of cuBLAS and cuDNN (`autopar.xla_fusion.epilogues`).

The model works on whole arrays, so that all shardings share it. `experiments.validation.fidelity`
compares it with compiled programs.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from jax.extend.core import JaxprEqn, Var
from jax.extend.core.primitives import dot_general_p

from autopar.ir import control_flow
from autopar.ir.graph import aval_of
from autopar.ir.memo import memoized_on_step
from autopar.ir.step_graph import StepGraph
from autopar.primitives import record_of
from autopar.primitives.linearity import data_operands
from autopar.primitives.operand_layouts import GRADIENT, ORDER
from autopar.primitives.registry import OperandLayout
from autopar.xla_fusion.fused_kernels import FusedKernels
from autopar.xla_fusion.kernel_merging import merge_kernels
from autopar.xla_fusion.views import is_view


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
    fused = FusedKernels(step, row_padding)
    merge_kernels(fused)
    leaders = {root: kernel.roots[0] for root, kernel in fused.kernels.items()}
    return Traffic(_Counter(fused).moved(), leaders, frozenset(fused.exponentials))


class _Counter:
    """Counts how often each equation's operands are read and its results written."""

    def __init__(self, fused: FusedKernels) -> None:
        self.fused = fused

    def moved(self) -> tuple[Moved, ...]:
        """Return the traffic of each equation."""
        reads: dict[int, Counter[int]] = defaultdict(Counter)
        launches: Counter[int] = Counter()
        kernels = {id(kernel): kernel for kernel in self.fused.kernels.values()}.values()
        for kernel in kernels:
            launches[kernel.roots[0]] += 1
            for var, (number, operand) in kernel.reads.items():
                if var not in kernel.makes:
                    reads[number][operand] += 1
        copied: dict[Var, set[OperandLayout]] = defaultdict(set)
        return tuple(
            self._of(n, eqn, reads[n], launches[n], copied) for n, eqn in enumerate(self.fused.eqns)
        )

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
        if self.fused.inside[number] or eqn.primitive in control_flow.MARKERS:
            writes = tuple(
                int(var in self.fused.written and number in self.fused.kernels)
                for var in eqn.outvars
            )
            kernel = self.fused.kernels.get(number)
            together = (
                sum(
                    root not in self.fused.rows and not self.fused.cheap[root]
                    for root in kernel.roots
                )
                if kernel
                else 1
            )
            return Moved(
                tuple(reads[i] for i in range(len(eqn.invars))),
                writes,
                launches,
                together=max(1, together),
            )
        if number in self.fused.epilogues:
            return self._epilogue(number, eqn)
        if is_view(eqn) or (
            self.fused.cheap[number] and not self.fused.written.intersection(eqn.outvars)
        ):
            return Moved((0,) * len(eqn.invars), (0,) * len(eqn.outvars), 0)
        if record_of(eqn).fusion == "update":
            # Updates are read, summed and written. The operand stays in place, or is made of zeros.
            updates = data_operands(eqn)[-1]
            passes = tuple(
                0 if i == 0 else 3 if i == updates else 1 for i in range(len(eqn.invars))
            )
            fresh = (
                self.fused.values.is_constant(eqn.invars[0])
                and eqn.outvars[0] not in self.fused.scattered
            )
            return Moved(passes, (int(fresh),), 1 + fresh)
        copies = self._copies(eqn, copied)
        return Moved(
            tuple(int(isinstance(a, Var)) for a in eqn.invars), (1,) * len(eqn.outvars), 1, copies
        )

    def _epilogue(self, number: int, eqn: JaxprEqn) -> Moved:
        """Return the traffic of an epilogue, which reads its addend.

        A matrix product adds in place, so an addend with other readers is copied.
        """
        product = self.fused.epilogues[number]
        reads, copies = [], []
        for atom in eqn.invars:
            var = self.fused.values.shown(atom)
            maker = self.fused.makers.get(var) if var is not None else None
            is_result = maker is not None and product in (maker, self.fused.epilogues.get(maker))
            reads.append(
                int(var is not None and not is_result and self.fused.values.unspread(var) is var)
            )
            is_whole = reads[-1] and aval_of(atom).size == aval_of(eqn.outvars[0]).size
            shared = var in self.fused.values.inputs or (
                isinstance(atom, Var) and len(self.fused.readers[atom]) > 1
            )
            copies.append(
                int(is_whole and shared and self.fused.eqns[product].primitive is dot_general_p)
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
            var = self.fused.values.shown(atom)
            if layout is None or var is None or layout in copied[var]:
                continue
            fused = self.fused.makers.get(var) in self.fused.kernels and layout[0] == ORDER
            # A fused kernel writes its result in the first layout that is needed.
            copies[-1] = int(not fused or bool(copied[var]))
            if layout[0] == GRADIENT:
                copies[-1] = 2  # the gradient, and the state of the optimizer that it is added to
            copied[var].add(layout)
        return tuple(copies)
