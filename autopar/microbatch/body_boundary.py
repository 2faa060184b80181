"""The boundary of the body: the values that are accumulated over microbatches.

The *body* of a step runs for each microbatch, its *tail* runs once. The body has the backward pass,
which JAX names `transpose(...)`, and everything that the backward pass depends on. Of the other
equations that depend on the batch, such as those of a loss or of metrics, it has those that keep a
row per example and those that first sum over the examples: `argmax(logits) == labels` and its sum
are in the body, the division by the number of examples is in the tail. Values of the body that the
tail reads, or that the step returns, are accumulated. Rows are joined only if something in the tail
needs the rows themselves.
"""

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Var

from autopar.ir.control_flow import loop_test_p
from autopar.ir.equation_groups import (
    Unit,
    dependents,
    effects_in,
    effects_of,
    has_backward,
    units,
    without_effects,
)
from autopar.ir.evaluate import Numbered
from autopar.ir.graph import (
    Atom,
    aval_of,
    is_backward,
    needed,
    renamed,
    rewired,
    source_line,
    variables,
)
from autopar.ir.step_graph import MicrobatchError
from autopar.microbatch.batch_scaling import BatchScalings
from autopar.microbatch.batch_scaling_rules import BatchScaling, NotSeparable
from autopar.microbatch.created_rows import created_by, folds_position
from autopar.microbatch.deferred_division import equations
from autopar.microbatch.example_blocks import blocks_apart, blocks_merged
from autopar.microbatch.gradients import accumulate_p
from autopar.microbatch.pass_options import PassOptions
from autopar.microbatch.same_step import check_same_step
from autopar.primitives import record_of


@dataclass(frozen=True, slots=True)
class Boundary:
    """The boundary between the body and the tail of a jaxpr.

    Attributes:
        values: the values of the body that the tail reads or that are outputs.
        tail: the values that the tail computes and that depend on the batch.
        effects: for each equation with an effect and no result, whether it is in the body.
        blocks: for each of the values that has its rows in several blocks of a dim, as after
            merging (time, batch), that dim and the number of blocks.
    """

    values: tuple[Var, ...]
    tail: frozenset[Var]
    effects: tuple[bool, ...]
    blocks: Mapping[Var, tuple[int, int]] = field(default_factory=dict)


def has_gradient(jaxpr: Jaxpr) -> bool:
    """Return whether a flat jaxpr has a backward pass."""
    return any(map(is_backward, jaxpr.eqns))


def find_boundary(jaxpr: Jaxpr, scalings: BatchScalings | None, options: PassOptions) -> Boundary:
    """Return the boundary of a step.

    Args:
        jaxpr: a flat jaxpr.
        scalings: the batch scalings of its values; None if there is one microbatch. The body then
            ends at the results of the backward pass.
        options: the options of the pass. What is not separable in a first pass is in the tail.
    """
    batch, first_pass = options.examples, options.is_first_pass
    groups = units(enumerate(jaxpr.eqns))
    depending = _depending(jaxpr, {*batch, *options.completed}, options.positions)
    rules = _BodyRules(groups, depending, scalings, first_pass)
    made_by = {var: unit.number for unit in groups for var in unit.makes}
    first: Boundary | None = None
    while True:
        body = _required(groups, rules)
        boundary = _boundary(jaxpr, batch, groups, rules, body)
        parts = {made_by[var] for var in boundary.values if rules.is_part(var)}
        if not parts:
            return boundary
        first = first or boundary
        late = {number for number in parts if first_pass or number not in body} - rules.late
        if not late:
            return first
        rules.late |= late


