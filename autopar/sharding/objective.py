"""The selection problem of a step: decisions with their options, and the objective in seconds.

The objective is the sum of kernels, collectives that complete partial results, and resharding. Each
value is placed by one decision: that of an input, or of an equation that decides. An equation that
follows an operand (Alpa, OSDI'22, section 4.2) has one spec per option of the operand's decision,
and adds no variable. Values computed from constants alone are *free*: each device computes what it
needs.
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
from autopar.primitives.shard_map import SHARD_MAP
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
    """The spec of a value under each option of a decision."""

    decision: int
    specs: Specs


@dataclass(frozen=True, slots=True)
class Use:
    """An operand that an equation, or an output of the step, needs with a spec of its own.

    Attributes:
        eqn: number of the equation; None for an output of the step.
        operand: position of the operand, or of the output.
        value: placement of the value.
        decision: the decision on which the needed spec depends.
        required: the needed spec under each option of `decision`.
    """

    eqn: int | None
    operand: int
    value: Placement
    decision: int
    required: Specs


@dataclass
class Decisions:
    """The decisions of a step: the selection problem, and what each choice means.

    Attributes:
        labels: for each decision, the path of its input or the name of its equation.
        costs: for each decision, the seconds of each option.
        parts: the seconds of `costs` of kernels and of completing partial results, shape (2,
            options); the rest is resharding.
        edges: for pairs of decisions, the seconds of resharding for each pair of options.
        placements: placement of each value; None for free values.
        inputs: placement of each input.
        outputs: placement of the outputs that must have a spec.
        decided: number and placements of the results of the equations whose results are
            constrained: those that decide, and those that accumulate microbatches.
        uses: all operands and outputs that need a spec.
        roles: role of each input.
        shares: the terms of `costs` and `edges` by equation. Each has the number of the equation
            and either a decision with seconds of shape (2, options), as in `parts`, or two
            decisions with seconds of resharding. Resharding of the step's outputs has number -1.
        leaders: see `autopar.xla_fusion.Traffic`.
        scattered: number, decision, and bytes per option on one device before the reduce_scatter,
            of equations whose reduce_scatter XLA combines with others.
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
        """Return the selection problem."""
        return SelectionProblem(self.costs, self.edges)

    def seconds(self, decision: int, option: int) -> Seconds:
        """Return the seconds of an option, without edges."""
        cost = float(self.costs[decision][option])
        compute, communication = map(float, self.parts[decision][:, option])
        rest = cost - compute - communication
        resharding = rest if rest > 1e-9 * cost else 0.0  # less is a rounding error
        return Seconds(compute, communication, resharding)

    def seconds_by_equation(self, choice: Sequence[int], num_equations: int) -> tuple[Seconds, ...]:
        """Return the seconds of each equation, whose sum is the cost of the choice."""
        seconds = [[0.0, 0.0, 0.0] for _ in range(num_equations)]
        for number, decisions, cost in self.shares if num_equations else ():
            if len(decisions) == 2:
                seconds[number][2] += float(cost[choice[decisions[0]], choice[decisions[1]]])
            else:
                compute, communication = cost[:, choice[decisions[0]]]
                seconds[number][0] += float(compute)
                seconds[number][1] += float(communication)
        return tuple(Seconds(*of_equation) for of_equation in seconds)


def enumerate_decisions(
    step: StepGraph, costs: MeshCosts, options: ShardingOptions, deferred: tuple[str, ...] = ()
) -> Decisions:
    """Return the decisions of `step` on the mesh of `costs`.

    Args:
        step: the traced step.
        costs: costs on the mesh.
        options: what a sharding may do.
        deferred: mesh axes along which gradients are completed once per step
            (`autopar.sharding.deferred_sync`).

    Raises:
        MissingRuleError: an equation has no sharding rule.
        ShardingError: `options` can't be satisfied, e.g. the batch can't be sharded evenly.
    """
    builder = _Builder(step, costs, options, deferred)
    builder.add_inputs()
    for number, eqn in enumerate(step.jaxpr.eqns):
        builder.add_equation(number, eqn)
    builder.add_outputs()
    return builder.found


