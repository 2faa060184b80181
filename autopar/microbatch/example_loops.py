"""Loops over the rows of examples, and loops in which every example stops by itself.

A loop over rows, as of `jax.lax.map`, has fewer iterations in a microbatch. What it stacks has a
row per example, and what it adds up is a sum over the examples.

Loops of Equinox stop by themselves under `jax.vmap`. `equinox.internal.while_loop`, with which
optimistix and diffrax iterate, runs until the last example is done. Its condition is `unvmap_any`
of the conditions of the examples. An iteration leaves the values of an example that is done
unchanged. So they are the same in a microbatch, which may run fewer iterations.
"""

from collections import Counter
from collections.abc import Callable, Collection

from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Var

from autopar.ir import control_flow
from autopar.ir.graph import Atom, aval_of, variables

_OF_CONDITIONS = ("copy", "convert_element_type", "nonbatchable")
_OF_MASKS = ("copy", "broadcast_in_dim")
_COPIES = ("copy", "convert_element_type")
_SUMS = ("add", "add_any")


def is_over_examples(eqn: JaxprEqn) -> bool:
    """Return whether Equinox asks whether any or all examples need a loop or branch."""
    return eqn.primitive.name.startswith("unvmap_")


class ExampleLoops:
    """The loops of a step, as far as they treat each example by itself."""

    def __init__(self, jaxpr: Jaxpr) -> None:
        """Index the equations of a flat jaxpr."""
        self._made = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
        atoms = [*jaxpr.outvars, *(atom for eqn in jaxpr.eqns for atom in eqn.invars)]
        self._read = Counter(variables(atoms))
        results = (eqn for eqn in jaxpr.eqns if eqn.primitive is control_flow.loop_result_p)
        self._result_of: dict[Atom, JaxprEqn] = {eqn.invars[0]: eqn for eqn in results}

    def summands(self, carry: Var) -> list[Atom] | None:
        """Return what each iteration adds to a carry; None if that is not all that it does."""
        total = self._result_of[carry].invars[1]
        if self._is_carry(total, carry):
            return []

        def added(atom: Atom) -> list[Atom] | None:
            if atom is carry:
                return []
            made = self._maker(atom)
            if made is None or self._reads(atom) != 1:
                return None
            if made.primitive.name in _COPIES and aval_of(atom).dtype == aval_of(carry).dtype:
                return added(made.invars[0])
            if made.primitive.name not in _SUMS:
                return None
            first, second = made.invars
            if (found := added(first)) is not None:
                return [*found, second]
            return None if (found := added(second)) is None else [*found, first]

        is_read_once = self._reads(carry) == 2  # by the next sum, and by `result`
        return added(total) if is_read_once else None

    def _is_carry(self, atom: Atom, carry: Var) -> bool:
        """Return whether a value is a carry, also where `jax.checkpoint` hides that from XLA."""
        while atom is not carry and isinstance(atom, Var) and (made := self._maker(atom)):
            if aval_of(atom).dtype != aval_of(carry).dtype:
                return False
            if made.primitive is lax.optimization_barrier_p:
                atom = made.invars[made.outvars.index(atom)]
            elif made.primitive.name in _COPIES:
                atom = made.invars[0]
            else:
                return False
        return atom is carry

    def is_of_equinox(self, test: JaxprEqn) -> bool:
        """Return whether Equinox made a loop, by the marker on its condition.

        Args:
            test: the `loop_test` of the loop.
        """
        marker = self._maker(test.invars[0])
        return marker is not None and "equinox.internal" in str(marker.params.get("msg", ""))

    def stop_alone(self, test: JaxprEqn, form_of: Callable[[Atom], str | None]) -> bool:
        """Return whether each example of a loop of Equinox keeps its values once it is done.

        Args:
            test: the `loop_test` of the loop.
            form_of: the form of a value's batch scaling; None if it is not separable.
        """
        if not self.is_of_equinox(test):
            return False
        token = control_flow.token_of(test)
        results = [eqn for eqn in self._result_of.values() if control_flow.token_of(eqn) is token]
        running = {result.invars[0] for result in results if self._is_mask(result, form_of)}
        return self._is_of_any(test.invars[0], form_of) and all(
            self._keeps_values(result, running) for result in results
        )

    def _is_of_any(self, condition: Atom, form_of: Callable[[Atom], str | None]) -> bool:
        """Return whether a condition holds as long as it holds for any example, up to a limit."""
        parts = [condition]
        while parts:
            part = self._source(parts.pop(), _OF_CONDITIONS)
            made = self._maker(part)
            if made is not None and made.primitive.name == "and":
                parts += made.invars
            elif made is not None and made.primitive.name == "unvmap_any":
                if form_of(made.invars[0]) not in ("rows", "same"):
                    return False
            elif form_of(part) != "same":
                return False
        return True

    def _is_mask(self, result: JaxprEqn, form_of: Callable[[Atom], str | None]) -> bool:
        """Return whether a carry says which examples are not done: one that is done stays so."""
        made = self._maker(self._source(result.invars[1], ("copy",)))
        if made is None or made.primitive.name != "and" or form_of(result.invars[0]) is None:
            return False
        return result.invars[0] in [self._source(atom, ("copy",)) for atom in made.invars]

    def _keeps_values(self, result: JaxprEqn, running: Collection[Atom]) -> bool:
        """Return whether the carry of an example that is done stays, or is not read afterwards."""
        carry, following = result.invars[0], self._source(result.invars[1], ("copy",))
        if carry in running or following is carry or result.outvars[0] not in self._read:
            return True
        made = self._maker(following)
        if made is None or made.primitive.name != "select_n" or len(made.invars) != 3:
            return False
        mask, done, _ = made.invars
        return self._source(mask, _OF_MASKS) in running and self._source(done, ("copy",)) is carry

    def _reads(self, atom: Atom) -> int:
        """Return how often a value is read."""
        return self._read[atom] if isinstance(atom, Var) else 0

    def _maker(self, atom: Atom) -> JaxprEqn | None:
        return self._made.get(atom) if isinstance(atom, Var) else None

    def _source(self, atom: Atom, primitives: Collection[str]) -> Atom:
        """Return the value that `atom` is computed from by `primitives` alone."""
        made = self._maker(atom)
        while made is not None and made.primitive.name in primitives:
            atom = made.invars[0]
            made = self._maker(atom)
        return atom