def _boundary(
    jaxpr: Jaxpr,
    batch: Collection[int],
    groups: Sequence[Unit],
    rules: "_BodyRules",
    body: Set[int],
) -> Boundary:
    """Return the boundary of a body by `rules` that has the units with the numbers `body`."""
    scalings, depending = rules.scalings, rules.depending
    made = {jaxpr.invars[i] for i in batch} if scalings else set[Var]()
    tail: set[Var] = set()
    effects: list[bool] = []
    values: dict[Var, None] = {}
    used = {*variables(jaxpr.outvars), *(var for unit in groups for var in unit.reads)}
    for unit in groups:
        read = [var for var in unit.reads if var in depending]
        acts = effects_of(unit)
        only_acts = bool(acts) and used.isdisjoint(unit.makes)
        in_body = unit.number in body or (
            tail.isdisjoint(read) and (only_acts or rules.allows(unit, read))
        )
        effects += [in_body and bool(read)] * len(acts)
        if not read:
            continue
        if in_body:
            made.update(unit.makes)
        else:
            tail.update(unit.makes)
        if not in_body:
            values.update((var, None) for var in read if var in made)
    values.update((var, None) for var in variables(jaxpr.outvars) if var in made)
    blocks: dict[Var, tuple[int, int]] = {}
    for var in values:
        kind = scalings.kinds[var] if scalings else None
        if isinstance(kind, BatchScaling) and isinstance(kind.blocks, int) and kind.blocks > 1:
            blocks[var] = kind.dim, kind.blocks
    return Boundary(tuple(values), frozenset(tail), tuple(effects), blocks)


def _depending(jaxpr: Jaxpr, batch: Set[int], positions: int | None = None) -> set[Var]:
    """Return the values that depend on the inputs `batch`, or differ between microbatches.

    Rows that follow from the positions of the examples alone can be computed for the whole batch,
    such as noise from a key. The layers of a model that reads them are left to the microbatches.
    """
    eqns = list(enumerate(jaxpr.eqns))
    other_bits = [var for eqn in jaxpr.eqns if folds_position(eqn) for var in eqn.outvars]
    sources = [*(jaxpr.invars[i] for i in batch), *other_bits]
    if positions is not None:
        rows = dependents(eqns, [jaxpr.invars[positions]])
        for _, eqn in eqns:
            operands = variables(eqn.invars)
            if record_of(eqn).is_contraction and not rows.isdisjoint(operands):
                sources += eqn.outvars
    return dependents(eqns, sources)


class _BodyRules:
    """What belongs to the body.

    Attributes:
        depending: values that depend on the batch.
        scalings: the batch scalings; None for one microbatch.
        first_pass: whether the step is a first pass.
        gradients: values that depend on a backward pass.
        late: numbers of units that are in the tail if the body does not need them.
    """

    def __init__(
        self,
        groups: Sequence[Unit],
        depending: Set[Var],
        scalings: BatchScalings | None,
        first_pass: bool = False,
    ) -> None:
        self.depending = depending
        self.scalings = scalings
        self.first_pass = first_pass
        results = (var for unit in groups if has_backward(unit) for var in unit.makes)
        eqns = (numbered for unit in groups for numbered in unit.eqns)
        self.gradients = dependents(eqns, results)
        self.late: set[int] = set()

    def is_part(self, var: Var) -> bool:
        """Return whether a value has rows for a part of the batch, which are not accumulated."""
        kind = self.scalings.kinds[var] if self.scalings else None
        return isinstance(kind, BatchScaling) and isinstance(kind.blocks, Fraction)

    def requires(self, unit: Unit) -> bool:
        """Return whether a unit is in the body, with all that it depends on.

        The backward pass is, and so is what reads statistics of a microbatch. What follows from
        accumulated values alone, such as the derivative of a regularizer of updated parameters,
        runs once.
        """
        if unit.number in self.late:
            return False
        if self.scalings is not None and not self.scalings.own.keys().isdisjoint(unit.makes):
            return True
        if not has_backward(unit) or self.depending.isdisjoint(unit.makes):
            return False
        if self.scalings is None:
            return True
        if self._searches(unit):
            return False
        kinds = [self.scalings.kinds[var] for var in (*unit.reads, *unit.makes)]
        separable = all(isinstance(kind, BatchScaling) for kind in kinds)
        if self.first_pass:
            return separable
        with_rows = any(isinstance(kind, BatchScaling) and kind.form == "rows" for kind in kinds)
        return with_rows or separable

    def _searches(self, unit: Unit) -> bool:
        """Return whether a unit repeats a computation until the whole batch meets a condition.

        A line search along the gradient is one. It runs once, on the accumulated gradients.
        """
        assert self.scalings is not None
        return (
            any(eqn.primitive is loop_test_p for _, eqn in unit.eqns)
            and not self.gradients.isdisjoint(unit.reads)
            and any(isinstance(self.scalings.kinds[var], NotSeparable) for var in unit.makes)
        )

    def allows(self, unit: Unit, read: Sequence[Var]) -> bool:
        """Return whether a unit outside of the backward pass may be in the body.

        Args:
            unit: the unit.
            read: the values that it reads and that depend on the batch.
        """
        if unit.number in self.late:
            return False
        if self.scalings is None:
            return self.gradients.isdisjoint(read)
        operands = [self.scalings.kinds[var] for var in read]
        results = [self.scalings.kinds[var] for var in unit.makes]
        return all(
            isinstance(kind, BatchScaling) and kind.form in ("rows", "same") for kind in operands
        ) and all(
            isinstance(kind, BatchScaling)
            and kind.form != "function"
            and (kind.form != "linear" or kind.power in (None, 0, 1))
            for kind in results
        )


