"""Groups of equations that stay together: a single equation, or a whole loop or switch."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from jax.extend.core import JaxprEqn, Primitive, Var

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

    Other than in `dependents`, each value of a loop counts by itself: its carries by what their
    next values depend on, and all values if how often the loop runs does.

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
