"""Values that are equal, and scans that compute equal carries.

They identify the scan of a forward pass that the backward pass runs again for `jax.checkpoint`.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.extend.core.primitives import scan_p

from autopar.ir.flatten import flatten, value_number
from autopar.ir.graph import Atom, literal_key
from autopar.layering.piece_writer import scan_operands


class EqualValues:
    """Values of a jaxpr that are equal because equal equations compute them from equal values.

    What is behind an `optimization_barrier` equals what is before it.
    """

    def __init__(self) -> None:
        self._equal: dict[Var, Atom] = {}
        self._known: dict[Any, list[Var]] = {}
        self._scans: list[JaxprEqn] = []

    def add(self, eqn: JaxprEqn) -> None:
        """Add the results of an equation whose operands have been added."""
        invars = [self.first(atom) for atom in eqn.invars]
        if eqn.primitive is lax.optimization_barrier_p:
            self.equate(eqn.outvars, invars)
            return
        number = value_number(eqn.replace(invars=invars))
        if number in self._known:
            self.equate(eqn.outvars, self._known[number])
            return
        if number is not None:
            self._known[number] = list(eqn.outvars)
        if eqn.primitive is scan_p:
            for earlier in self._scans:
                pairs = _equal_results(self, eqn, earlier) or {}
                self.equate(pairs, pairs.values())
            self._scans.append(eqn)

    def equate(self, variables: Iterable[Var], atoms: Iterable[Atom]) -> None:
        """Note that each variable is equal to a value that has been added."""
        for var, atom in zip(variables, atoms, strict=True):
            self._equal[var] = self.first(atom)

    def key(self, atom: Atom) -> Any:
        """Return a key that is the same for values that are known to be equal."""
        atom = self.first(atom)
        if isinstance(atom, Literal):
            return literal_key(atom)
        return atom

    def first(self, atom: Atom) -> Atom:
        """Return the first of the values that are known to be equal to this one."""
        return self._equal.get(atom, atom) if isinstance(atom, Var) else atom


def runs_again(values: EqualValues, scan: JaxprEqn, forward: JaxprEqn) -> bool:
    """Whether a scan slices the same arrays in the same order as an earlier one."""
    same_order = all(scan.params[key] == forward.params[key] for key in ("length", "reverse"))
    slices = {values.key(atom) for atom in scan_operands(scan)[2]}
    return same_order and not slices.isdisjoint(map(values.key, scan_operands(forward)[2]))


def equal_carries(values: EqualValues, scan: JaxprEqn, forward: JaxprEqn) -> tuple[int, ...] | None:
    """Match the carries of a scan with equal carries of an earlier scan.

    Carries are equal in each iteration if they begin with equal values, and both bodies compute
    them from equal operands by equal equations. An operand may also be a slice of what the earlier
    scan stacks.

    Args:
        values: the values before the scan.
        scan: the scan.
        forward: the earlier scan, of the same length and order.

    Returns:
        For each carry, the position of its equal among the carries of the earlier scan; None if
        some carry may differ.
    """
    pairs = _equal_results(values, scan, forward)
    if pairs is None:
        return None
    carries = scan.outvars[: len(scan_operands(scan)[1])]
    return tuple(forward.outvars.index(pairs[var]) for var in carries)


def _equal_results(values: EqualValues, scan: JaxprEqn, earlier: JaxprEqn) -> dict[Var, Var] | None:
    """Return the results of a scan that equal results of an earlier one; None if a carry may not.

    Args:
        values: the values before the scan.
        scan: the scan.
        earlier: the earlier scan.
    """
    if any(scan.params[key] != earlier.params[key] for key in ("length", "reverse")):
        return None
    body = _Body(values, earlier)
    copy = _Body(values, scan)
    inner = EqualValues()
    for eqn in body.jaxpr.eqns:
        inner.add(eqn)
    stacked = slice(len(body.init), None)
    consts = dict(zip(body.consts, body.const_vars, strict=True))
    slices: dict[Any, Atom] = dict(zip(body.slices, body.slice_vars, strict=True))
    slices.update(
        zip(map(values.key, earlier.outvars[stacked]), body.jaxpr.outvars[stacked], strict=True)
    )
    inner.equate(*_matching(copy.const_vars, copy.consts, consts))
    inner.equate(*_matching(copy.slice_vars, copy.slices, slices))
    positions: list[int] = []
    for key, var in zip(copy.init, copy.carried_vars, strict=True):
        start = positions[-1] + 1 if positions else 0
        if key not in body.init[start:]:
            return None
        positions.append(body.init.index(key, start))
        inner.equate([var], [body.carried_vars[positions[-1]]])
    for eqn in copy.jaxpr.eqns:
        inner.add(eqn)
    results = [inner.key(atom) for atom in copy.jaxpr.outvars]
    earlier_results = [inner.key(atom) for atom in body.jaxpr.outvars]
    if results[: len(positions)] != [earlier_results[position] for position in positions]:
        return None
    pairs = {var: earlier.outvars[k] for var, k in zip(scan.outvars, positions, strict=False)}
    of_result = dict(zip(earlier_results[stacked], earlier.outvars[stacked], strict=True))
    own_stacked = slice(len(positions), None)
    for var, result in zip(scan.outvars[own_stacked], results[own_stacked], strict=True):
        if result in of_result:
            pairs[var] = of_result[result]
    return pairs


def _matching(
    variables: Sequence[Var], keys: Sequence[Any], atoms: Mapping[Any, Atom]
) -> tuple[list[Var], list[Atom]]:
    """Return the variables whose keys have an atom, and these atoms."""
    pairs = [(var, atoms[key]) for var, key in zip(variables, keys, strict=True) if key in atoms]
    return [var for var, _ in pairs], [atom for _, atom in pairs]


class _Body:
    """The body of a scan, with keys of the operands that it reads.

    Attributes:
        jaxpr: the body, without calls.
        consts: the keys of the operands that all iterations read.
        init: the keys of the initial carries.
        slices: the keys of the arrays that are sliced.
    """

    def __init__(self, values: EqualValues, scan: JaxprEqn) -> None:
        self.jaxpr: Jaxpr = flatten(scan.params["jaxpr"], loops=False)
        operands = scan_operands(scan)
        self.consts, self.init, self.slices = ([*map(values.key, atoms)] for atoms in operands)

    @property
    def const_vars(self) -> list[Var]:
        """The variables of `consts`."""
        return self.jaxpr.invars[: len(self.consts)]

    @property
    def carried_vars(self) -> list[Var]:
        """The variables of the carries."""
        return self.jaxpr.invars[len(self.consts) :][: len(self.init)]

    @property
    def slice_vars(self) -> list[Var]:
        """The variables of `slices`."""
        return self.jaxpr.invars[len(self.consts) + len(self.init) :]