def _required(groups: Sequence[Unit], rules: _BodyRules) -> set[int]:
    """Return the numbers of the units that are required in the body or that one of them needs."""
    required: set[int] = set()
    read: set[Var] = set()
    for unit in reversed(groups):
        if rules.requires(unit) or not read.isdisjoint(unit.makes):
            required.add(unit.number)
            read.update(unit.reads)
    return required


def before_update(jaxpr: Jaxpr, batch: Collection[int]) -> set[int]:
    """Return the numbers of the equations that may be in the body, i.e. before the update."""
    groups = units(enumerate(jaxpr.eqns))
    depending = _depending(jaxpr, set(batch))
    rules = _BodyRules(groups, depending, None)
    required = _required(groups, rules)
    return {
        number
        for unit in groups
        if unit.number in required or rules.gradients.isdisjoint(unit.makes)
        for number, _ in unit.eqns
    }


def same_boundary(
    jaxpr: Jaxpr, boundary: Boundary, other: Jaxpr, batch: Collection[int]
) -> Boundary:
    """Return the boundary of another trace of the same step.

    Traces with the same primitives correspond equation by equation. In others, such as those of a
    microbatch with a single example, the tails correspond: they are compared from the outputs to
    the boundary.

    Args:
        jaxpr: a flat jaxpr.
        boundary: its boundary.
        other: a trace for another batch size.
        batch: inputs whose first dim is the batch.

    Raises:
        MicrobatchError: the step is computed otherwise.
    """
    try:
        if list(map(created_by, jaxpr.eqns)) == list(map(created_by, other.eqns)):
            check_same_step(jaxpr, other)
            twin = dict(zip(_variables(jaxpr), _variables(other), strict=True))
        else:
            twin = _twins(jaxpr, boundary, other)
        return _with_twins(boundary, twin)
    except _OtherTail as error:
        makers = _makers(jaxpr)
        eqn = makers[error.at][0] if error.at in makers else error.at
        where = f", at {source_line(eqn)}," if isinstance(eqn, JaxprEqn) else ""
        rows, others = (aval_of(trace.invars[min(batch)]).shape[0] for trace in (jaxpr, other))
        raise MicrobatchError(
            f"what the step computes after the gradient{where} is computed otherwise for {others}"
            f" than for {rows} examples; make it compute the same for batches of any size, or use"
            " another num_micro_batches"
        ) from None


class _OtherTail(Exception):
    """The tails of two traces differ.

    Attributes:
        at: the equation of one of the traces, or the value of the first one, where they differ.
    """

    def __init__(self, at: JaxprEqn | Var) -> None:
        super().__init__()
        self.at = at


def _with_twins(boundary: Boundary, twin: Mapping[Var, Var]) -> Boundary:
    """Return a boundary with the values of another trace that correspond to its values."""
    values: dict[Var, None] = {}
    for var in boundary.values:
        if var not in twin or twin[var] in values:
            raise _OtherTail(var)
        values[twin[var]] = None
    for var, (dim, count) in boundary.blocks.items():
        shape = aval_of(twin[var]).shape
        if len(shape) <= dim or shape[dim] % count:
            raise _OtherTail(var)
    tail = frozenset(twin[var] for var in boundary.tail if var in twin)
    blocks = {twin[var]: place for var, place in boundary.blocks.items()}
    return Boundary(tuple(values), tail, boundary.effects, blocks)


def _variables(jaxpr: Jaxpr) -> list[Var]:
    return [*jaxpr.invars, *(var for eqn in jaxpr.eqns for var in eqn.outvars)]


