"""A step whose backward pass computes forward values again, or fetches them from host memory.

The equations of these values are repeated before their first reader in the backward pass. They are
the same equations, random bits included, so results do not change. The values that the repeated
equations read pass an `optimization_barrier` together with a value that the backward pass has
computed, as in `jax.checkpoint`. Without it XLA would merge a repeated equation with its original,
or run it before the backward pass begins.

Copies of stored values pass another barrier, together with the values that they are computed from,
before other kernels read either. Otherwise XLA merges the copies into these kernels, and all
operands and results of a merged kernel are in memory at once.

A value that is offloaded is copied to host memory when it is computed. XLA would delay the copy as
long as it can, and keep the value on the device. So a barrier makes a later product of the forward
pass wait for it. The copy back passes a barrier like a repeated equation.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice

from jax.extend.core import JaxprEqn, Var
from jax.lax import optimization_barrier_p

from autopar.ir.array_sizes import value_bytes
from autopar.ir.equation_groups import Unit
from autopar.ir.graph import Atom, aval_of, is_backward, needed, variables, with_name_stack
from autopar.ir.host_memory import move_beside, on_host, to_device_p, to_host_p
from autopar.ir.memo import memoized_on_step
from autopar.ir.rebuilding import Placed, rebuilt, retraced_alike
from autopar.ir.step_graph import StepGraph
from autopar.microbatch.gradients import accumulate_p
from autopar.primitives import record_of
from autopar.recompute.passes import Passes, passes

_NEGLIGIBLE = 0.005
"""Share of the bytes of all values of layers below which one stays on the device."""

SCOPE = "rematted_computation"
"""The scope of repeated equations, as JAX names those of `jax.checkpoint`."""


class RecomputeError(ValueError):
    """An equation can't be computed again in the backward pass, or offloaded between the passes."""


def recompute(
    step: StepGraph,
    numbers: Collection[int],
    offloaded: Collection[int] = (),
    in_layers: bool = False,
) -> StepGraph:
    """Return the step with equations repeated in the backward pass, and results in host memory.

    Args:
        step: the step as it was traced.
        numbers: the numbers of the equations to repeat. The backward pass reads no result of them,
            but computes it again, from values that are kept or fetched and from each other.
        offloaded: the numbers of the equations whose results the backward pass fetches from host
            memory.
        in_layers: whether the step is a pipeline, whose tasks end with what they copy.

    Raises:
        RecomputeError: There is no such equation, or it is part of a loop, has an effect, depends
            on no input, or is in the backward pass itself; or the backward pass reads no result of
            an equation to offload, or nothing in the forward pass can wait for its copy.
    """
    if not numbers and not offloaded:
        return step
    rewriter = _Rewriter(passes(step), frozenset(numbers), frozenset(offloaded), in_layers)
    return retraced_alike(
        rewriter.run(), step, lambda parts: recompute(parts, numbers, offloaded, in_layers)
    )


@memoized_on_step
def results_saved_in_layers(step: StepGraph) -> tuple[int, ...]:
    """Return the numbers of the equations whose results a pipeline may offload.

    Small results stay on the devices.
    """
    found = passes(step)
    sizes: dict[int, int] = {}
    for var in found.saved_in_layers:
        number = found.units[found.made_in[var]].number
        sizes[number] = sizes.get(number, 0) + value_bytes(var)
    least = _NEGLIGIBLE * sum(sizes.values())
    return tuple(sorted(number for number, size in sizes.items() if size >= least))


def with_waits(step: StepGraph) -> StepGraph:
    """Return the step with waits for its own copies to host memory.

    A policy of `jax.checkpoint` may make such copies.

    Args:
        step: the step as it was traced, as one program.
    """
    found = passes(step)
    moves = [unit.number for unit in found.units if _is_copy_to_host(unit)]
    if not moves:
        return step
    rewriter = _Rewriter(found, frozenset(), frozenset(), in_layers=False)
    rewriter.wait_for(moves)
    return retraced_alike(rewriter.run(), step, with_waits)


