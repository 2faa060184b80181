"""Batch scalings of the values that enter and leave loops and branches.

Flat jaxprs mark where a loop or branch starts and ends, and which values it carries, slices and
stacks (`autopar.ir.control_flow`). A loop that runs for another number of iterations in a
microbatch makes its token not separable, and so all that it computes. `row_loops` has the rules of
loops with an iteration for each row of the batch.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from jax.extend.core import Jaxpr, JaxprEqn, Var

from autopar.ir import control_flow
from autopar.ir.graph import Atom, source_line
from autopar.microbatch import row_loops
from autopar.microbatch.batch_scaling_constants import atom_scaling
from autopar.microbatch.batch_scaling_rules import (
    BatchScaling,
    LoopOverExamples,
    LoopUntilLastExample,
    NotSeparable,
)
from autopar.microbatch.example_blocks import common_blocks
from autopar.microbatch.example_loops import ExampleLoops


class LoopScalings:
    """The batch scalings of the results of markers of loops and branches."""

    def __init__(
        self,
        micro: Jaxpr,
        full: Jaxpr,
        count: int,
        kinds: dict[Var, BatchScaling | NotSeparable],
        allows_own_loops: bool,
    ) -> None:
        """Note the traces.

        Args:
            micro: flat jaxpr of the step for the smaller batch.
            full: flat jaxpr of the step for a batch `count` times as large.
            count: number of microbatches.
            kinds: scalings of the variables of the smaller trace, to which the analysis adds.
            allows_own_loops: whether each microbatch runs loops until the last of its own examples
                is done.
        """
        self._micro, self._full = micro, full
        self._count = count
        self._kinds = kinds
        self._allows_own_loops = allows_own_loops
        self._over_rows: set[Var] = set()

    def is_over_rows(self, eqn: JaxprEqn) -> bool:
        """Return whether a marker belongs to a loop with one iteration per row."""
        return control_flow.token_of(eqn) in self._over_rows

    def of(self, eqn: JaxprEqn, whole: JaxprEqn) -> list[BatchScaling]:
        """Return the scalings of the results of a marker.

        Args:
            eqn: the marker in the trace for the smaller batch.
            whole: the same marker in the trace for the larger batch.

        Raises:
            NotSeparable: the results are not separable.
        """
        if eqn.primitive not in control_flow.OPENING:
            self._scaling(control_flow.token_of(eqn), control_flow.token_of(whole))
        match eqn.primitive:
            case control_flow.loop_p | control_flow.switch_p:
                if eqn.params != whole.params:
                    row_loops.check_over_rows(eqn, whole, self._count)
                    self._over_rows.add(eqn.outvars[0])
                return [self._first(eqn, whole) if eqn.invars else BatchScaling("same")]
            case control_flow.loop_const_p:
                return [self._first(eqn, whole)]
            case control_flow.loop_carry_p:
                if self.is_over_rows(eqn):
                    row_loops.check_carry(eqn, self._loops)
                return [self._first(eqn, whole)]
            case control_flow.loop_result_p if self.is_over_rows(eqn):
                return [self._summed(eqn, whole)]
            case control_flow.loop_result_p:
                return [self._joined(eqn, whole, 2)]
            case control_flow.switch_result_p:
                token = self._scaling(eqn.invars[-1], whole.invars[-1])
                if token.form not in ("same", "item") or token.power or token.per:
                    raise NotSeparable(
                        f"a branch at {source_line(eqn)} is taken for what is in the batch"
                    )
                return [self._joined(eqn, whole, len(eqn.invars) - 1)]
            case control_flow.loop_slice_p if self.is_over_rows(eqn):
                return [row_loops.item(eqn, self._first(eqn, whole))]
            case control_flow.loop_stack_p if self.is_over_rows(eqn):
                return [row_loops.stacked(eqn, self._first(eqn, whole))]
            case control_flow.loop_slice_p | control_flow.loop_stack_p:
                kind = self._first(eqn, whole)
                moved = 1 if eqn.primitive is control_flow.loop_stack_p else -1
                return [replace(kind, dim=kind.dim + moved) if kind.form == "rows" else kind]
            case control_flow.loop_test_p:
                self._check_condition(eqn, whole)
        return []

    def _scaling(self, atom: Atom, whole: Atom) -> BatchScaling:
        return atom_scaling(self._kinds, atom, whole, self._count)

    def _first(self, eqn: JaxprEqn, whole: JaxprEqn) -> BatchScaling:
        """Return the scaling of the first operand."""
        return self._scaling(eqn.invars[0], whole.invars[0])

    def _check_condition(self, eqn: JaxprEqn, whole: JaxprEqn) -> None:
        """Mark a while loop as not separable if microbatches run it for different times.

        Under `jax.vmap` every example has a condition of its own.
        """
        try:
            kind = self._first(eqn, whole)
        except NotSeparable:
            kind = None
        if kind and kind.form in ("same", "rows", "item") and not kind.power and not kind.per:
            if kind.form == "item":
                self._kinds[control_flow.token_of(eqn)] = kind
            return
        if self._loops.stop_alone(eqn, self._form_of):
            return
        where = f"a while_loop at {source_line(eqn)} runs until"
        self._kinds[control_flow.token_of(eqn)] = (
            LoopUntilLastExample(
                f"{where} its last example is done, and what it keeps of the others may depend on"
                " the number of iterations"
            )
            if self._loops.is_of_equinox(eqn) and not self._allows_own_loops
            else LoopOverExamples(
                f"{where} the batch meets a condition, so microbatches would run it for different"
                " times"
            )
        )

    @cached_property
    def _loops(self) -> ExampleLoops:
        return ExampleLoops(self._micro)

    @cached_property
    def _loops_of_whole(self) -> ExampleLoops:
        return ExampleLoops(self._full)

    def _form_of(self, atom: Atom) -> str | None:
        """Return the form of a value's scaling; None if it is not separable."""
        kind = self._kinds[atom] if isinstance(atom, Var) else BatchScaling("same")
        return kind.form if isinstance(kind, BatchScaling) else None

    def _summed(self, eqn: JaxprEqn, whole: JaxprEqn) -> BatchScaling:
        """Return the scaling of a carry to which each iteration of a loop over rows adds."""
        carry, of_whole = eqn.invars[0], whole.invars[0]
        assert isinstance(carry, Var)
        assert isinstance(of_whole, Var)
        start = self._first(eqn, whole)
        added, also = self._loops.summands(carry), self._loops_of_whole.summands(of_whole)
        kinds = [self._scaling(*atoms) for atoms in zip(added or (), also or (), strict=True)]
        return row_loops.summed(eqn, start, kinds)

    def _joined(self, eqn: JaxprEqn, whole: JaxprEqn, count: int) -> BatchScaling:
        """Return the common scaling of the first `count` operands, one of which is the result."""
        kinds: Sequence[BatchScaling] = [
            self._scaling(a, b)
            for a, b in zip(eqn.invars[:count], whole.invars[:count], strict=True)
        ]
        powers = {kind.power for kind in kinds} - {None}
        forms = [kind for kind in kinds if kind.form != "same"]
        pers = {kind.per for kind in kinds if kind.power is not None}
        blocks = common_blocks(kind.blocks for kind in forms if kind.form == "rows")
        alike = len({(kind.form, kind.dim) for kind in forms}) <= 1 and blocks != "none"
        token = self._scaling(eqn.invars[-1], whole.invars[-1])
        if token.form == "item":  # each iteration of a loop outside chooses by its own example
            alike &= {kind.form for kind in forms} <= {"item"}
            forms = [token]
        if len(powers) > 1 or len(pers) > 1 or not alike:
            raise NotSeparable(
                f"a loop or branch at {source_line(eqn)} mixes sums, means or examples of the batch"
            )
        power, per = powers.pop() if powers else None, pers.pop() if pers else None
        joined = replace(forms[0] if forms else kinds[0], power=power, per=per)
        return replace(joined, blocks=blocks) if joined.form == "rows" else joined
