"""Batch scaling: how values of the whole batch follow from values of its microbatches.

An abstract interpretation reads two traces of a step side by side, one for each of two batch sizes.
It gives every value a `BatchScaling`: same, rows or linear, and the power of the number of
microbatches by which its value is larger for the whole batch. A sum over examples is linear with
power one. Divided by the number of examples, a literal that differs between the traces, it is
linear with power zero: a mean. A quotient by a statistic of the batch, as in a masked mean, scales
as its numerator, `per` that statistic. Other values are not separable.
"""

from collections.abc import Iterable, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from functools import cached_property

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.extend.core.primitives import div_p
from jax.lax import tile_p

from autopar.ir import control_flow
from autopar.ir.equation_groups import dependents, flow, units
from autopar.ir.graph import Atom, Where, aval_of, is_backward, is_forward, source_line, variables
from autopar.ir.step_graph import MicrobatchError
from autopar.microbatch.batch_scaling_constants import (
    atom_scaling,
    check_parameters,
    constant_scaling,
    own_constant_scaling,
)
from autopar.microbatch.batch_scaling_rules import (
    BatchScaling,
    ConstantDiffers,
    DependsOnOwnLoop,
    NotSeparable,
    PartOfBatch,
    SecondGradient,
    result_scalings,
)
from autopar.microbatch.batch_statistics import (
    DEFAULT_RULES,
    Repair,
    StatisticRules,
    StatisticUses,
    divisions,
)
from autopar.microbatch.example_loops import is_over_examples
from autopar.microbatch.loop_scalings import LoopScalings
from autopar.microbatch.same_step import check_same_step
from autopar.primitives import record_of
from autopar.primitives.linearity import adds, data_operands, is_exact, is_linear

_LARGEST_POWER = 2
"""Largest power to which the carry of a loop is raised, so that no loop raises it forever."""


