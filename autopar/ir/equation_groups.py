"""Groups of equations that stay together: a single equation, or a whole loop or switch."""

from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from typing import NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn, Primitive, Var

from autopar.ir import control_flow
from autopar.ir.evaluate import Numbered
from autopar.ir.graph import is_backward, variables


class Unit(NamedTuple):
    """A group of equations.

    Attributes:
        eqns: the numbered equations.
        reads: the values that they read and others compute.
        makes: the values that they compute.
    """

    eqns: tuple[Numbered, ...]
    reads: tuple[Var, ...]
    makes: tuple[Var, ...]

    @property
    def number(self) -> int:
        """The number of the first equation, which identifies the unit."""
        return self.eqns[0][0]


def units(eqns: Iterable[Numbered]) -> list[Unit]:
    """Return the units that numbered equations consist of, in order."""
    return [_unit(group) for group in _groups(eqns)]


def _groups(eqns: Iterable[Numbered]) -> Iterator[Sequence[Numbered]]:
    """Yield the equations of each unit."""
    group: list[Numbered] = []
    depth = 0
    for numbered in eqns:
        primitive = numbered[1].primitive
        depth += (primitive in control_flow.OPENING) - (primitive is control_flow.end_p)
        if depth == 0 and not group:
            yield (numbered,)
            continue
        group.append(numbered)
        if depth == 0:
            yield group
            group = []


def _unit(group: Sequence[Numbered]) -> Unit:
    if len(group) == 1:
        _, eqn = group[0]
        return Unit((group[0],), tuple(dict.fromkeys(variables(eqn.invars))), tuple(eqn.outvars))
    makes = {var: None for _, eqn in group for var in eqn.outvars}
    read = variables(atom for _, eqn in group for atom in eqn.invars)
    reads = {var: None for var in read if var not in makes}
    return Unit(tuple(group), tuple(reads), tuple(makes))


def effects_of(unit: Unit) -> list[int]:
    """Return the numbers of the equations with an effect but no result, such as `jax.debug.print`.

    The marker that opens a loop or switch with such an equation counts, too.
    """
    return [
        number
        for number, eqn in unit.eqns
        if eqn.effects and (not eqn.outvars or eqn.primitive in control_flow.OPENING)
    ]


def effects_in(jaxpr: Jaxpr) -> dict[int, Unit]:
    """Return the units of the equations of `effects_of` by their numbers, in order."""
    if not any(eqn.effects for eqn in jaxpr.eqns):
        return {}
    found = units(enumerate(jaxpr.eqns))
    return {number: unit for unit in found for number in effects_of(unit)}


def without_effects(eqns: Iterable[Numbered], numbers: Container[int]) -> list[Numbered]:
    """Return equations without some of the effects that `effects_of` lists.

    Args:
        eqns: numbered equations.
        numbers: the numbers of the equations that lose their effects. Equations without results
            are left out; loops and switches stay.
    """
    return [
        (number, eqn.replace(effects=frozenset()) if number in numbers else eqn)
        for number, eqn in eqns
        if number not in numbers or eqn.outvars
    ]


def pure(eqns: Iterable[Numbered]) -> list[Numbered]:
    """Return the numbered equations without an effect; loops and switches lose theirs."""
    return [
        (number, eqn.replace(effects=frozenset()) if eqn.effects else eqn)
        for number, eqn in eqns
        if not eqn.effects or eqn.primitive in control_flow.OPENING
    ]


def has_backward(unit: Unit) -> bool:
    """Return whether a unit has equations of a backward pass."""
    return any(is_backward(eqn) for _, eqn in unit.eqns)


def dependents(eqns: Iterable[Numbered], sources: Iterable[Var]) -> set[Var]:
    """Return the values that depend on `sources`, and `sources` themselves.

    Every value that a loop or switch computes counts as dependent on every value that it reads.
    """
    reached = set(sources)
    for group in _groups(eqns):
        if len(group) == 1:
            _, eqn = group[0]
            reads, makes = variables(eqn.invars), eqn.outvars
        else:
            _, reads, makes = _unit(group)
        if not reached.isdisjoint(reads):
            reached.update(makes)
    return reached


def flow(
    eqns: Sequence[JaxprEqn], sources: Iterable[Var], stops: Collection[Primitive] = ()
) -> set[Var]:
    """Return the values that depend on `sources`, and `sources` themselves.

    Unlike `dependents`, it follows each value of a loop by itself. A carry depends on what its next
    value depends on, and all values of a loop depend on the number of its iterations.

    Args:
        eqns: the equations of a flat jaxpr.
        sources: the first values.
        stops: primitives whose results do not count.
    """
    reached = set(sources)
    num_reached = 0
    while len(reached) > num_reached:  # the carries of loops take more than one pass
        num_reached = len(reached)
        for eqn in eqns:
            if eqn.primitive in stops or reached.isdisjoint(variables(eqn.invars)):
                continue
            reached.update(eqn.outvars)
            if eqn.primitive is control_flow.loop_test_p:  # how often the loop runs
                reached.add(control_flow.token_of(eqn))
            if eqn.primitive is control_flow.loop_result_p:
                reached.update(variables(eqn.invars[:1]))
    return reached
