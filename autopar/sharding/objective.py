"""Build the selection problem of a step: its deciding equations, their candidates and costs, and the equations that follow them.

Every value is placed by one decision: an input's, or that of an equation that decides. A value that follows (Alpa, OSDI'22,
section 4.2) has one spec per option of the decision it follows, so it costs no variable. Values made of constants alone
are *free*: they are computed wherever they are needed.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var
from jax.extend.core.primitives import (
    broadcast_in_dim_p,
    concatenate_p,
    convert_element_type_p,
    name_p,
)

from autopar.ir import control_flow
from autopar.ir.array_sizes import array_bytes
from autopar.ir.graph import Atom, aval_of
from autopar.ir.spec import Specs, local_shape, partition_spec, replicated
from autopar.ir.step_graph import StepGraph
from autopar.microbatch.gradients import accumulate_p
from autopar.primitives import kernel_of, record_of
from autopar.primitives.factors import Assignment, OpFactors
from autopar.sharding import manual_regions
from autopar.sharding.candidates import (
    Candidates,
    Option,
    batch_on,
    batch_only,
    completions,
    followed,
    is_compilable,
    scattered_if_possible,
)
from autopar.sharding.dataflow import InputRole, analyse
from autopar.sharding.deferred_sync import fits, leads, partial_completions, synchronisations
from autopar.sharding.distinct_options import each_once
from autopar.sharding.heuristic import input_placed
from autopar.sharding.mesh_costs import MeshCosts, Seconds, Step
from autopar.sharding.options import ShardingOptions
from autopar.sharding.pins import Pins, ShardingError, check_batch_axis, input_specs
from autopar.sharding.reshard_hoisting import moved_bytes
from autopar.sharding.selection_problem import SelectionProblem
from autopar.xla_fusion import Moved, takes_two_kernels, traffic
from simulator.work import Kernel


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a value is, under each option of a decision."""

    decision: int
    specs: Specs


@dataclass(frozen=True, slots=True)
class Use:
    """An equation that reads a value with a spec of its own: `required` per option of `decision`.

    `eqn` is the number of the equation, `operand` the position of the value in it; a use by output number `operand` of the
    step has `eqn` None.
    """

    eqn: int | None
    operand: int
    value: Placement
    decision: int
    required: Specs


@dataclass
class Decisions:
    """The choice problem of a step, and what each choice means.

    Attributes:
        labels: for each decision, the input path or the equation it belongs to.
        costs: for each decision, seconds of each option; edges likewise for pairs of decisions.
        parts: the seconds of `costs` that are kernels, and those that complete partial results, (2, options); the rest is
            resharding.
        placements: where each value is; None for a free one.
        inputs: where each input is; outputs: where those are that must be somewhere.
        decided: (equation number, placements of its results) for the equations whose results are to be pinned: those that
            decide, and those where microbatches accumulate.
        uses: every place where a value is read with a spec that some decision requires.
        roles: for each input "batch", "parameter", "state" or "other".
        shares: what `costs` and `edges` are made of, by equation: its number; a decision and the seconds of its options, kernels and
            what completes partial results, (2, options); or two decisions and seconds of resharding, by the options of both. What a
            step does to hand on its outputs counts as its last equation.
        leaders: see `autopar.xla_fusion.Traffic`.
        scattered: the equations whose results are reduce_scattered together with others: number, decision, bytes of one device before
            that, by option.
    """

    labels: list[str] = field(default_factory=list)
    costs: list[np.ndarray] = field(default_factory=list)
    parts: list[np.ndarray] = field(default_factory=list)
    edges: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)
    placements: dict[Var, Placement | None] = field(default_factory=dict)
    inputs: list[Placement] = field(default_factory=list)
    outputs: dict[int, Placement] = field(default_factory=dict)
    decided: list[tuple[int, tuple[Placement | None, ...]]] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    roles: list[InputRole] = field(default_factory=list)
    shares: list[tuple[int, tuple[int, ...], np.ndarray]] = field(default_factory=list)
    leaders: Mapping[int, int] = field(default_factory=dict)
    scattered: list[tuple[int, int, np.ndarray]] = field(default_factory=list)

    def problem(self) -> SelectionProblem:
        return SelectionProblem(self.costs, self.edges)

    def seconds(self, decision: int, option: int) -> Seconds:
        """What an option costs, edges aside."""
        cost, (compute, communication) = (
            float(self.costs[decision][option]),
            map(float, self.parts[decision][:, option]),
        )
        rest = cost - compute - communication
        return Seconds(
            compute, communication, rest if rest > 1e-9 * cost else 0.0
        )  # and no rounding errors

    def seconds_by_equation(self, choice: Sequence[int], num_equations: int) -> tuple[Seconds, ...]:
        """What each equation takes; they add up to what the choice costs."""
        seconds = [[0.0, 0.0, 0.0] for _ in range(num_equations)]
        for number, decisions, cost in self.shares if num_equations else ():
            if len(decisions) == 2:
                seconds[number][2] += float(cost[choice[decisions[0]], choice[decisions[1]]])
            else:
                compute, communication = cost[:, choice[decisions[0]]]
                seconds[number][0] += float(compute)
                seconds[number][1] += float(communication)
        return tuple(Seconds(*each) for each in seconds)


