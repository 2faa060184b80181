"""Groups of equations that stay together: a single equation, or a whole loop or switch."""

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from jax.extend.core import JaxprEqn, Primitive, Var

from autopar.ir import control_flow
from autopar.ir.evaluate import Numbered
from autopar.ir.graph import is_backward, variables


class Unit(NamedTuple):
    """A group of equations.

    Attributes:
        eqns: The numbered equations.
        reads: The values that they read and others compute.
        makes: The values that they compute.
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
    groups: list[Unit] = []
    pending: list[Numbered] = []
    depth = 0
    for number, eqn in eqns:
        pending.append((number, eqn))
        depth += (eqn.primitive in control_flow.OPENING) - (eqn.primitive is control_flow.end_p)
        if depth == 0 and len(pending) == 1:
            reads = dict.fromkeys(variables(eqn.invars))
            groups.append(Unit(((number, eqn),), tuple(reads), tuple(eqn.outvars)))
            pending = []
        elif depth == 0:
            makes = {var: None for _, member in pending for var in member.outvars}
            read = variables(atom for _, member in pending for atom in member.invars)
            reads = {var: None for var in read if var not in makes}
            groups.append(Unit(tuple(pending), tuple(reads), tuple(makes)))
            pending = []
    return groups


def has_backward(unit: Unit) -> bool:
    """Return whether a unit has equations of a backward pass."""
    return any(is_backward(eqn) for _, eqn in unit.eqns)


def dependents(eqns: Iterable[Numbered], sources: Iterable[Var]) -> set[Var]:
    """Return the values that depend on `sources`, and `sources` themselves.

    Every value that a loop or switch computes counts as dependent on every value that it reads.
    """
    reached = set(sources)
    for unit in units(eqns):
        if not reached.isdisjoint(unit.reads):
            reached.update(unit.makes)
    return reached


def flow(
    eqns: Sequence[JaxprEqn], sources: Iterable[Var], stops: Collection[Primitive] = ()
) -> set[Var]:
    """Return the values that depend on `sources`, and `sources` themselves.

    Other than in `dependents`, each value of a loop counts by itself: its carries by what their
    next values depend on, and all values if how often the loop runs does.

    Args:
        eqns: The equations of a flat jaxpr.
        sources: The first values.
        stops: Primitives whose results do not count.
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
