"""Groups of equations that stay together: one equation, or all equations of a loop or branch."""

from collections.abc import Iterable
from typing import NamedTuple

from jax.extend.core import Var

from autopar.ir import control_flow
from autopar.ir.evaluate import Numbered


class Unit(NamedTuple):
    """Equations, with what they read of others and what they make."""

    eqns: tuple[Numbered, ...]
    reads: tuple[Var, ...]
    makes: tuple[Var, ...]

    @property
    def number(self) -> int:
        """Of the first equation, by which the unit is known."""
        return self.eqns[0][0]


def units(eqns: Iterable[Numbered]) -> list[Unit]:
    """The units that equations consist of, in order."""
    found: list[Unit] = []
    pending: list[Numbered] = []
    depth = 0
    for number, eqn in eqns:
        pending.append((number, eqn))
        depth += (eqn.primitive in control_flow.OPENING) - (eqn.primitive is control_flow.end_p)
        if depth == 0:
            makes = {var: None for _, each in pending for var in each.outvars}
            reads = {
                a: None
                for _, each in pending
                for a in each.invars
                if isinstance(a, Var) and a not in makes
            }
            found.append(Unit(tuple(pending), tuple(reads), tuple(makes)))
            pending = []
    return found


def dependents(eqns: Iterable[Numbered], sources: Iterable[Var]) -> set[Var]:
    """Return the values that depend on `sources`, these included; all that a loop or branch makes depends on all it reads."""
    reached = set(sources)
    for unit in units(eqns):
        if not reached.isdisjoint(unit.reads):
            reached.update(unit.makes)
    return reached