class BatchScalings:
    """The batch scalings of all values of a step.

    Attributes:
        kinds: scaling of each variable of the smaller trace, or why it is not separable.
        divided: the quotients by a statistic of the batch or by a function of statistics.
        functions: maps each scalar that is a function of statistics to its equation.
        repairs: replacements of operands, by the first result of the equation.
        own: maps the results that follow from a statistic of each microbatch to their equation.
        copies: maps values that repeat a block per example or group of examples to the number of
            blocks.
        carries: scalings of loop carries that differ from the scalings of their initial values.
        own_loops: the lines of code where each microbatch runs a while loop until the last of its
            own examples is done.
    """

    def __init__(
        self,
        micro: Jaxpr,
        full: Jaxpr,
        batch: frozenset[int],
        count: int,
        rules: StatisticRules = DEFAULT_RULES,
        own_loops: bool = False,
    ) -> None:
        """Derive the scalings from the first equation to the last.

        Args:
            micro: flat jaxpr of the step for the smaller batch.
            full: flat jaxpr of the step for a batch `count` times as large.
            batch: inputs whose first dim is the batch.
            count: number of microbatches.
            rules: what it may do with statistics of the batch.
            own_loops: whether each microbatch runs loops until the last of its own examples is
                done.

        Raises:
            MicrobatchError: the equations or constants of the step depend on the batch size, or a
                while_loop depends on the batch.
        """
        self.count = count
        self._rules = rules
        self._allows_own_loops = own_loops
        self.own_loops: dict[str, None] = {}
        self._own_tests: set[Var] = set()
        self._eqns = micro.eqns
        self._uses = StatisticUses(micro, rules)
        self.kinds: dict[Var, BatchScaling | NotSeparable] = dict.fromkeys(
            (*micro.constvars, *micro.invars), BatchScaling("same")
        )
        self.kinds.update((micro.invars[i], BatchScaling("rows")) for i in batch)
        if len(micro.consts) != len(full.consts):
            raise MicrobatchError(
                "the step has other constants for batches of another size; make them the same, or"
                " use num_micro_batches=1"
            )
        for var, value, whole in zip(micro.constvars, micro.consts, full.consts, strict=True):
            try:
                self.kinds[var] = constant_scaling(value, whole, count)
            except NotSeparable as unfit:
                self.kinds[var] = unfit
        check_same_step(micro, full)
        self._loops = LoopScalings(micro, full, count, self.kinds, own_loops)
        self.carries: dict[Var, BatchScaling | NotSeparable] = {}
        self._unrepaired: set[int] = set()
        while True:
            self._follow(micro.eqns, full.eqns)
            conflicts = self._repaired_statistics(micro.eqns) if rules.own else set()
            if not conflicts:
                break
            self._unrepaired |= conflicts

    def _follow(self, eqns: Sequence[JaxprEqn], wholes: Sequence[JaxprEqn]) -> None:
        """Derive the scalings in order, again from the start of a loop if its carry changes."""
        self.divided: set[Var] = set()
        self.functions: dict[Var, JaxprEqn] = {}
        self.repairs: dict[Var, Repair] = {}
        self.own: dict[Var, JaxprEqn] = {}
        self.copies: dict[Var, int] = {}
        starts: list[int] = []
        changed: set[Var] = set()
        number = 0
        while number < len(eqns):
            eqn = eqns[number]
            if eqn.primitive in control_flow.OPENING:
                starts.append(number)
            results = self._results_of(number, eqn, wholes[number])
            self.kinds.update(zip(eqn.outvars, results, strict=True))
            if eqn.primitive is control_flow.loop_result_p and self._changes_carry(number, eqn):
                changed.add(control_flow.token_of(eqn))
            number += 1
            if eqn.primitive is control_flow.end_p:
                start = starts.pop()
                if control_flow.token_of(eqn) in changed:
                    changed.remove(control_flow.token_of(eqn))
                    self._forget(var for each in eqns[start:number] for var in each.outvars)
                    number = start

    def _changes_carry(self, number: int, eqn: JaxprEqn) -> bool:
        """Return whether a loop changes the scaling of its carry, and note the new one."""
        carry = eqn.invars[0]
        assert isinstance(carry, Var)
        if self._loops.is_over_rows(eqn):
            return False
        result = self.kinds[eqn.outvars[0]]
        if isinstance(result, NotSeparable) and self._is_repairable(number):
            result = self._raised(eqn) or result
        if result == self.kinds[carry] or isinstance(self.kinds[carry], NotSeparable):
            return False
        self.carries[carry] = result
        return True

    def _raised(self, eqn: JaxprEqn) -> BatchScaling | None:
        """Return the scaling of the next value of a carry if its power is larger; None if not.

        An iteration that clips a cotangent of a mean computes its value in the whole batch. Then
        the carry starts with the value in the whole batch, too.

        Args:
            eqn: the `loop_result` of the carry.
        """
        kinds = [self.kinds[atom] for atom in eqn.invars[:2] if isinstance(atom, Var)]
        carry, following = kinds if len(kinds) == 2 else (None, None)
        if not (isinstance(carry, BatchScaling) and isinstance(following, BatchScaling)):
            return None
        if carry.power is None or following.power is None or is_exact(eqn.outvars[0]):
            return None
        raised = replace(carry, power=following.power)
        alike = raised == following or (carry.form == "same" and carry.per == following.per)
        return following if alike and carry.power < following.power <= _LARGEST_POWER else None

    def _is_repairable(self, number: int) -> bool:
        """Return whether the operands of an equation may be replaced."""
        return number in self._rules.repaired and number not in self._unrepaired

    def _forget(self, made: Iterable[Var]) -> None:
        """Forget what was noted of values."""
        for var in made:
            self.divided.discard(var)
            for notes in (self.functions, self.repairs, self.own, self.copies):
                notes.pop(var, None)

    def _results_of(
        self, number: int, eqn: JaxprEqn, whole: JaxprEqn
    ) -> Sequence[BatchScaling | NotSeparable]:
        """Return the scalings of the results of an equation, or why they are not separable."""
        try:
            if eqn.primitive in control_flow.MARKERS:
                return self._of_marker(number, eqn, whole)
            check_parameters(eqn, whole)
            return self._of_equation(number, eqn, whole)
        except ConstantDiffers as unfit:
            unfit = NotSeparable(f"{unfit}; {Where(eqn)} reads it")
            return [unfit] * len(eqn.outvars)
        except NotSeparable as unfit:
            return [unfit] * len(eqn.outvars)

    def _of_equation(self, number: int, eqn: JaxprEqn, whole: JaxprEqn) -> list[BatchScaling]:
        """Return the scalings of the results of an equation that is no marker."""
        if not eqn.outvars:
            return []  # it has an effect, such as that of jax.debug.print
        if self._allows_own_loops and is_over_examples(eqn):
            kind = self._operand(eqn.invars[0], whole.invars[0])
            if kind.form == "rows":
                self.own_loops[source_line(eqn)] = None
                self._own_tests.update(eqn.outvars)
                return [BatchScaling("same")]
        try:
            repaired = self._repaired(eqn, whole) if self._is_repairable(number) else None
            results = repaired or self._results(eqn, whole)
        except NotSeparable:
            if number not in self._rules.own:
                raise
            return self._with_own_statistics(eqn, whole)
        if eqn.primitive is div_p and results[0].per is eqn.invars[1]:
            self.divided.add(eqn.outvars[0])
        return results

    def _repaired_statistics(self, eqns: Sequence[JaxprEqn]) -> set[int]:
        """Return the equations that scale summands of statistics which microbatches have alone.

        In `count - 1` of a microbatch, the one is not divided by the number of microbatches.
        """
        read: set[Var] = set()
        conflicts: set[int] = set()
        for unit in reversed(units(enumerate(eqns))):
            uses_own = not self.own.keys().isdisjoint(unit.makes)
            is_read = not read.isdisjoint(unit.makes) or (uses_own and len(unit.eqns) > 1)
            if is_read or uses_own:
                read.update(unit.reads)
            if is_read:
                conflicts.update(number for number, eqn in unit.eqns if self._scales_summand(eqn))
        return conflicts

    def _scales_summand(self, eqn: JaxprEqn) -> bool:
        """Return whether a repair scales an operand of an equation of statistics alone."""
        repair = self.repairs.get(eqn.outvars[0]) if eqn.outvars else None
        if repair is None or not repair.scaled or not is_forward(eqn):
            return False
        kinds = (self.kinds[atom] for atom in eqn.invars if isinstance(atom, Var))
        return all(isinstance(kind, BatchScaling) and kind.form != "rows" for kind in kinds)

    def _with_own_statistics(self, eqn: JaxprEqn, whole: JaxprEqn) -> list[BatchScaling]:
        """Return the scalings of the results if each microbatch uses statistics of its own.

        Raises:
            NotSeparable: that does not help, or a statistic is one that is completed.
        """
        operands = [
            own_constant_scaling(a.val, b.val, self.count)
            if isinstance(a, Literal) and isinstance(b, Literal)
            else self._operand(a, b)
            for a, b in zip(eqn.invars, whole.invars, strict=True)
        ]
        for atom, kind in zip(eqn.invars, operands, strict=True):
            completed = kind.form == "linear" and atom not in self._rules.never_completed
            if completed or kind.form == "function" or kind.per:
                raise NotSeparable(f"{Where(eqn)} is not linear in a statistic of the batch")
        results = result_scalings(eqn, whole, operands, self.count, own=True)
        self.own.update(dict.fromkeys(eqn.outvars, eqn))
        return results

    def _of_marker(
        self, number: int, eqn: JaxprEqn, whole: JaxprEqn
    ) -> Sequence[BatchScaling | NotSeparable]:
        """Return the scalings of the results of a marker of a loop or branch."""
        results = self._loops.of(eqn, whole)
        if eqn.primitive is control_flow.loop_carry_p and not self._loops.is_over_rows(eqn):
            return [self._of_carry(number, eqn, results[0])]
        return results

    def _of_carry(
        self, number: int, eqn: JaxprEqn, start: BatchScaling
    ) -> BatchScaling | NotSeparable:
        """Return the scaling of the carry of a loop whose initial value has the scaling `start`.

        The initial value is divided if the iterations compute a value with a larger power.
        """
        carry = self.carries.get(eqn.outvars[0], start)
        if isinstance(carry, NotSeparable) or carry.power == start.power:
            return carry
        if carry.power is None or start.power is None:
            return carry
        if not self._is_repairable(number):
            return start
        self.repairs[eqn.outvars[0]] = Repair((), {0: carry.power - start.power})
        return carry

    def of(self, atom: Atom, whole: Atom) -> BatchScaling:
        """Return the scaling of an accumulated value.

        Args:
            atom: the value in the smaller trace.
            whole: the same value in the larger trace.

        Raises:
            MicrobatchError: the value is not separable.
        """
        try:
            kind = self._operand(atom, whole)
            if self.own and kind.form == "linear" and kind.power == 0 and is_exact(atom):
                raise NotSeparable(
                    f"a statistic of each microbatch becomes an array of {aval_of(atom).dtype},"
                    " which has no mean"
                )
            if kind.form == "rows" and isinstance(kind.blocks, Fraction):
                maker = next(eqn for eqn in self._eqns if atom in eqn.outvars)
                raise PartOfBatch(
                    f"{Where(maker)} has a row for each example of a part of the batch, and the"
                    " step returns these rows or combines all of them"
                )
            if kind.form == "same" and atom in self._of_own_loops:
                raise DependsOnOwnLoop(
                    f"a result depends on how often the loop at {next(iter(self.own_loops))} runs:"
                    " each microbatch runs it until the last of its own examples is done"
                )
            return kind
        except NotSeparable as unfit:
            raise MicrobatchError(
                f"can't accumulate over microbatches: {unfit}. {unfit.remedy}"
            ) from None

    @cached_property
    def _of_gradients(self) -> Set[Var]:
        """The values that are computed from gradients, in this or an earlier iteration."""
        gradients = (var for eqn in self._eqns if is_backward(eqn) for var in eqn.outvars)
        return flow(self._eqns, gradients, stops={control_flow.loop_test_p})

    @cached_property
    def _of_own_loops(self) -> Set[Atom]:
        """The values that depend on how often a microbatch runs loops of its own."""
        numbered = list(enumerate(self._eqns))
        loops = (u for u in units(numbered) if not self._own_tests.isdisjoint(u.makes))
        return dependents(numbered, {var for loop in loops for var in loop.makes})

    def why_not(self, values: Iterable[Var]) -> MicrobatchError | None:
        """Return why some value can't be accumulated; None if all can."""
        try:
            for var in values:
                self.of(var, var)
        except MicrobatchError as unfit:
            return unfit
        return None

    def add_marked(self, micro: Jaxpr, full: Jaxpr) -> None:
        """Add the scalings of what marks of accumulated values add to both traces."""
        for eqn, whole in zip(micro.eqns, full.eqns, strict=True):
            if self.kinds.keys() >= set(eqn.outvars):
                continue
            try:
                results: Sequence[BatchScaling | NotSeparable] = self._results(eqn, whole)
            except NotSeparable as unfit:
                results = [unfit] * len(eqn.outvars)
            self.kinds.update(zip(eqn.outvars, results, strict=True))

    def powers_of_rows(self, eqns: Sequence[JaxprEqn]) -> dict[tuple[int, int], int]:
        """Return the powers of results with a row per example, by equation and result."""
        powers: dict[tuple[int, int], int] = {}
        for n, eqn in enumerate(eqns):
            for r, var in enumerate(eqn.outvars):
                scaling = self.kinds[var]
                if isinstance(scaling, BatchScaling) and scaling.form == "rows":
                    powers[n, r] = scaling.power or 0
        return powers

    def _operand(self, atom: Atom, whole: Atom) -> BatchScaling:
        return atom_scaling(self.kinds, atom, whole, self.count)

    def _operands(self, eqn: JaxprEqn, whole: JaxprEqn) -> list[BatchScaling]:
        return [self._operand(a, b) for a, b in zip(eqn.invars, whole.invars, strict=True)]

    def _results(self, eqn: JaxprEqn, whole: JaxprEqn) -> list[BatchScaling]:
        operands = self._operands(eqn, whole)
        if record_of(eqn).passes_through:
            return operands
        if eqn.primitive is div_p and self._uses.is_ratio(eqn, operands):
            weight = eqn.invars[1]
            assert isinstance(weight, Var)
            return [replace(operands[0], per=weight)]
        if self._uses.is_function(eqn, operands):
            self.functions[eqn.outvars[0]] = eqn
            return [BatchScaling("function")]
        if any(kind.form == "function" for kind in operands):
            raise NotSeparable(
                f"{Where(eqn)} uses a function of sums over the batch otherwise than to divide by"
                " it"
            )
        if any(kind.per for kind in operands):
            return self._of_ratios(eqn, whole, operands)
        return self._plain(eqn, whole, operands)

    def _plain(
        self, eqn: JaxprEqn, whole: JaxprEqn, operands: Sequence[BatchScaling]
    ) -> list[BatchScaling]:
        """Return the scalings of results whose operands are not quotients by statistics."""
        try:
            results = result_scalings(eqn, whole, operands, self.count)
        except NotSeparable:
            if is_backward(eqn) or self._of_gradients.isdisjoint(variables(eqn.invars)):
                raise
            raise SecondGradient(
                f"{Where(eqn)} is not linear in a gradient of the batch, or in what a gradient has"
                " changed"
            ) from None
        if eqn.primitive is tile_p and operands[0].form != "rows":
            (kind,) = results
            if kind.form == "rows":
                self.copies[eqn.outvars[0]] = eqn.params["reps"][kind.dim]
        return results

    def _repaired(self, eqn: JaxprEqn, whole: JaxprEqn) -> list[BatchScaling] | None:
        """Return the scalings of the results if operands are replaced; None if that doesn't help.

        A statistic is replaced by that of the whole batch. A summand that does not grow with the
        batch, added to a sum over the batch, is divided by the number of microbatches. What a
        nonlinear equation reads is scaled to its value in the whole batch.
        """
        operands = self._operands(eqn, whole)
        if any(kind.per or kind.form == "function" for kind in operands):
            return None
        linear = {
            k: atom
            for k, (atom, kind) in enumerate(zip(eqn.invars, operands, strict=True))
            if isinstance(atom, Var) and kind.form == "linear"
        }
        with suppress(NotSeparable):
            return self._plain(eqn, whole, operands)
        early = tuple(k for k, var in linear.items() if self._uses.is_completed_early(var))
        for chosen in ((), early):
            kinds = list(operands)
            for k in chosen:
                kinds[k] = BatchScaling("same", None if kinds[k].power is None else 0)
            divided = divisions(eqn, kinds)
            for k, power in divided.items():
                kinds[k] = replace(kinds[k], power=(kinds[k].power or 0) + power)
            with suppress(NotSeparable):
                results = self._plain(eqn, whole, kinds)
                self.repairs[eqn.outvars[0]] = Repair(chosen, divided)
                return results
        return None

    def _of_ratios(
        self, eqn: JaxprEqn, whole: JaxprEqn, operands: Sequence[BatchScaling]
    ) -> list[BatchScaling]:
        """Return the scalings of results that are linear in quotients by one statistic."""
        divided = [k for k, kind in enumerate(operands) if kind.per]
        together = data_operands(eqn) if adds(eqn) else divided
        pers = {operands[k].per for k in {*divided, *together} if operands[k].power is not None}
        if len(pers) > 1 or not is_linear(eqn, divided):
            raise NotSeparable(
                f"{Where(eqn)} puts what is divided by a sum over the batch together with something"
                " else (a masked mean and a mean?)"
            )
        per = pers.pop() if pers else operands[divided[0]].per
        plain = self._plain(eqn, whole, [replace(kind, per=None) for kind in operands])
        return [replace(kind, per=per) for kind in plain]