def _twins(jaxpr: Jaxpr, boundary: Boundary, other: Jaxpr) -> dict[Var, Var]:
    """Return the values of `other` that correspond to those of the tail and of the boundary."""
    ours, theirs = _makers(jaxpr), _makers(other)
    twin: dict[Var, Var] = {}
    pending: list[tuple[Atom, Atom]] = list(zip(jaxpr.outvars, other.outvars, strict=True))
    acts = [[trace.eqns[number] for number in effects_in(trace)] for trace in (jaxpr, other)]
    if len(acts[0]) != len(acts[1]):
        common = min(map(len, acts))
        pairs = enumerate(zip(*acts, strict=False))
        first = next((n for n, (a, b) in pairs if a.primitive is not b.primitive), common)
        raise _OtherTail(max(acts, key=len)[first])
    for mine, their, in_body in zip(*acts, boundary.effects, strict=True):
        if not in_body:
            pending += zip(mine.invars, their.invars, strict=True)
    ends = set(boundary.values)
    compared = boundary.tail.union(ends)
    while pending:
        mine, their = pending.pop()
        if not isinstance(mine, Var) or mine not in compared or mine in twin:
            continue
        if not isinstance(their, Var):
            raise _OtherTail(mine)
        twin[mine] = their
        if mine in ends:
            continue
        (maker, r), (their_maker, their_r) = ours[mine], theirs.get(their, (None, 0))
        if their_maker is None or (maker.primitive, r, len(maker.invars)) != (
            their_maker.primitive,
            their_r,
            len(their_maker.invars),
        ):
            raise _OtherTail(maker)
        pending += zip(maker.invars, their_maker.invars, strict=True)
    return twin


def _makers(jaxpr: Jaxpr) -> dict[Var, tuple[JaxprEqn, int]]:
    """Return the equation that computes each value, and the value's place among its results."""
    return {var: (eqn, r) for eqn in jaxpr.eqns for r, var in enumerate(eqn.outvars)}


def mark_boundary(jaxpr: Jaxpr, boundary: Boundary) -> Jaxpr:
    """Return `jaxpr` with one `accumulate` equation for the values of its boundary.

    The equations that these depend on come before it, all others after it. Values in blocks have a
    dim of their own for the blocks where they are accumulated.
    """
    if not boundary.values:
        return jaxpr
    numbered = list(enumerate(jaxpr.eqns))
    effects = zip(effects_in(jaxpr), boundary.effects, strict=True)
    once = {number for number, in_body in effects if not in_body}
    body = needed(without_effects(numbered, once), boundary.values)
    front = _with_whole_units(numbered, {number for number, _ in body})
    totals = {var: Var(var.aval) for var in boundary.values}
    sample = next((eqn for _, eqn in body), jaxpr.eqns[0] if jaxpr.eqns else None)
    assert sample is not None, "a step that only returns its inputs has no boundary"
    before: list[JaxprEqn] = []
    after: list[JaxprEqn] = []
    parts, sums = dict(totals), dict(totals)
    for var, (dim, blocks) in boundary.blocks.items():
        apart, merged = partial(blocks_apart, dim, blocks), partial(blocks_merged, dim)
        aval = jax.eval_shape(apart, aval_of(var))
        parts[var], sums[var] = (Var(aval_of(var).update(shape=aval.shape)) for _ in range(2))
        before += equations(apart, [var], parts[var], sample.source_info)
        after += equations(merged, [sums[var]], totals[var], sample.source_info)
    mark = sample.replace(
        primitive=accumulate_p,
        invars=[parts[var] if var in boundary.blocks else var for var in totals],
        outvars=list(sums.values()),
        params={},
        effects=frozenset(),
    )

    rest = [rewired(eqn, totals) for number, eqn in numbered if number not in front]
    eqns = [*(jaxpr.eqns[number] for number in sorted(front)), *before, mark, *after, *rest]
    return jaxpr.replace(eqns=eqns, outvars=renamed(jaxpr.outvars, totals))


def _with_whole_units(numbered: Sequence[Numbered], chosen: set[int]) -> set[int]:
    return {
        number
        for unit in units(numbered)
        if any(number in chosen for number, _ in unit.eqns)
        for number, _ in unit.eqns
    }
