"""A step that computes some values of its forward pass again, right before its backward pass reads.

The equations of these values are repeated before their first reader in the backward pass. They are
the same equations, random bits included, so results do not change. The values that the repeated
equations read pass an `optimization_barrier` together with a value that the backward pass has
computed, as in `jax.checkpoint`. Without it XLA would merge a repeated equation with its original,
or run it before the backward pass begins.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

from jax.extend.core import JaxprEqn, Var
from jax.lax import optimization_barrier_p

from autopar.ir.equation_groups import Unit, units
from autopar.ir.graph import Atom, is_backward, needed
from autopar.ir.memo import memoized_on_step
from autopar.ir.rebuilding import Placed, rebuilt, retraced_alike
from autopar.ir.step_graph import StepGraph
from autopar.microbatch.gradients import accumulate_p
from autopar.xla_fusion import stored_values

SCOPE = "rematted_computation"
"""The scope of repeated equations, as JAX names those of `jax.checkpoint`."""


class RecomputeError(ValueError):
    """An equation can't be computed again in the backward pass."""


@dataclass(frozen=True, eq=False)
class Passes:
    """The parts of a step that matter for recomputation.

    Attributes:
        step: The step.
        units: Its equations, with loops and switches as one unit each.
        late: For each unit, whether the backward pass runs it.
        region: For each unit, the parts of the step in microbatches that run it.
    """

    step: StepGraph
    units: tuple[Unit, ...]
    late: tuple[bool, ...]
    region: tuple[frozenset[int], ...]

    @cached_property
    def made_in(self) -> Mapping[Var, int]:
        """The unit that computes each value."""
        return {var: u for u, unit in enumerate(self.units) for var in unit.makes}

    @cached_property
    def readers(self) -> Mapping[Var, tuple[int, ...]]:
        """The units that read each value, in order."""
        readers: dict[Var, list[int]] = {}
        for u, unit in enumerate(self.units):
            for var in unit.reads:
                readers.setdefault(var, []).append(u)
        return {var: tuple(numbers) for var, numbers in readers.items()}

    @cached_property
    def depending(self) -> frozenset[Var]:
        """The values that depend on an input, and so are no constants of the compiler."""
        reached: set[Var] = set(self.step.jaxpr.invars)
        for unit in self.units:
            if not reached.isdisjoint(unit.reads):
                reached.update(unit.makes)
        return frozenset(reached)

    @cached_property
    def heads(self) -> tuple[int, ...]:
        """For each unit of the backward pass, the first unit in the same kernel.

        It is reached through values that XLA does not store. What a kernel reads is computed before
        its first unit, because a barrier among its units would make XLA store what passes it.
        """
        stored = stored_values(self.step)
        heads: list[int] = []
        for u, unit in enumerate(self.units):
            makers = (self.made_in.get(var) for var in unit.reads if var not in stored)
            inside = (
                heads[maker]
                for maker in makers
                if maker is not None and self.late[maker] and self.region[maker] == self.region[u]
            )
            heads.append(min([u, *inside]) if self.late[u] else u)
        return tuple(heads)

    @cached_property
    def headed(self) -> Mapping[int, tuple[int, ...]]:
        """The units of each kernel, by its first unit."""
        headed: dict[int, list[int]] = {}
        for u, head in enumerate(self.heads):
            headed.setdefault(head, []).append(u)
        return {head: tuple(members) for head, members in headed.items()}

    def is_repeatable(self, u: int) -> bool:
        """Return whether the equation of a unit may be repeated in the backward pass."""
        unit = self.units[u]
        _, eqn = unit.eqns[0]
        return (
            len(unit.eqns) == 1
            and not self.late[u]
            and not eqn.effects
            and eqn.primitive is not accumulate_p
            and not self.depending.isdisjoint(unit.reads)
        )


@memoized_on_step
def passes(step: StepGraph) -> Passes:
    """Return the forward and backward pass of a step."""
    grouped = tuple(units(enumerate(step.jaxpr.eqns)))
    late = tuple(any(is_backward(eqn) for _, eqn in unit.eqns) for unit in grouped)
    parts: dict[int, set[int]] = {}
    if micro := step.microbatching:
        for part, eqns in enumerate((micro.tail, *(loop.body for loop in micro.loops))):
            for number, _ in eqns:
                parts.setdefault(number, set()).add(part)
    region = tuple(frozenset(parts.get(unit.number, ())) for unit in grouped)
    return Passes(step, grouped, late, region)


def recompute(step: StepGraph, numbers: Collection[int]) -> StepGraph:
    """Return the step with equations repeated in the backward pass.

    Args:
        step: The step as it was traced.
        numbers: The numbers of the equations. The backward pass reads no result of them, but
            computes it again, from values that are kept and from each other.

    Raises:
        RecomputeError: There is no such equation, or it is part of a loop, has an effect, depends
            on no input, or is in the backward pass itself.
    """
    if not numbers:
        return step
    rewritten = _Rewriter(passes(step), frozenset(numbers)).run()
    return retraced_alike(rewritten, step, lambda parts: recompute(parts, numbers))