class _Builder:
    """Adds inputs, equations and outputs of a step to its decisions.

    Attributes:
        flow: how values depend on the batch.
        traffic: memory traffic of the equations.
        found: the decisions so far.
        repeats: how often each equation runs in a step.
        combined: costs of collectives that the compiler combines.
        depth: longest path of equations from an input to each value.
        content: number of elements of values before broadcasting.
        launch: seconds of an empty kernel.
        body: equations that run for each microbatch.
    """

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
        # Pins restrict inputs and named values only, and are no part of the key.
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
        """Add a decision per input."""
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
                specs = self._deferrable(
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
        """Require the spec of their input for carried outputs, and of the pin for pinned ones."""
        for o, (atom, path) in enumerate(
            zip(self.step.jaxpr.outvars, self.step.out_paths, strict=True)
        ):
            source = self.step.carried.get(o)
            pinned = self.pins.find(f"result/{path}".removesuffix("/"))
            if source is not None:
                target = self.found.inputs[source]
                if pinned is not None and pinned not in target.specs:
                    raise ShardingError(
                        f"result/{path} is pinned to {partition_spec(pinned)}, but it is the next"
                        f" {self.step.in_paths[source]}, which can't be there; pin both alike"
                    )
            elif pinned is not None:
                target = self._decide(f"result/{path}", (pinned,))
            else:
                continue
            self.found.outputs[o] = target
            self._use(None, o, atom, target.decision, target.specs)

    # -- equations

    def add_equation(self, number: int, eqn: JaxprEqn) -> None:
        """Place the results of an equation: as a decision, or following an operand."""
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
            self._accumulate(number, eqn, placed)
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
        """Return whether the equation is a decision of its own.

        A sum over examples, such as the gradient of a bias, is: it may reduce_scatter.
        """
        sums = any(factors.kinds[f] == "sum" for f in self.flow.batch_factors[number])
        return factors.decides or (sums and aval_of(eqn.outvars[0]).ndim > 0)

    def _follow(
        self, number: int, eqn: JaxprEqn, factors: OpFactors, placed: list[Placement | None]
    ) -> bool:
        """Let the equation follow an operand, if it can under all options of its decision.

        Operands with a batch dim come first: a scale per feature may be larger than a small batch
        of means. Of these the largest is followed, then the one with most elements before
        broadcasting (dims that a broadcast added can be sliced to match the others at no cost),
        then the deepest.

        Returns:
            Whether it follows an operand.
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
        self._add_seconds(number, placement.decision, self._costs(number, eqn, factors, found))
        self._use_operands(number, eqn, placement.decision, found)
        for var, specs in zip(eqn.outvars, found.results, strict=True):
            self.found.placements[var] = Placement(placement.decision, specs)
        return True

    def _choose(self, number: int, eqn: JaxprEqn, factors: OpFactors) -> None:
        """Make the equation a decision among all its candidates."""
        found = self._candidates(number, eqn, factors)
        label = f"{eqn.primitive.name} in {eqn.source_info.name_stack}"
        first = self._decide(label, found.results[0])
        self._add_seconds(number, first.decision, self._costs(number, eqn, factors, found))
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
        """Return a candidate per spec of the followed operand; None if one is impossible."""
        key = (
            factors,
            leader,
            specs,
            self._results(eqn),
            self.flow.batch_factors[number],
            self._is_deferred(number),
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
        """Return the candidates of an equation that decides."""
        marked = self.flow.batch_factors[number]
        if eqn.primitive.name == SHARD_MAP:  # depends on more than its factors
            return Candidates.of(factors, self._options(number, eqn, factors, marked))
        key = (factors, self._results(eqn), marked, self._is_deferred(number))
        found = self._known_candidates.get(key)
        if found is None:
            found = self._known_candidates[key] = Candidates.of(
                factors, self._options(number, eqn, factors, marked)
            )
        return found

    def _options(
        self, number: int, eqn: JaxprEqn, factors: OpFactors, marked: frozenset[int]
    ) -> list[Option]:
        """Return the options of an equation that the user's restrictions allow."""
        if eqn.primitive.name == SHARD_MAP:
            if self._is_deferred(number):
                raise ShardingError(
                    "a shard_map of the step decides itself how examples are sharded"
                )
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
        # A marker without a batch dim may be sharded over any dim: weights enter loops in shards,
        # and their gradients leave them in shards.
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
        if self._is_deferred(number):
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
        """Return the seconds of the kernel and of completing partial results under each option.

        The shape is (2, options). The traffic of the kernel is what it adds when it is fused.
        """
        if eqn.primitive in control_flow.MARKERS:
            return self._marker_costs(number, eqn, factors, found)
        if eqn.primitive.name == SHARD_MAP:
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
        """Return the seconds of a marker, shape (2, options).

        A loop launches a kernel per iteration, which counts. A stacked output is initialised with
        zeros, and each iteration writes its slice.
        """
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
        """Return the seconds of the kernel and of completing partial results under one option."""
        specs = [factors.operand_spec(k, option.assignment) for k in range(len(eqn.invars))]
        specs += [factors.result_spec(r, option.assignment) for r in range(len(eqn.outvars))]
        avals = [aval_of(atom) for atom in (*eqn.invars, *eqn.outvars)]
        shapes = [
            local_shape(aval.shape, spec, self.mesh)
            for aval, spec in zip(avals, specs, strict=True)
        ]
        sizes = [array_bytes(shape, aval.dtype) for shape, aval in zip(shapes, avals, strict=True)]
        completion = sum(
            self._completion_seconds(eqn.outvars[0], step, moved.together)
            for step in option.collectives
        )
        completion += self.costs.copy(option.copied)
        count = len(eqn.invars)
        kernel = self._kernel_seconds(eqn, shapes, sizes[:count], sizes[count:], moved)
        return kernel, completion

    def _completion_seconds(self, var: Var, step: Step, together: int) -> float:
        """Return the seconds of a collective that completes a partial result.

        XLA copies partial statistics of one kernel into one array, and completes them together.
        """
        costs = self._costs_of(var)
        kind, num_bytes, axes = step
        if together == 1 or kind != "all_reduce" or var not in self.flow.batch_statistics:
            return costs.collective(kind, num_bytes, axes)
        return costs.collective(kind, together * num_bytes, axes) / together + self.costs.copy(
            4 * num_bytes
        )

    def _kernel_seconds(self, eqn: JaxprEqn, shapes, operands, results, moved: Moved) -> float:
        """Return the seconds of an equation's share of its kernels, and of copies.

        Args:
            eqn: the equation.
            shapes: shapes of the shards of its operands and results.
            operands: bytes of the operands' shards.
            results: bytes of the results' shards.
            moved: memory traffic of the equation.
        """
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
            self.costs.model.kernel(kernel_of(eqn, total, shapes))
            + (kernels - 1) * self.launch
            + copies
        )

    # -- microbatches

    def _is_deferred(self, number: int) -> bool:
        """Return whether results of the equation stay partial along the deferred axes."""
        return bool(self.deferred) and number in self.body

    def _fits(self, number: int, assignment: Assignment) -> bool:
        return not self._is_deferred(number) or fits(
            assignment, self.flow.batch_factors[number], self.deferred
        )

    def _deferrable(self, path: str, rows: Collection[int], specs: Specs) -> Specs:
        """Return the specs of an input that shard its batch dims `rows` over the deferred axes."""
        deferred = set(self.deferred)
        allowed = tuple(
            spec
            for spec in specs
            if leads(spec, self.deferred) and all(deferred <= {*spec[dim]} for dim in rows if spec)
        )
        if not allowed:
            raise ShardingError(
                f"{path} can't be divided by examples along {', '.join(self.deferred)}"
            )
        return allowed

    def _accumulate(self, number: int, eqn: JaxprEqn, placed: Sequence[Placement | None]) -> None:
        """Add the seconds of accumulating microbatches.

        The sum is read and written, the addend read. The reading of an addend that is converted
        counts with the conversion.
        """
        for atom, var, placement in zip(eqn.invars, eqn.outvars, placed, strict=True):
            if placement is None or not isinstance(atom, Var):
                continue
            maker = self.made_by.get(atom)
            converted = maker is not None and maker.primitive is convert_element_type_p
            joined = aval_of(atom).shape != aval_of(var).shape  # written, not added
            passes = 2 if converted or joined else 3
            shapes = each_once(
                partial(local_shape, aval_of(atom).shape, mesh=self.mesh), placement.specs
            )
            sizes = [passes * array_bytes(shape, aval_of(var).dtype) for shape in shapes]
            seconds = self.step.num_micro_batches * np.array(
                [self.costs.copy(size) for size in sizes]
            )
            self._add_seconds(
                number, placement.decision, np.array([seconds, np.zeros_like(seconds)])
            )

    def _synchronise(self, number: int, eqn: JaxprEqn, placed: Sequence[Placement | None]) -> None:
        """Complete accumulated values along the deferred axes; how is a decision per value."""
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
            if placement is not None and combine[var] not in ("same", "rows"):
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
                self._add_seconds(number, result.decision, np.array([[0.0] * len(ways), seconds]))
                self._use(number, k, atom, result.decision, tuple(source for source, _ in ways))
                placement = result
            results.append(placement)
        self.found.decided.append((number, tuple(results)))
        self.found.placements.update(zip(eqn.outvars, results, strict=True))

    # -- shared

    def _decide(self, label: str, specs: Specs) -> Placement:
        """Add a decision with an option per spec."""
        self.found.labels.append(label)
        self.found.costs.append(np.zeros(len(specs)))
        self.found.parts.append(np.zeros((2, len(specs))))
        return Placement(len(self.found.costs) - 1, specs)

    def _add_seconds(self, number: int, decision: int, parts: np.ndarray) -> None:
        """Add the seconds of an equation to a decision.

        Args:
            number: number of the equation.
            decision: the decision.
            parts: seconds of its kernels and of completing its results, shape (2, options).
        """
        self.found.costs[decision] = self.found.costs[decision] + parts.sum(axis=0)
        self.found.parts[decision] = self.found.parts[decision] + parts
        self.found.shares.append((number, (decision,), parts))

    def _use_operands(self, number: int, eqn: JaxprEqn, decision: int, found: Candidates) -> None:
        for k, (atom, specs) in enumerate(zip(eqn.invars, found.operands, strict=True)):
            self._use(number, k, atom, decision, specs)

    def _use(
        self, eqn: int | None, operand: int, atom: Atom, decision: int, required: Specs
    ) -> None:
        """Record that an equation or output needs a value with a spec, and add its resharding."""
        placement = self._placement(atom)
        if placement is None:
            return
        if placement.decision == decision and placement.specs == required:
            return
        self.found.uses.append(Use(eqn, operand, placement, decision, required))
        assert isinstance(atom, Var)
        num_bytes = moved_bytes(self.made_by.get(atom), atom)
        alike = 1  # number of operands that are resharded together
        if eqn is not None and self.step.jaxpr.eqns[eqn].primitive is concatenate_p:
            alike = sum(a.aval == atom.aval for a in self.step.jaxpr.eqns[eqn].invars)
        matrix = self._costs_of(atom).reshard_matrix(alike * num_bytes, placement.specs, required)
        if matrix is None:
            return
        matrix = matrix / alike
        if eqn is not None and self.step.jaxpr.eqns[eqn].primitive is control_flow.loop_slice_p:
            # Of equal costs, each slice is resharded rather than the whole before the loop.
            matrix = matrix * (1 + 1e-6)
        if (
            eqn is not None
            and atom not in self.flow.per_example
            and (factors := self.flow.factors[eqn])
            and factors.decides
        ):
            # The compiler makes one copy for all equations that need the same spec.
            matrix = matrix / self.flow.readers[atom]  # pyright: ignore[reportArgumentType]
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
        """Return the costs of collectives on a value.

        The compiler combines those of weights and their gradients.
        """
        return (
            self.costs
            if atom in self.flow.per_example or atom in self.flow.batch_statistics
            else self.combined
        )

    def _placement(self, atom: Atom) -> Placement | None:
        return None if isinstance(atom, Literal) else self.found.placements[atom]

    def _content(self, atom: Atom) -> int:
        """Return the number of elements of a value before broadcasting."""
        return 0 if isinstance(atom, Literal) else self.content.get(atom, prod(aval_of(atom).shape))

    def _depth(self, atom: Atom) -> int:
        return 0 if isinstance(atom, Literal) else self.depth[atom]


def _repeats(step: StepGraph) -> list[float]:
    """Return how often each equation runs in a step, with loops and microbatches."""
    counts = control_flow.repeats(step.jaxpr.eqns)
    for number, _ in step.microbatching.body if step.microbatching else ():
        counts[number] *= step.num_micro_batches
    return counts
