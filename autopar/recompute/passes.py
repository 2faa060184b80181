"""The forward and backward pass of a step: the kernel that computes each value, and its readers."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from jax.extend.core import Var

from autopar.ir.equation_groups import Unit, units
from autopar.ir.graph import aval_of, is_backward
from autopar.ir.host_memory import is_on_host
from autopar.ir.keys import is_key
from autopar.ir.memo import memoized_on_step
from autopar.ir.step_graph import StepGraph
from autopar.layering.layer_scopes import layer_of
from autopar.microbatch.gradients import accumulate_p
from autopar.primitives import record_of
from autopar.xla_fusion import stored_values


@dataclass(frozen=True, eq=False)
class Passes:
    """The parts of a step that matter for recomputation.

    Attributes:
        step: the step.
        units: its equations, with loops and switches as one unit each.
        late: for each unit, whether the backward pass runs it.
        region: for each unit, the parts of the step in microbatches that run it.
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
        return self._reached(self.step.jaxpr.invars)

    @cached_property
    def per_batch(self) -> frozenset[Var]:
        """The values that depend on the batch; if none is known, those that depend on an input.

        The others, such as random masks, XLA may compute at any time. It would compute them early,
        in order to copy them to host memory.
        """
        num_arguments = self.step.in_tree.num_leaves  # the positions of the examples come after
        batch = [self.step.jaxpr.invars[i] for i in self.step.batch if i < num_arguments]
        return self._reached(batch) if batch else self.depending

    def _reached(self, sources: Iterable[Var]) -> frozenset[Var]:
        """Return the values that depend on some."""
        reached = set(sources)
        for unit in self.units:
            if not reached.isdisjoint(unit.reads):
                reached.update(unit.makes)
        return frozenset(reached)

    @cached_property
    def stored(self) -> frozenset[Var]:
        """The values that are written to device memory."""
        return stored_values(self.step)

    @cached_property
    def heads(self) -> tuple[int, ...]:
        """For each unit of the backward pass, the first unit in the same kernel.

        It is reached through values of its layer that XLA does not store. What a kernel reads is
        computed before its first unit, because a barrier among its units would make XLA store what
        passes it.
        """
        heads: list[int] = []
        for u, unit in enumerate(self.units):
            makers = (self.made_in.get(var) for var in unit.reads if var not in self.stored)
            inside = (
                heads[maker]
                for maker in makers
                if maker is not None and self.late[maker] and self.region[maker] == self.region[u]
                if self.layers[maker] == self.layers[u]
            )
            heads.append(min([u, *inside]) if self.late[u] else u)
        return tuple(heads)

    @cached_property
    def arrivals(self) -> Mapping[Var, int]:
        """For each value that may be offloaded, the unit before which it is in host memory.

        The first kernel of a product or loop waits for its copy that the forward pass runs after
        the last kernel that reads it. Without such a unit after it, the value stays on the device.
        """
        until: dict[Var, int] = {}
        for u, unit in reversed(list(enumerate(self.units))):
            if self.late[u]:
                continue
            inside = (until.get(var, u) for var in unit.makes if var not in self.stored)
            last = max([u, *inside])
            for var in unit.reads:
                until[var] = max(last, until.get(var, u))
        found: dict[Var, int] = {}
        for var, u in self.made_in.items():
            if var not in self.stored or not self._is_movable(var):
                continue
            waits = (w for w in self.ties if w > until.get(var, u))
            waiting = (w for w in waits if self.region[w] == self.region[u])
            if (first := next(waiting, None)) is not None:
                found[var] = first
        return found

    @cached_property
    def saved_in_layers(self) -> frozenset[Var]:
        """The values of a layer that, of all backward passes, only its own reads.

        In a pipeline they pass from one task to another, so nothing needs to wait for their copies.
        Forward passes may read them anywhere.
        """
        saved: set[Var] = set()
        for var, readers in self.readers.items():
            u = self.made_in.get(var)
            layer = None if u is None else self.layers[u]
            late = [reader for reader in readers if self.late[reader]]
            if u is None or layer is None or not late or not self._is_movable(var):
                continue
            if all(self.layers[r] == layer and self.region[r] == self.region[u] for r in late):
                saved.add(var)
        return frozenset(saved)

    @cached_property
    def layers(self) -> tuple[int | None, ...]:
        """The layer of each unit, if the step is in layers."""
        labels = (layer_of(unit.eqns[0][1]) for unit in self.units)
        return tuple(None if label is None else label[0] for label in labels)

    def _is_movable(self, var: Var) -> bool:
        """Return whether a value is one of the forward pass that the host can store."""
        u = self.made_in[var]
        (_, eqn), *others = self.units[u].eqns
        return not (
            self.late[u]
            or others
            or var not in self.per_batch
            or eqn.primitive is accumulate_p
            or is_key(aval_of(var).dtype)
            or is_on_host(var)
        )

    @cached_property
    def ties(self) -> Mapping[int, Var]:
        """The first units of products and loops of the forward pass, in order.

        With each, a stored value that the kernel reads: if it exists only once a copy has arrived,
        the kernel waits for the copy.
        """
        ties: dict[int, Var] = {}
        for u, unit in enumerate(self.units):
            (_, eqn), *others = unit.eqns
            if self.late[u] or not (others or record_of(eqn).fusion == "contraction"):
                continue
            first, operands = self._stored_operands(u)
            made = [
                var
                for var in operands
                if self.made_in.get(var, first) < first
                and self.region[self.made_in[var]] == self.region[u]
                and var in self.depending
                and not is_key(aval_of(var).dtype)
                and not is_on_host(var)
            ]
            if made:
                ties.setdefault(first, max(made, key=lambda var: self.made_in[var]))
        return dict(sorted(ties.items()))

    def _stored_operands(self, u: int) -> tuple[int, list[Var]]:
        """Return the first unit in the kernel of a unit, and the stored values that it reads."""
        first, pending = u, list(self.units[u].reads)
        operands: list[Var] = []
        while pending:
            var = pending.pop()
            maker = self.made_in.get(var)
            if var in self.stored or maker is None:
                operands.append(var)
            else:
                first = min(first, maker)
                pending += self.units[maker].reads
        return first, operands

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