class _Rewriter:
    """Copies the equations of a step, with repeated ones among them.

    Attributes:
        passes: The forward and backward pass.
        eqns: The equations so far.
        repeated: The units to repeat.
        copies: For each value that the backward pass has computed again, the copy.
        renamed: For values that passed a barrier, their name behind it.
    """

    def __init__(self, found: Passes, numbers: frozenset[int]) -> None:
        self.passes = found
        self.eqns: list[Placed] = []
        self.copies: dict[Var, Var] = {}
        self.renamed: dict[Var, Var] = {}
        unit_of = {unit.number: u for u, unit in enumerate(found.units)}
        for number in sorted(numbers):
            if number not in unit_of or not found.is_repeatable(unit_of[number]):
                raise RecomputeError(
                    f"equation {number} can't be computed again in the backward pass of"
                    f" {found.step.name}, which has {len(found.step.jaxpr.eqns)} equations"
                )
        self.repeated = frozenset(unit_of[number] for number in numbers)

    def run(self) -> StepGraph:
        """Return the rewritten step."""
        step = self.passes.step
        for u, unit in enumerate(self.passes.units):
            late = self.passes.late[u]
            if late:
                self._repeat_for(u)
            for number, eqn in unit.eqns:
                invars = [self._read(atom, u if late else None) for atom in eqn.invars]
                self.eqns.append(Placed(number, eqn.replace(invars=invars), number))
        outvars = [self._read(atom) for atom in step.jaxpr.outvars]
        self._drop_unread(outvars)
        return rebuilt(step, self.eqns, outvars)

    def _read(self, atom: Atom, u: int | None = None) -> Atom:
        """Return the name of a value for a reader.

        Args:
            atom: The value.
            u: The reading unit if it is in the backward pass.
        """
        if not isinstance(atom, Var):
            return atom
        if u is not None and atom in self.copies and self._in_region(atom, u):
            return self.copies[atom]
        return self.renamed.get(atom, atom)

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

    def _repeat_for(self, u: int) -> None:
        """Append the repeated equations that the kernel reads first whose first unit is `u`."""
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
        if not chosen:
            return
        at = units_of_step[u].number
        copied = [units_of_step[maker].eqns[0] for maker in sorted(chosen)]
        behind = self._barrier(u, reads, [eqn for _, eqn in copied])
        for number, eqn in copied:
            outvars = [Var(var.aval) for var in eqn.outvars]
            invars = [
                self.copies.get(atom) or behind.get(atom, atom) if isinstance(atom, Var) else atom
                for atom in eqn.invars
            ]
            self.copies.update(zip(eqn.outvars, outvars, strict=True))
            copy = _in_backward(eqn).replace(invars=invars, outvars=outvars)
            self.eqns.append(Placed(at, copy, number))

    def _barrier(self, u: int, reads: Iterable[Var], copied: Sequence[JaxprEqn]) -> dict[Var, Var]:
        """Put the kept values that repeated equations read behind a barrier; return their names.

        Constants stay as they are, so that XLA computes them where they are read.

        Args:
            u: The unit before which the equations are repeated.
            reads: The values that its kernel reads.
            copied: The equations.
        """
        made = {var for eqn in copied for var in eqn.outvars}
        kept = dict.fromkeys(
            atom
            for eqn in copied
            for atom in eqn.invars
            if isinstance(atom, Var) and atom in self.passes.depending
            if atom not in made and atom not in self.copies
        )
        if not kept:
            return {}
        tie = self._tie(u, reads, {*kept, *made})
        operands = [self.renamed.get(var, var) for var in (*kept, *tie)]
        results = [Var(var.aval) for var in operands]
        barrier = _in_backward(copied[0]).replace(
            primitive=optimization_barrier_p, params={}, invars=[*operands], outvars=results
        )
        self.eqns.append(Placed(self.passes.units[u].number, barrier))
        self.renamed.update(zip(tie, results[len(kept) :], strict=True))
        return dict(zip(kept, results, strict=False))

    def _tie(self, u: int, reads: Iterable[Var], excluded: Collection[Var]) -> list[Var]:
        """Return a value that exists before unit `u` and is read from there on, if there is one.

        The barrier makes the repeated equations wait for it. A cotangent that the kernel reads
        comes first, then the value that was computed last.
        """
        found = self.passes
        stored = stored_values(found.step)
        outputs = {atom for atom in found.step.jaxpr.outvars if isinstance(atom, Var)}

        def serves(var: Var) -> bool:
            maker = found.made_in.get(var)
            return (
                maker is not None
                and maker < u
                and maker not in self.repeated
                and var in stored
                and found.region[maker] == found.region[u]
                and var in found.depending
                and var not in excluded
                and (var in outputs or found.readers.get(var, (-1,))[-1] >= u)
            )

        late = [var for var in reads if serves(var) and found.late[found.made_in[var]]]
        if late:
            return [max(late, key=lambda var: found.made_in[var])]
        latest = (var for unit in reversed(found.units[:u]) for var in unit.makes)
        return list(islice(filter(serves, latest), 1))


def _in_backward(eqn: JaxprEqn) -> JaxprEqn:
    """Return an equation with the name of recomputation in a backward pass."""
    stack = eqn.source_info.name_stack
    stack = type(stack)().transform("transpose") + stack.extend(SCOPE)
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=stack))