def enumerate_decisions(
    step: StepGraph, costs: MeshCosts, options: ShardingOptions, deferred: tuple[str, ...] = ()
) -> Decisions:
    """The decisions of `step` on the mesh of `costs`, limited by `options`.

    Args:
        deferred: mesh axes along which devices accumulate apart (`autopar.sharding.deferred_sync`).

    Raises:
        MissingRuleError: an equation has no sharding rule.
        ShardingError: `options` can't hold, e.g. the batch can't be divided over the mesh.
    """
    builder = _Builder(step, costs, options, deferred)
    builder.add_inputs()
    for number, eqn in enumerate(step.jaxpr.eqns):
        builder.add_equation(number, eqn)
    builder.add_outputs()
    return builder.found


class _Builder:
    def __init__(
        self, step: StepGraph, costs: MeshCosts, options: ShardingOptions, deferred: tuple[str, ...]
    ) -> None:
        self.step, self.costs, self.options = step, costs, options
        self.mesh = costs.mesh
        check_batch_axis(options, self.mesh)
        self.flow = analyse(step)
        self.traffic = traffic(step, costs.fuses_rows)
        self.found = Decisions(leaders=self.traffic.leaders)
        self.pins = Pins(options.pins, step, self.mesh)
        self.repeats = _repeats(step)
        self.combined = costs.combined
        self.made_by = {var: eqn for eqn in step.jaxpr.eqns for var in eqn.outvars}
        self.depth: dict[Var, int] = {}
        self.content: dict[Var, int] = {}
        self.launch = costs.model.kernel(Kernel("", "memory", 0.0, 0.0))
        # Pins limit inputs and named values, and are no part of what is remembered.
        limits = repr(replace(options, pins={})), deferred
        self._known_costs: dict[Any, np.ndarray] = costs.memo.setdefault("costs", {})
        self._known_candidates: dict[Any, Candidates | None] = costs.memo.setdefault(limits, {})
        self.deferred = deferred
        self.body = (
            frozenset(number for number, _ in step.microbatching.body)
            if step.microbatching
            else frozenset()
        )

    # -- inputs and outputs

    def add_inputs(self) -> None:
        self.found.roles.extend(self.flow.roles)
        inputs = zip(self.step.jaxpr.invars, self.step.in_paths, self.flow.roles, strict=True)
        for i, (var, path, role) in enumerate(inputs):
            specs = tuple(
                input_specs(
                    role,
                    path,
                    aval_of(var).shape,
                    self.mesh,
                    self.options,
                    self.step.num_micro_batches,
                )
            )
            specs = self.pins.restrict(path, specs)
            if self.options.mode != "solve":
                specs = (
                    input_placed(role, aval_of(var).shape, specs, self.mesh, self.options.mode),
                )
            if self.deferred:
                specs = self._apart(
                    path, {0} if role == "batch" else self.step.received_inputs.get(i, ()), specs
                )
            placement = self._decide(path, specs)
            self.found.inputs.append(placement)
            self.found.placements[var] = placement
            self.depth[var] = 0
        for var in self.step.jaxpr.constvars:
            specs = (replicated(len(aval_of(var).shape)),)
            self.found.placements[var] = self._decide("constant", specs)
            self.depth[var] = 0

    def add_outputs(self) -> None:
        """A carried output is wanted as its input is, so that the next step finds it in place; a pinned one as pinned."""
        for o, (atom, path) in enumerate(
            zip(self.step.jaxpr.outvars, self.step.out_paths, strict=True)
        ):
            source, pinned = (
                self.step.carried.get(o),
                self.pins.find(f"result/{path}".removesuffix("/")),
            )
            if source is not None:
                target = self.found.inputs[source]
                if pinned is not None and pinned not in target.specs:
                    raise ShardingError(
                        f"result/{path} is pinned to {partition_spec(pinned)}, but it is the next {self.step.in_paths[source]},"
                        " which can't be there; pin both alike"
                    )
            elif pinned is not None:
                target = self._decide(f"result/{path}", (pinned,))
            else:
                continue
            self.found.outputs[o] = target
            self._use(None, o, atom, target.decision, target.specs)

    # -- equations

    def add_equation(self, number: int, eqn: JaxprEqn) -> None:
        placed = [self._placement(atom) for atom in eqn.invars]
        if record_of(eqn).fusion == "elementwise" or eqn.primitive is broadcast_in_dim_p:
            self.content[eqn.outvars[0]] = max(map(self._content, eqn.invars), default=0)
        self.depth.update(
            dict.fromkeys(eqn.outvars, 1 + max((self._depth(a) for a in eqn.invars), default=0))
        )
        factors = self.flow.factors[number]
        if not eqn.outvars:
            return
        if eqn.primitive is accumulate_p:
            self._add_up(number, eqn, placed)
        if eqn.primitive is accumulate_p and self.deferred:
            self._synchronise(number, eqn, placed)
        elif factors is None:
            self.found.placements.update(zip(eqn.outvars, placed, strict=True))
            if eqn.primitive is accumulate_p:
                self.found.decided.append((number, tuple(placed)))
        elif eqn.primitive is name_p and (pinned := self.pins.find(eqn.params["name"])) is not None:
            assignment = factors.assign(0, pinned, self.mesh)
            if self.deferred and (assignment is None or not self._fits(number, assignment)):
                raise ShardingError(f"{eqn.params['name']} is pinned to {partition_spec(pinned)}")
            result = self._decide(eqn.params["name"], (pinned,))
            self.found.decided.append((number, (result,)))
            self.found.placements[eqn.outvars[0]] = result
            self._use(number, 0, eqn.invars[0], result.decision, result.specs)
        elif not any(placed) and eqn.primitive is not control_flow.loop_carry_p:
            self.found.placements.update(dict.fromkeys(eqn.outvars))
        elif self._decides(number, eqn, factors) or not self._follow(number, eqn, factors, placed):
            self._choose(number, eqn, factors)

    def _decides(self, number: int, eqn: JaxprEqn, factors: OpFactors) -> bool:
        """Whether there is more to choose than what operands imply; a sum over examples (a bias's gradient) may scatter."""
        sums = any(factors.kinds[f] == "sum" for f in self.flow.batch_factors[number])
        return factors.decides or (sums and aval_of(eqn.outvars[0]).ndim > 0)

    def _follow(
        self, number: int, eqn: JaxprEqn, factors: OpFactors, placed: list[Placement | None]
    ) -> bool:
        """Let the equation follow an operand, if it can under each of that one's options.

        One that has a batch dim leads (a scale per feature may be larger than a small batch of means). Of these the largest,
        among equals the one with most in it: what a broadcast made larger is whole along its new dims, and can be cut to fit the
        others at no cost. Then the deepest.
        """

        def rank(k: int) -> tuple[int, ...]:
            atom = eqn.invars[k]
            return (
                atom in self.flow.per_example,
                prod(aval_of(atom).shape),
                self._content(atom),
                self._depth(atom),
            )

        leader = factors.leader
        if leader is None:
            leader = max(
                (k for k, placement in enumerate(placed) if placement is not None), key=rank
            )
        placement = placed[leader]
        assert placement is not None
        found = self._followed(number, eqn, factors, leader, placement.specs)
        if found is None:
            return False
        self._takes(number, placement.decision, self._costs(number, eqn, factors, found))
        self._use_operands(number, eqn, placement.decision, found)
        for var, specs in zip(eqn.outvars, found.results, strict=True):
            self.found.placements[var] = Placement(placement.decision, specs)
        return True

    def _choose(self, number: int, eqn: JaxprEqn, factors: OpFactors) -> None:
        """Make the equation a decision over all its candidates."""
        found = self._candidates(number, eqn, factors)
        label = f"{eqn.primitive.name} in {eqn.source_info.name_stack}"
        first = self._decide(label, found.results[0])
        self._takes(number, first.decision, self._costs(number, eqn, factors, found))
        results = [Placement(first.decision, specs) for specs in found.results]
        if self._costs_of(eqn.outvars[0]) is self.combined and self.repeats[number] == 1:
            before = [
                max((b for kind, b, _ in o.collectives if kind == "reduce_scatter"), default=0.0)
                for o in found.options
            ]
            self.found.scattered.append((number, first.decision, np.array(before)))
        self.found.decided.append((number, tuple(results)))
        self.found.placements.update(zip(eqn.outvars, results, strict=True))
        self._use_operands(number, eqn, first.decision, found)

    def _followed(
        self, number: int, eqn: JaxprEqn, factors: OpFactors, leader: int, specs: Specs
    ) -> Candidates | None:
        """One candidate for each spec of the operand that leads; None when the equation can't keep one of them."""
        key = (
            factors,
            leader,
            specs,
            self._results(eqn),
            self.flow.batch_factors[number],
            self._apart_at(number),
        )
        if key not in self._known_candidates:
            assignments = followed(factors, leader, specs, self.mesh)
            found = None
            if assignments is not None and all(
                self._fits(number, assignment) for assignment in set(assignments)
            ):
                options = each_once(
                    lambda a: self._completions(number, eqn, factors, a, False)[0], assignments
                )
                found = Candidates.of(factors, options)
            self._known_candidates[key] = found
        return self._known_candidates[key]

    def _candidates(self, number: int, eqn: JaxprEqn, factors: OpFactors) -> Candidates:
        marked = self.flow.batch_factors[number]
        if (
            eqn.primitive.name == manual_regions.SHARD_MAP
        ):  # what it may do is not told by factors alone
            return Candidates.of(factors, self._options(number, eqn, factors, marked))
        key = (factors, self._results(eqn), marked, self._apart_at(number))
        found = self._known_candidates.get(key)
        if found is None:
            found = self._known_candidates[key] = Candidates.of(
                factors, self._options(number, eqn, factors, marked)
            )
        return found

    def _options(
        self, number: int, eqn: JaxprEqn, factors: OpFactors, marked: frozenset[int]
    ) -> list[Option]:
        if eqn.primitive.name == manual_regions.SHARD_MAP:
            if self._apart_at(number):
                raise ShardingError("a shard_map of the step's own decides where examples are")
            return list(
                completions(
                    factors,
                    manual_regions.assignment(eqn, self.mesh),
                    self._results(eqn),
                    False,
                    self.mesh,
                )
            )
        assignments = [a for a in factors.assignments(self.mesh) if self._fits(number, a)]
        if not assignments:
            name = f"{eqn.primitive.name} in {eqn.source_info.name_stack}"
            raise ShardingError(
                f"{name} can't be divided by examples along {', '.join(self.deferred)}"
            )
        # Where there is no batch, a marker may divide what it likes: weights enter loops, and their gradients leave them, in shards.
        if self.options.data_parallel and (marked or eqn.primitive not in control_flow.MARKERS):
            assignments = batch_only(assignments, marked, self.mesh)
        if self.options.batch_axis is not None and self.mesh.sizes[self.options.batch_axis] > 1:
            assignments = batch_on(assignments, marked, self.options.batch_axis)
        options = [
            o
            for a in assignments
            for o in self._completions(number, eqn, factors, a, self._may_scatter())
        ]
        options = [option for option in options if is_compilable(eqn, factors, option)]
        return scattered_if_possible(options) if self.options.prefer_reduce_scatter else options

    def _may_scatter(self) -> bool:
        return not self.options.data_parallel or self.options.optimizer_state == "sharded"

    def _completions(
        self, number: int, eqn: JaxprEqn, factors: OpFactors, assignment: Assignment, scatter: bool
    ) -> tuple[Option, ...]:
        if self._apart_at(number):
            return partial_completions(
                factors, assignment, self._results(eqn), scatter, self.mesh, self.deferred
            )
        return completions(factors, assignment, self._results(eqn), scatter, self.mesh)

    def _results(self, eqn: JaxprEqn) -> tuple[tuple[tuple[int, ...], int], ...]:
        return tuple(
            (tuple(aval_of(var).shape), aval_of(var).dtype.itemsize) for var in eqn.outvars
        )

    def _costs(
        self, number: int, eqn: JaxprEqn, factors: OpFactors, found: Candidates
    ) -> np.ndarray:
        """Seconds of each option on one device: its kernel (what it moves when fused), and completing partial results.

        Shape (2, options).
        """
        if eqn.primitive in control_flow.MARKERS:
            return self._marker_costs(number, eqn, factors, found)
        if eqn.primitive.name == manual_regions.SHARD_MAP:
            return np.array([manual_regions.seconds(eqn, self.costs)]).T * self.repeats[number]
        moved = self.traffic.moved[number]
        avals = tuple(atom.aval for atom in (*eqn.invars, *eqn.outvars))
        params = str(eqn.params) if factors.decides else ""
        key = (
            eqn.primitive.name,
            params,
            factors,
            avals,
            moved,
            found,
            self._costs_of(eqn.outvars[0]) is self.costs,
        )
        if key not in self._known_costs:
            self._known_costs[key] = np.array(
                each_once(lambda option: self._cost(eqn, factors, option, moved), found.options)
            ).T
        return self._known_costs[key] * self.repeats[number]

    def _marker_costs(
        self, number: int, eqn: JaxprEqn, factors: OpFactors, found: Candidates
    ) -> np.ndarray:
        """What a loop collects is zeros at first, then each iteration writes its slice; and it counts its iterations."""
        seconds = np.zeros((2, len(found.options)))
        if eqn.primitive is control_flow.loop_p:
            seconds[0] = self.repeats[number] * (eqn.params["length"] or 1) * self.launch
        elif eqn.primitive is control_flow.loop_stack_p:
            aval = aval_of(eqn.invars[0])
            sizes = each_once(
                lambda spec: array_bytes(local_shape(aval.shape, spec, self.mesh), aval.dtype),
                found.operands[0],
            )
            seconds[0] = [self.repeats[number] * self.costs.copy(3 * size) for size in sizes]
        return seconds

    def _cost(
        self, eqn: JaxprEqn, factors: OpFactors, option: Option, moved: Moved
    ) -> tuple[float, float]:
        specs = [factors.operand_spec(k, option.assignment) for k in range(len(eqn.invars))]
        specs += [factors.result_spec(r, option.assignment) for r in range(len(eqn.outvars))]
        avals = [aval_of(atom) for atom in (*eqn.invars, *eqn.outvars)]
        shapes = [
            local_shape(aval.shape, spec, self.mesh)
            for aval, spec in zip(avals, specs, strict=True)
        ]
        sizes = [array_bytes(shape, aval.dtype) for shape, aval in zip(shapes, avals, strict=True)]
        completing = sum(
            self._completing(eqn.outvars[0], step, moved.together) for step in option.collectives
        )
        completing += self.costs.copy(option.copied)
        count = len(eqn.invars)
        return self._kernel_seconds(
            eqn, shapes[:count], sizes[:count], sizes[count:], moved
        ), completing

    def _completing(self, var: Var, step: Step, together: int) -> float:
        """Seconds of a collective on what a kernel leaves; sums that are ready at the same time are copied together and completed so."""
        costs = self._costs_of(var)
        kind, num_bytes, axes = step
        if together == 1 or kind != "all_reduce" or var not in self.flow.batch_statistics:
            return costs.collective(kind, num_bytes, axes)
        return costs.collective(kind, together * num_bytes, axes) / together + self.costs.copy(
            4 * num_bytes
        )

    def _kernel_seconds(self, eqn: JaxprEqn, shapes, operands, results, moved: Moved) -> float:
        if record_of(eqn).reads_part:
            operands = [min(size, max(results)) for size in operands]
        total = sum(n * size for n, size in zip(moved.reads, operands, strict=True))
        total += sum(n * size for n, size in zip(moved.writes, results, strict=True))
        copies = sum(
            n * self.costs.copy(2 * size)
            for n, size in zip(moved.copies, (*operands, *results), strict=bool(moved.copies))
        )
        if not total:
            return copies
        kernels = moved.kernels + (any(moved.writes) and takes_two_kernels(eqn, shapes[0]))
        return (
            self.costs.model.kernel(kernel_of(eqn, shapes, total))
            + (kernels - 1) * self.launch
            + copies
        )

    # -- microbatches

    def _apart_at(self, number: int) -> bool:
        """Whether the equation is one of those that devices run apart, along the deferred axes."""
        return bool(self.deferred) and number in self.body

    def _fits(self, number: int, assignment: Assignment) -> bool:
        return not self._apart_at(number) or fits(
            assignment, self.flow.batch_factors[number], self.deferred
        )

    def _apart(self, path: str, rows: Collection[int], specs: Specs) -> Specs:
        """The specs of an input that suit devices which accumulate apart; its dims in `rows` count examples."""
        wanted = set(self.deferred)
        kept = tuple(
            s
            for s in specs
            if leads(s, self.deferred) and all(wanted.issubset(s[dim]) for dim in rows if s)
        )
        if not kept:
            raise ShardingError(
                f"{path} can't be divided by examples along {', '.join(self.deferred)}"
            )
        return kept

    def _add_up(self, number: int, eqn: JaxprEqn, placed: Sequence[Placement | None]) -> None:
        """Price adding what each microbatch makes to the sum so far: the sum is read and written, the rest read (or converted from
        what is read, which counts there)."""
        for atom, var, placement in zip(eqn.invars, eqn.outvars, placed, strict=True):
            if placement is None or not isinstance(atom, Var):
                continue
            maker = self.made_by.get(atom)
            passes = 2 if maker is not None and maker.primitive is convert_element_type_p else 3
            shapes = each_once(
                partial(local_shape, aval_of(var).shape, mesh=self.mesh), placement.specs
            )
            sizes = [passes * array_bytes(shape, aval_of(var).dtype) for shape in shapes]
            seconds = self.step.num_micro_batches * np.array(
                [self.costs.copy(size) for size in sizes]
            )
            self._takes(number, placement.decision, np.array([seconds, np.zeros_like(seconds)]))

    def _synchronise(self, number: int, eqn: JaxprEqn, placed: Sequence[Placement | None]) -> None:
        """Complete what devices accumulated apart, each value in a way of its own."""
        micro = self.step.microbatching
        assert micro is not None
        combine = dict(
            zip(
                (var for _, mark in micro.marks for var in mark.outvars), micro.combine, strict=True
            )
        )
        results: list[Placement | None] = []
        for k, (atom, var, placement) in enumerate(
            zip(eqn.invars, eqn.outvars, placed, strict=True)
        ):
            if placement is not None and combine[var] != "same":
                shape, width = self._results(eqn)[k]
                ways = synchronisations(
                    shape, width, placement.specs, self._may_scatter(), self.mesh, self.deferred
                )
                if self.options.prefer_reduce_scatter:
                    scattered = scattered_if_possible([way for _, way in ways])
                    ways = [(source, way) for source, way in ways if way in scattered]
                seconds = [
                    sum(self.combined.collective(*s) for s in w.collectives)
                    + self.costs.copy(w.copied)
                    for _, w in ways
                ]
                result = self._decide("accumulate", tuple(way.results[0] for _, way in ways))
                self._takes(number, result.decision, np.array([[0.0] * len(ways), seconds]))
                self._use(number, k, atom, result.decision, tuple(source for source, _ in ways))
                placement = result
            results.append(placement)
        self.found.decided.append((number, tuple(results)))
        self.found.placements.update(zip(eqn.outvars, results, strict=True))

    # -- shared

    def _decide(self, label: str, specs: Specs) -> Placement:
        self.found.labels.append(label)
        self.found.costs.append(np.zeros(len(specs)))
        self.found.parts.append(np.zeros((2, len(specs))))
        return Placement(len(self.found.costs) - 1, specs)

    def _takes(self, number: int, decision: int, parts: np.ndarray) -> None:
        """What equation `number` takes with each option of a decision: its kernels and what completes its results, (2, options)."""
        self.found.costs[decision] = self.found.costs[decision] + parts.sum(axis=0)
        self.found.parts[decision] = self.found.parts[decision] + parts
        self.found.shares.append((number, (decision,), parts))

    def _use_operands(self, number: int, eqn: JaxprEqn, decision: int, found: Candidates) -> None:
        for k, (atom, specs) in enumerate(zip(eqn.invars, found.operands, strict=True)):
            self._use(number, k, atom, decision, specs)

    def _use(
        self, eqn: int | None, operand: int, atom: Atom, decision: int, required: Specs
    ) -> None:
        placement = self._placement(atom)
        if placement is None:
            return
        if placement.decision == decision and placement.specs == required:
            return
        self.found.uses.append(Use(eqn, operand, placement, decision, required))
        assert isinstance(atom, Var)
        num_bytes = moved_bytes(self.made_by.get(atom), atom)
        alike = 1  # operands that are moved together
        if eqn is not None and self.step.jaxpr.eqns[eqn].primitive is concatenate_p:
            alike = sum(a.aval == atom.aval for a in self.step.jaxpr.eqns[eqn].invars)
        matrix = self._costs_of(atom).reshard_matrix(alike * num_bytes, placement.specs, required)
        if matrix is None:
            return
        matrix = matrix / alike
        if eqn is not None and self.step.jaxpr.eqns[eqn].primitive is control_flow.loop_slice_p:
            # at the same price slices are brought where they are wanted, and not all of them before
            matrix = matrix * (1 + 1e-6)
        if (
            eqn is not None
            and atom not in self.flow.per_example
            and (factors := self.flow.factors[eqn])
            and factors.decides
        ):
            matrix = matrix / self.flow.readers[atom]  # pyright: ignore[reportArgumentType]  # the compiler makes one copy for all who want the same
        if eqn is not None:
            matrix = matrix * self.repeats[eqn]
        i, j = placement.decision, decision
        self.found.shares.append((-1 if eqn is None else eqn, (i, j), matrix))
        if i == j:
            self.found.costs[i] = self.found.costs[i] + np.diagonal(matrix)
            return
        key, matrix = ((i, j), matrix) if i < j else ((j, i), matrix.T)
        self.found.edges[key] = (
            self.found.edges[key] + matrix if key in self.found.edges else matrix
        )

    def _costs_of(self, atom: Atom) -> MeshCosts:
        """Costs of collectives on this value; those of weights and their gradients are combined by the compiler."""
        return (
            self.costs
            if atom in self.flow.per_example or atom in self.flow.batch_statistics
            else self.combined
        )

    def _placement(self, atom: Atom) -> Placement | None:
        return None if isinstance(atom, Literal) else self.found.placements[atom]

    def _content(self, atom: Atom) -> int:
        """Number of elements before broadcasting."""
        return 0 if isinstance(atom, Literal) else self.content.get(atom, prod(aval_of(atom).shape))

    def _depth(self, atom: Atom) -> int:
        return 0 if isinstance(atom, Literal) else self.depth[atom]


def _repeats(step: StepGraph) -> list[float]:
    """How often each equation runs in a step: in loops, and for each microbatch."""
    counts = control_flow.repeats(step.jaxpr.eqns)
    for number, _ in step.microbatching.body if step.microbatching else ():
        counts[number] *= step.num_micro_batches
    return counts
