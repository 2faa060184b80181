"""Copies of resharded values: which a use may need, and from when to when they are live."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
from jax.extend.core import Var

from autopar.ir import control_flow
from autopar.ir.graph import Atom, variables
from autopar.ir.spec import LogicalMesh, Spec, Specs
from autopar.ir.step_graph import StepGraph
from autopar.primitives import record_of
from autopar.sharding.mesh_costs import copied_bytes, is_local
from autopar.sharding.reshard_hoisting import passes_moves
from autopar.sharding.step_decisions import Decisions, Use
from autopar.sharding.value_lifetimes import bases_of_views
from autopar.xla_fusion import is_relaid, is_view, readings, stored_values


class PossibleCopy(NamedTuple):
    """A copy that a use of a value may need.

    Attributes:
        atom: the value that is copied.
        first: first program point at which the copy is live.
        last: last program point.
        is_made: (spec of the value, spec that the use needs) -> whether there is a copy.
    """

    atom: Atom
    first: int
    last: int
    is_made: Callable[[Spec, Spec], bool]

    def made(self, specs: Specs, required: Specs) -> np.ndarray:
        """Return whether there is a copy for each pair of specs, shape (specs, required)."""
        return _made(self.is_made, specs, required)


@lru_cache(maxsize=1 << 14)
def _made(is_made: Callable[[Spec, Spec], bool], specs: Specs, required: Specs) -> np.ndarray:
    return np.array([[is_made(present, needed) for needed in required] for present in specs])


def _always(_present: Spec, _required: Spec) -> bool:
    return True


def _is_resharded(present: Spec, required: Spec) -> bool:
    return present != required


def _is_gathered(present: Spec, required: Spec) -> bool:
    """Return whether parts come from other devices; a fused kernel reads a local part in place."""
    return not is_local(present, required)


def _is_transposed(present: Spec, required: Spec, mesh: LogicalMesh) -> bool:
    return copied_bytes(1.0, present, required, mesh) > 0


class ReshardedCopies:
    """The copies that the uses of a step may need.

    Attributes:
        of_uses: each use with its possible copies.
        divisible: the results of fused kernels that may be computed in parts, with their uses.
    """

    def __init__(self, step: StepGraph, decisions: Decisions, mesh: LogicalMesh) -> None:
        self._step = step
        self.divisible: Mapping[Atom, Sequence[Use]] = {**divisible_values(step, decisions)}
        # for results whose resharding is hoisted, the operand that is resharded instead
        self._moved_for: Mapping[Atom, Atom] = {
            eqn.outvars[0]: eqn.invars[0] for eqn in step.jaxpr.eqns if passes_moves(eqn)
        }
        self._readings: Mapping[Atom, tuple[int, int]] = {**readings(step)}
        self._read_late = frozenset(() if step.microbatching else _read_late(step))
        self._batch: Set[Atom] = {step.jaxpr.invars[i] for i in step.batch}
        self._loops = control_flow.spans(step.jaxpr.eqns)
        self._made: Mapping[Atom, int] = {
            var: number for number, eqn in enumerate(step.jaxpr.eqns) for var in eqn.outvars
        }
        self._is_transposed = partial(_is_transposed, mesh=mesh)
        self.of_uses = [(use, tuple(self._of(use))) for use in decisions.uses]

    def _of(self, use: Use) -> Iterator[PossibleCopy]:
        """Yield the copies that a use may need, which depends on the specs."""
        eqns = self._step.jaxpr.eqns
        if use.eqn is None:
            yield from self._of_output(use.operand)
            return
        eqn = eqns[use.eqn]
        atom = eqn.invars[use.operand]
        first, last = self._readings.get(eqn.outvars[0], (use.eqn, use.eqn))
        if is_view(eqn) or not stored_values(self._step).isdisjoint(eqn.outvars):
            first = last = use.eqn
        if eqn.primitive in control_flow.ENTERING:
            _, last = self._loops[control_flow.token_of(eqn)]
        is_relaid_here = is_relaid(eqn, use.operand)
        if atom in self._batch:  # XLA gathers examples first
            first = 0
        elif atom in self.divisible and not is_relaid_here:
            first = self._made[atom]
        if is_relaid_here:
            is_made = _always
        elif record_of(eqn).fusion in ("elementwise", "reduction", "input"):
            is_made = _is_gathered
        else:
            is_made = _is_resharded
        yield PossibleCopy(self._moved_for.get(atom, atom), first, last, is_made)

    def _of_output(self, output: int) -> Iterator[PossibleCopy]:
        """Yield the copies that the next value of an input may need if it is resharded.

        XLA gathers it along the leading dim in place. Gathered along others, it is transposed into
        its place after everything else, so all such copies are live together at the end of the
        step. Where something reads the old value later, XLA has to keep that, too.
        """
        atom, end = self._step.jaxpr.outvars[output], len(self._step.jaxpr.eqns) - 1
        yield PossibleCopy(atom, self._made.get(atom, 0), end, self._is_transposed)
        if output in self._read_late:
            source = self._step.jaxpr.invars[self._step.carried[output]]
            yield PossibleCopy(source, *self._readings[source], _is_gathered)


def divisible_values(step: StepGraph, decisions: Decisions) -> Mapping[Var, Sequence[Use]]:
    """Return the results of fused kernels that may be computed in parts, with their uses."""
    returned = variables(step.jaxpr.outvars)
    kept = {*returned, *step.cross_task_values}
    found: dict[Var, list[Use]] = {
        var: []
        for eqn in step.jaxpr.eqns
        if record_of(eqn).fusion == "elementwise"
        for var in eqn.outvars
        if var not in kept
    }
    uses = {(use.eqn, use.operand): use for use in decisions.uses}
    for number, eqn in enumerate(step.jaxpr.eqns):
        for operand, atom in enumerate(eqn.invars):
            if isinstance(atom, Var) and atom in found:
                use = None if is_view(eqn) else uses.get((number, operand))
                if use is None:
                    del found[atom]
                else:
                    found[atom].append(use)
    return {var: own for var, own in found.items() if own}


def _read_late(step: StepGraph) -> Iterator[int]:
    """Yield the outputs whose input is read after they are computed.

    XLA runs a loop when nothing else can run. So of all products that read an input, those that
    lead to a loop may run after the update of the input, if that does not depend on the loop.
    """
    eqns = step.jaxpr.eqns
    makers = {var: number for number, eqn in enumerate(eqns) for var in eqn.outvars}
    bases = bases_of_views(step)

    def ancestors(atoms: Iterable[Atom]) -> set[int]:
        """Return the numbers of the equations that values depend on."""
        found: set[int] = set()
        pending = [*atoms]
        while pending:
            var = pending.pop()
            number = makers.get(var) if isinstance(var, Var) else None
            if number is not None and number not in found:
                found.add(number)
                pending += eqns[number].invars
        return found

    before_loops: dict[int, set[int]] = {}
    for token, (start, end) in control_flow.spans(eqns).items():
        entering = [eqn for eqn in eqns[start:end] if eqn.primitive in control_flow.ENTERING]
        of_loop = [eqn.invars[0] for eqn in entering if control_flow.token_of(eqn) is token]
        before_loops[start] = ancestors(of_loop)
    readers: dict[Var, set[int]] = {}
    for number, eqn in enumerate(eqns):
        if record_of(eqn).fusion == "contraction":
            for atom in variables(eqn.invars):
                readers.setdefault(bases.get(atom, atom), set()).add(number)
    for output, source in step.carried.items():
        products = readers.get(step.jaxpr.invars[source], set())
        if any(not products.isdisjoint(before) for before in before_loops.values()):
            own = ancestors([step.jaxpr.outvars[output]])
            if any(
                not products.isdisjoint(before - own)
                for start, before in before_loops.items()
                if start not in own
            ):
                yield output