class _Rewriter:
    """Copies the equations of a step, with repeated ones and moves among them.

    Attributes:
        passes: the forward and backward pass.
        eqns: the equations so far.
        repeated: the units to repeat.
        on_host: for each value to offload, its name in host memory.
        waiting: for units of the forward pass, the values that are in host memory before them.
        in_layers: whether the step is a pipeline.
        copies: for each value that the backward pass has computed again or fetched, the copy.
        renamed: for values that passed a barrier in the same part of the step in microbatches, as
            `Passes.region` has it, their name behind it.
    """

    def __init__(
        self,
        found: Passes,
        numbers: frozenset[int],
        offloaded: frozenset[int],
        in_layers: bool,
    ) -> None:
        self.passes = found
        self.in_layers = in_layers
        self.eqns: list[Placed] = []
        self.copies: dict[Var, Var] = {}
        self.renamed: dict[frozenset[int], dict[Var, Var]] = {}
        unit_of = {unit.number: u for u, unit in enumerate(found.units)}
        for number in sorted(numbers):
            if number not in unit_of or not found.is_repeatable(unit_of[number]):
                raise RecomputeError(
                    f"equation {number} can't be computed again in the backward pass of"
                    f" {found.step.name}, which has {len(found.step.jaxpr.eqns)} equations; plan"
                    " the step again"
                )
        self.repeated = frozenset(unit_of[number] for number in numbers)
        self.on_host: dict[Var, Var] = {}
        self.waiting: dict[int, list[Var]] = {}
        for number in sorted(offloaded):
            fetched = self._fetched(unit_of[number]) if number in unit_of else []
            if not fetched:
                raise RecomputeError(
                    f"no result of equation {number} can be in host memory between the forward and"
                    f" backward pass of {found.step.name}, which has"
                    f" {len(found.step.jaxpr.eqns)} equations"
                )
            for var in fetched:
                self.on_host[var] = Var(on_host(aval_of(var)))
                if not in_layers:
                    self.waiting.setdefault(found.arrivals[var], []).append(var)

    def wait_for(self, moves: Collection[int]) -> None:
        """Let the forward pass wait for copies to host memory that the step makes itself.

        Args:
            moves: the numbers of their equations.
        """
        eqns = self.passes.step.jaxpr.eqns
        for number in moves:
            source, (result,) = eqns[number].invars[0], eqns[number].outvars
            arrival = self.passes.arrivals.get(source) if isinstance(source, Var) else None
            if arrival is not None:
                self.waiting.setdefault(arrival, []).append(result)

    def run(self) -> StepGraph:
        """Return the rewritten step."""
        step = self.passes.step
        for u, unit in enumerate(self.passes.units):
            late = self.passes.late[u]
            if late:
                self._copy_for(u)
            elif u in self.waiting:
                self._wait_before(u)
            for number, eqn in unit.eqns:
                invars = [self._read(atom, u) for atom in eqn.invars]
                self.eqns.append(Placed(number, eqn.replace(invars=invars), number))
            for var in unit.makes:
                if var in self.on_host:
                    number, eqn = unit.eqns[-1]
                    move = move_beside(eqn, to_host_p, var, self.on_host[var])
                    self.eqns.append(Placed(number, move))
        outvars = [self._read(atom) for atom in step.jaxpr.outvars]
        self._drop_unread(outvars)
        return rebuilt(step, self.eqns, outvars)

    def _fetched(self, u: int) -> list[Var]:
        """Return the results of a unit that may be offloaded and that the backward pass reads."""
        found = self.passes
        movable = found.saved_in_layers if self.in_layers else found.arrivals
        return [
            var
            for var in found.units[u].makes
            if var in movable
            and any(
                (found.late[reader] or reader in self.repeated)
                and found.region[reader] == found.region[u]
                for reader in found.readers.get(var, ())
            )
        ]

    def _read(self, atom: Atom, u: int | None = None) -> Atom:
        """Return the name of a value for a reader.

        Args:
            atom: the value.
            u: the reading unit; None for the step, which returns the value.
        """
        if not isinstance(atom, Var):
            return atom
        is_late = u is not None and self.passes.late[u]
        if u is not None and is_late and atom in self.copies and self._in_region(atom, u):
            return self.copies[atom]
        return self._names(u).get(atom, atom)

    def _names(self, u: int | None) -> dict[Var, Var]:
        """Return the names behind barriers that a unit reads, see `renamed`."""
        region = frozenset[int]() if u is None else self.passes.region[u]
        return self.renamed.setdefault(region, {})

    def _drop_unread(self, outvars: Sequence[Atom]) -> None:
        """Drop equations that only the backward pass read, and their sources that nothing reads."""
        read = {number for number, _ in needed(enumerate(p.eqn for p in self.eqns), outvars)}
        self.eqns = [
            placed
            for number, placed in enumerate(self.eqns)
            if number in read or placed.eqn.primitive is accumulate_p
        ]

    def _in_region(self, var: Var, u: int) -> bool:
        return self.passes.region[self.passes.made_in[var]] == self.passes.region[u]

    def _missing(self, variables: Iterable[Var], u: int) -> list[int]:
        """Return the units to repeat among those that compute some values, for unit `u`."""
        makers = (self.passes.made_in.get(var) for var in variables if var not in self.copies)
        region = self.passes.region
        return [m for m in makers if m in self.repeated and region[m] == region[u]]

    def _wait_before(self, u: int) -> None:
        """Make a unit of the forward pass wait until values are in host memory."""
        variables = self.waiting[u]
        tie = self.passes.ties[u]
        renamed = self._names(u)
        operands = [*(self.on_host.get(var, var) for var in variables), renamed.get(tie, tie)]
        number, eqn = self.passes.units[u].eqns[0]
        *arrived, renamed[tie] = self._append_barrier(number, eqn, operands)
        for var, name in zip(variables, arrived, strict=True):
            names = self.on_host if var in self.on_host else renamed
            names[var] = name

    def _copy_for(self, u: int) -> None:
        """Append what the kernel reads first whose first unit is `u`, fetched or computed again."""
        units_of_step = self.passes.units
        kernel = self.passes.headed.get(u, ())
        reads = dict.fromkeys(var for member in kernel for var in units_of_step[member].reads)
        pending = self._missing(reads, u)
        chosen: set[int] = set()
        while pending:
            maker = pending.pop()
            if maker not in chosen:
                chosen.add(maker)
                pending += self._missing(units_of_step[maker].reads, u)
        read = dict.fromkeys(reads)
        read.update((var, None) for maker in sorted(chosen) for var in units_of_step[maker].reads)
        fetched = [
            var
            for var in read
            if var in self.on_host and var not in self.copies and self._in_region(var, u)
        ]
        if not chosen and not fetched:
            return
        at = units_of_step[u].number
        copied = [units_of_step[maker].eqns[0] for maker in sorted(chosen)]
        behind = self._barrier(u, reads, [eqn for _, eqn in copied], fetched)
        for var in fetched:
            _, eqn = units_of_step[self.passes.made_in[var]].eqns[0]
            copy = Var(var.aval)
            self.copies[var] = copy
            move = move_beside(_in_backward(eqn), to_device_p, behind[var], copy)
            self.eqns.append(Placed(at, move))
        for number, eqn in copied:
            self._append_copy(at, number, eqn, behind)
        if not self._keep_apart(u, [eqn for _, eqn in copied], behind):
            return
        known: dict[Var, bool] = {}
        for number, eqn in copied:
            is_inside = self.passes.stored.isdisjoint(eqn.outvars) and record_of(eqn).is_inlined
            if is_inside and any(self._is_read_later(var, u, known) for var in eqn.outvars):
                self._append_copy(at, number, eqn, behind)

    def _append_copy(self, at: int, number: int, eqn: JaxprEqn, behind: Mapping[Var, Var]) -> None:
        """Append an equation once more, which reads copies and values behind a barrier.

        Args:
            at: the number of the equation before which it is placed.
            number: its own number.
            eqn: the equation.
            behind: the names of values behind the barrier.
        """
        invars = [
            self.copies.get(atom) or behind.get(atom, atom) if isinstance(atom, Var) else atom
            for atom in eqn.invars
        ]
        outvars = [Var(var.aval) for var in eqn.outvars]
        self.copies.update(zip(eqn.outvars, outvars, strict=True))
        copy = _in_backward(eqn, SCOPE).replace(invars=invars, outvars=outvars)
        self.eqns.append(Placed(at, copy, number))

    def _is_read_later(self, var: Var, u: int, known: dict[Var, bool]) -> bool:
        """Return whether the backward pass reads a value in unit `u` or later, or copies to come.

        Args:
            var: the value.
            u: the unit.
            known: the answers so far for this unit.
        """
        found = self.passes
        if var not in known:
            known[var] = any(
                reader >= u
                if found.late[reader]
                else reader in self.repeated
                and any(
                    made not in self.copies
                    if made in found.stored
                    else self._is_read_later(made, u, known)
                    for made in found.units[reader].makes
                )
                for reader in found.readers.get(var, ())
            )
        return known[var]

    def _keep_apart(self, u: int, copied: Sequence[JaxprEqn], behind: dict[Var, Var]) -> bool:
        """Make the kernels that follow wait for stored copies that XLA may merge into them.

        These are copies by elementwise equations. A merged kernel would have them as further
        results, and what they are computed from would live until then. A kernel is merged if it
        reads a copy, or the same values as a copy. So these values pass a barrier with the copies.

        Args:
            u: the first unit that follows the copies.
            copied: the repeated equations.
            behind: the names of the values behind the barrier before the copies.

        Returns:
            Whether there is such a copy.
        """
        found = self.passes
        inlined = {v: eqn for eqn in copied if record_of(eqn).is_inlined for v in eqn.outvars}
        apart = [var for var in inlined if var in found.stored]
        if not apart:
            return False
        together, pending = dict.fromkeys(apart), list(apart)
        known: dict[Var, bool] = {}
        while pending:
            for var in variables(inlined[pending.pop()].invars):
                if var in inlined and var not in found.stored:
                    pending.append(var)
                elif (
                    var in self.copies or (var in behind and not self.in_layers)
                ) and self._is_read_later(var, u, known):
                    together[var] = None
        operands = [self.copies.get(var) or behind[var] for var in together]
        beside = _in_backward(found.units[u].eqns[0][1])
        names = self._append_barrier(found.units[u].number, beside, operands)
        for var, name in zip(together, names, strict=True):
            if var in self.copies:
                self.copies[var] = name
            else:
                behind[var] = self._names(u)[var] = name
        return True

    def _barrier(
        self, u: int, reads: Iterable[Var], copied: Sequence[JaxprEqn], fetched: Sequence[Var]
    ) -> dict[Var, Var]:
        """Put what copies are made from behind a barrier; return the names there.

        These are the kept values that repeated equations read, and fetched values in host memory.
        Constants stay as they are, so that XLA computes them where they are read.

        Args:
            u: the unit before which the copies are made.
            reads: the values that its kernel reads.
            copied: the equations to repeat.
            fetched: the values to fetch.
        """
        made = {*fetched, *(var for eqn in copied for var in eqn.outvars)}
        kept = dict.fromkeys(
            atom
            for eqn in copied
            for atom in eqn.invars
            if isinstance(atom, Var) and atom in self.passes.depending
            if atom not in made and atom not in self.copies
        )
        sources = [*kept, *fetched]
        if not sources:
            return {}
        tie = self._tie(u, reads, {*kept, *made})
        renamed = self._names(u)
        operands = [renamed.get(var, var) for var in kept]
        operands += [self.on_host[var] for var in fetched]
        operands += [renamed.get(var, var) for var in tie]
        beside = copied[0] if copied else self.passes.units[u].eqns[0][1]
        number = self.passes.units[u].number
        results = self._append_barrier(number, _in_backward(beside, SCOPE), operands)
        renamed.update(zip(tie, results[len(sources) :], strict=True))
        return dict(zip(sources, results, strict=False))

    def _append_barrier(self, at: int, beside: JaxprEqn, operands: Sequence[Var]) -> list[Var]:
        """Append a barrier that is placed at an equation; return the results.

        Args:
            at: the number of the equation.
            beside: an equation in the scope of the barrier.
            operands: what passes it.
        """
        results = [Var(var.aval) for var in operands]
        barrier = beside.replace(
            primitive=optimization_barrier_p,
            params={},
            invars=list(operands),
            outvars=results,
            effects=frozenset(),
        )
        self.eqns.append(Placed(at, barrier))
        return results

    def _tie(self, u: int, reads: Iterable[Var], excluded: Collection[Var]) -> list[Var]:
        """Return a value that exists before unit `u` and is read from there on, if there is one.

        The barrier makes the copies wait for it. A cotangent that the kernel reads comes first,
        then the value that was computed last.
        """
        found = self.passes
        outputs = set(variables(found.step.jaxpr.outvars))
        layer = found.layers[u]

        def serves(var: Var) -> bool:
            maker = found.made_in.get(var)
            return (
                maker is not None
                and maker < u
                and maker not in self.repeated
                and var in found.stored
                and found.region[maker] == found.region[u]
                and var in found.depending
                and var not in excluded
                and (not self.in_layers or is_inside(var))
                and (var in outputs or found.readers.get(var, (-1,))[-1] >= u)
            )

        def is_inside(var: Var) -> bool:
            """Return whether the barrier makes no value cross to another stage."""
            later = (reader for reader in found.readers.get(var, ()) if reader >= u)
            is_read = var in reads or found.layers[found.made_in[var]] == layer
            return is_read and all(found.layers[reader] == layer for reader in later)

        late = [var for var in reads if serves(var) and found.late[found.made_in[var]]]
        if late:
            return [max(late, key=lambda var: found.made_in[var])]
        latest = (var for unit in reversed(found.units[:u]) for var in unit.makes)
        return list(islice(filter(serves, latest), 1))


def _is_copy_to_host(unit: Unit) -> bool:
    (_, eqn), *others = unit.eqns
    return eqn.primitive is to_host_p and not others and not is_backward(eqn)


def _in_backward(eqn: JaxprEqn, scope: str = "") -> JaxprEqn:
    """Return an equation with a name in a backward pass.

    Args:
        eqn: the equation.
        scope: the scope of the equation there; `SCOPE` if it is computed again.
    """
    stack = eqn.source_info.name_stack
    inner = stack.extend(scope) if scope else stack
    stack = type(stack)().transform("transpose") + inner
    return with_name_stack(eqn, stack)
