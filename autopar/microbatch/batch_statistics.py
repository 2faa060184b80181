"""Statistics of the batch, which are complete only when all microbatches have run.

A step may use a statistic before it is complete: in the denominator of a masked mean, or to clip by
a norm. The analysis of batch scaling asks this module which statistics may be completed first, and
how operands have to be scaled so that the step adds or compares what has the same scale.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from autopar.ir import control_flow
from autopar.ir.equation_groups import dependents, units
from autopar.ir.graph import aval_of
from autopar.microbatch.batch_scaling_rules import BatchScaling
from autopar.primitives import record_of
from autopar.primitives.linearity import adds, algebra_of, data_operands, is_exact, is_linear


@dataclass(frozen=True, slots=True)
class Repair:
    """Replacements of an equation's operands that make it separable.

    Attributes:
        totals: positions of operands that are replaced by the same statistic of the whole batch.
        scaled: maps positions of operands to the power of the number of microbatches by which they
            are divided.
    """

    totals: tuple[int, ...]
    scaled: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class StatisticRules:
    """What the analysis may do with statistics of the batch that do not scale by themselves.

    Attributes:
        repaired: numbers of the equations whose operands may be replaced (`Repair`).
        totals: whether operands may be replaced by statistics of the whole batch, which an earlier
            loop accumulates. These are scalars that do not need the model.
        functions: whether scalars may be functions of statistics, computed when these are complete.
        own: numbers of the equations that may use a statistic of each microbatch in place of that
            of the batch.
        never_completed: values whose statistics are not computed for the whole batch before they
            are used, nor divided by afterwards. `own` equations use no other statistics.
    """

    repaired: Set[int] = frozenset()
    totals: bool = False
    functions: bool = True
    own: Set[int] = frozenset()
    never_completed: Set[Var] = frozenset()


DEFAULT_RULES = StatisticRules()
"""No operand is replaced, and no microbatch uses statistics of its own."""


class StatisticUses:
    """How a step uses statistics of the batch that are not complete, as far as rules allow it."""

    def __init__(self, jaxpr: Jaxpr, rules: StatisticRules) -> None:
        self._rules = rules
        self._costly = _costly(jaxpr) if rules.totals else set()
        self._inside = _inside_of_loops(jaxpr.eqns)

    def is_completed_early(self, var: Var) -> bool:
        """Return whether an earlier loop may accumulate a statistic that a later one reads."""
        return (
            self._rules.totals
            and var not in self._inside
            and var not in self._rules.never_completed
            and not aval_of(var).shape
            and var not in self._costly
        )

    def is_ratio(self, eqn: JaxprEqn, operands: Sequence[BatchScaling]) -> bool:
        """Return whether a division of what can be accumulated is by a statistic of the batch."""
        dividend, divisor = operands
        is_statistic = divisor.form == "function" or (
            divisor.form == "linear" and divisor.power is not None and not divisor.per
        )
        return (
            is_statistic
            and not aval_of(eqn.invars[1]).shape
            and eqn.invars[1] not in self._inside
            and eqn.invars[1] not in self._rules.never_completed
            and dividend.form != "function"
            and not dividend.per
        )

    def is_function(self, eqn: JaxprEqn, operands: Sequence[BatchScaling]) -> bool:
        """Return whether a scalar is a function of statistics that can't itself be accumulated."""
        read = list(zip(eqn.invars, operands, strict=True))
        statistics = [atom for atom, kind in read if kind.form != "same"]
        if (
            not self._rules.functions
            or not statistics
            or any(atom in self._rules.never_completed for atom in statistics)
            or any(kind.per or kind.form in ("rows", "item") for kind in operands)
        ):
            return False
        if len(eqn.outvars) != 1 or eqn.outvars[0] in self._inside:
            return False
        linear = [k for k, kind in enumerate(operands) if kind.form == "linear"]
        if len(linear) == len(statistics) and is_linear(eqn, linear) and _adds_alike(eqn, operands):
            return False
        if any(aval_of(atom).shape for atom in (*eqn.invars, *eqn.outvars)):
            return False
        others = [(atom, kind) for atom, kind in read if kind.form == "same"]
        return all(isinstance(atom, Literal) and kind.power in (0, None) for atom, kind in others)


def divisions(eqn: JaxprEqn, operands: Sequence[BatchScaling]) -> dict[int, int]:
    """Return the powers of the number of microbatches by which operands are divided.

    The summands of a sum get the same power, and so do values that are compared. The operands of a
    nonlinear equation get the values that they have in the whole batch.
    """
    algebra, data = algebra_of(eqn), data_operands(eqn)
    if algebra is None:
        grown = {k: -kind.power for k, kind in enumerate(operands) if kind.power}
        return {} if any(is_exact(eqn.invars[k]) for k in grown) else grown
    is_alike = adds(eqn) or algebra in ("homogeneous", "invariant")
    if not is_alike or any(is_exact(eqn.invars[k]) for k in data):
        return {}
    powers = {k: power for k in data if (power := operands[k].power) is not None}
    largest = max(powers.values(), default=0)
    return {k: largest - power for k, power in powers.items() if power < largest}


def _adds_alike(eqn: JaxprEqn, operands: Sequence[BatchScaling]) -> bool:
    """Return whether all summands of an equation have the same power."""
    powers = {operands[k].power for k in data_operands(eqn)} if adds(eqn) else set()
    return len(powers - {None}) <= 1


def _costly(jaxpr: Jaxpr) -> set[Var]:
    """Return the values that take too long to compute a second time for a statistic."""
    numbered = list(enumerate(jaxpr.eqns))
    costly = (u for u in units(numbered) if any(record_of(eqn).is_costly for _, eqn in u.eqns))
    return dependents(numbered, [var for unit in costly for var in unit.makes])


def _inside_of_loops(eqns: Sequence[JaxprEqn]) -> set[Var]:
    """Return the values that exist only inside a loop or branch."""
    inside: set[Var] = set()
    depth = 0
    for eqn in eqns:
        depth -= eqn.primitive is control_flow.end_p
        if depth > (eqn.primitive in control_flow.LEAVING):
            inside.update(eqn.outvars)
        depth += eqn.primitive in control_flow.OPENING
    return inside
