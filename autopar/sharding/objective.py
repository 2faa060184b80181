"""The objective of a step's selection problem: decisions, their options, and costs in seconds.

The objective is the sum of kernels, collectives that complete partial results, and resharding. Each
value is placed by one decision: that of an input, or of an equation that decides. An equation that
follows an operand (Alpa, OSDI'22, section 4.2) has one spec per option of the operand's decision,
and adds no variable. Values computed from constants alone are *free*: each device computes what it
needs.

`equation_candidates` lists the options of an equation, `equation_seconds` prices them, and
`step_decisions` has the result as data. `solver` minimizes the objective: `presolve` and
`message_passing` reduce the problem, and `ilp` states what is left as an integer program.
"""

from collections.abc import Sequence

import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var
from jax.extend.core.primitives import name_p

from autopar.ir import control_flow
from autopar.ir.graph import Atom, aval_of
from autopar.ir.spec import Spec, Specs, partition_spec, replicated
from autopar.ir.step_graph import StepGraph
from autopar.microbatch.gradients import accumulate_p
from autopar.primitives.factors import OpFactors
from autopar.progress import count_progress
from autopar.sharding.candidates import Candidates
from autopar.sharding.dataflow import analyze
from autopar.sharding.equation_candidates import EquationCandidates
from autopar.sharding.equation_contents import equation_contents
from autopar.sharding.equation_seconds import EquationSeconds
from autopar.sharding.followed_operands import followed_operands
from autopar.sharding.heuristic import input_placed
from autopar.sharding.mesh_costs import MeshCosts
from autopar.sharding.options import ShardingOptions
from autopar.sharding.pins import Pins, ShardingError, check_batch_axis, input_specs
from autopar.sharding.step_decisions import Decisions, PartialResult, Placement, Use
from autopar.xla_fusion import traffic


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
    builder = _ProblemBuilder(step, costs, options, deferred)
    builder.add_inputs()
    eqns = step.jaxpr.eqns
    for number, eqn in enumerate(eqns):
        builder.add_equation(number, eqn)
        count_progress(number + 1, len(eqns))
    builder.add_outputs()
    return builder.decisions


class _ProblemBuilder:
    """Adds inputs, equations and outputs of a step to its decisions.

    Attributes:
        flow: how values depend on the batch.
        decisions: the decisions so far.
        candidates: the options of equations.
        seconds: the seconds of equations.
    """

    def __init__(
        self, step: StepGraph, costs: MeshCosts, options: ShardingOptions, deferred: tuple[str, ...]
    ) -> None:
        self.step = step
        self.options = options
        self.mesh = costs.mesh
        check_batch_axis(options, self.mesh)
        self.flow = analyze(step)
        memory_traffic = traffic(step, costs.row_padding)
        self.decisions = Decisions(
            leaders=memory_traffic.leaders,
            exponentials=memory_traffic.exponentials,
            workspace=costs.workspace,
            hides_latency=costs.hides_latency,
        )
        self.pins = Pins(options.pins, step, self.mesh)
        contents = equation_contents(step, costs.row_padding, costs.completes_behind_loops)
        self.candidates = EquationCandidates(
            step, self.flow, costs, options, deferred, contents.options
        )
        self.seconds = EquationSeconds(step, self.flow, memory_traffic, contents.seconds, costs)
        self._followed = followed_operands(step)
        self._loops = control_flow.repeats(step.jaxpr.eqns)
        self.deferred = deferred

    # -- inputs and outputs

    def add_inputs(self) -> None:
        """Add a decision per input."""
        self.decisions.roles.extend(self.flow.roles)
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
                specs = self.candidates.of_input(
                    path, {0} if role == "batch" else self.step.received_inputs.get(i, ()), specs
                )
            placement = self._decide(path, specs)
            self.decisions.inputs.append(placement)
            self.decisions.placements[var] = placement
        for var in self.step.jaxpr.constvars:
            specs = (replicated(len(aval_of(var).shape)),)
            self.decisions.placements[var] = self._decide("constant", specs)

    def add_outputs(self) -> None:
        """Require the spec of their input for carried outputs, and of the pin for pinned ones."""
        for o, (atom, path) in enumerate(
            zip(self.step.jaxpr.outvars, self.step.out_paths, strict=True)
        ):
            source = self.step.carried.get(o)
            pinned = self.pins.find(f"result/{path}".removesuffix("/"))
            if source is not None:
                target = self.decisions.inputs[source]
                if pinned is not None and pinned not in target.specs:
                    raise ShardingError(
                        f"result/{path} is pinned to {partition_spec(pinned)}, but it is the next"
                        f" {self.step.in_paths[source]}, which can't be there; pin both alike"
                    )
            elif pinned is not None:
                target = self._decide(f"result/{path}", (pinned,))
            else:
                continue
            self.decisions.outputs[o] = target
            self._use(None, o, atom, target.decision, target.specs)

    # -- equations

    def add_equation(self, number: int, eqn: JaxprEqn) -> None:
        """Place the results of an equation: as a decision, or following an operand."""
        placed = [self._placement(atom) for atom in eqn.invars]
        factors = self.flow.factors[number]
        if not eqn.outvars:
            return
        if eqn.primitive is accumulate_p:
            self._accumulate(number, eqn, placed)
        if eqn.primitive is accumulate_p and self.deferred:
            self._synchronize(number, eqn, placed)
        elif factors is None:
            self.decisions.placements.update(zip(eqn.outvars, placed, strict=True))
            if eqn.primitive is accumulate_p:
                self.decisions.decided.append((number, tuple(placed)))
        elif eqn.primitive is name_p and (pinned := self.pins.find(eqn.params["name"])) is not None:
            self._place_pinned(number, eqn, factors, pinned)
        elif not any(placed) and eqn.primitive is not control_flow.loop_carry_p:
            self.decisions.placements.update(dict.fromkeys(eqn.outvars))
        elif self._decides(number, eqn, factors) or not self._follow(number, eqn, factors, placed):
            self._choose(number, eqn, factors)

    def _place_pinned(self, number: int, eqn: JaxprEqn, factors: OpFactors, pinned: Spec) -> None:
        """Give a named value the spec that it is pinned to."""
        name = eqn.params["name"]
        assignment = factors.assign(0, pinned, self.mesh)
        if self.deferred and (assignment is None or not self.candidates.fits(number, assignment)):
            raise ShardingError(f"{name} is pinned to {partition_spec(pinned)}")
        result = self._decide(name, (pinned,))
        self.decisions.decided.append((number, (result,)))
        self.decisions.placements[eqn.outvars[0]] = result
        self._use(number, 0, eqn.invars[0], result.decision, result.specs)

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

        Returns:
            Whether it follows an operand.
        """
        leader = next(k for k in self._followed[number] if placed[k] is not None)
        placement = placed[leader]
        assert placement is not None
        candidates = self.candidates.following(number, eqn, factors, leader, placement.specs)
        if candidates is None:
            return False
        seconds = self.seconds.computing(number, eqn, factors, candidates)
        self._add_seconds(number, placement.decision, seconds)
        self._use_operands(number, eqn, placement.decision, candidates)
        for var, specs in zip(eqn.outvars, candidates.results, strict=True):
            self.decisions.placements[var] = Placement(placement.decision, specs)
        return True

    def _choose(self, number: int, eqn: JaxprEqn, factors: OpFactors) -> None:
        """Make the equation a decision among all its candidates."""
        candidates = self.candidates.deciding(number, eqn, factors)
        label = f"{eqn.primitive.name} in {eqn.source_info.name_stack}"
        first = self._decide(label, candidates.results[0])
        seconds = self.seconds.computing(number, eqn, factors, candidates)
        self._add_seconds(number, first.decision, seconds)
        results = [Placement(first.decision, specs) for specs in candidates.results]
        is_combined = self.flow.is_combined(eqn.outvars[0]) and self._loops[number] == 1
        for kind, before in sorted(candidates.partial_bytes.items()):
            self.decisions.partial.append(
                PartialResult(number, first.decision, kind, before, is_combined)
            )
        self.decisions.decided.append((number, tuple(results)))
        self.decisions.placements.update(zip(eqn.outvars, results, strict=True))
        self._use_operands(number, eqn, first.decision, candidates)

    # -- microbatches

    def _accumulate(self, number: int, eqn: JaxprEqn, placed: Sequence[Placement | None]) -> None:
        """Add the seconds of accumulating microbatches."""
        for atom, var, placement in zip(eqn.invars, eqn.outvars, placed, strict=True):
            if placement is None or not isinstance(atom, Var):
                continue
            seconds = self.seconds.accumulating(atom, var, placement.specs)
            self._add_seconds(number, placement.decision, seconds)

    def _synchronize(self, number: int, eqn: JaxprEqn, placed: Sequence[Placement | None]) -> None:
        """Complete accumulated values along the deferred axes; how is a decision per value."""
        micro = self.step.microbatching
        assert micro is not None
        marked = (var for _, mark in micro.marks for var in mark.outvars)
        combine = dict(zip(marked, micro.combine, strict=True))
        results: list[Placement | None] = []
        for k, (atom, var, placement) in enumerate(
            zip(eqn.invars, eqn.outvars, placed, strict=True)
        ):
            result = placement
            if placement is not None and combine[var] not in ("same", "rows"):
                ways = self.candidates.synchronizing(var, placement.specs)
                result = self._decide("accumulate", tuple(way.results[0] for _, way in ways))
                seconds = self.seconds.synchronizing([way for _, way in ways])
                self._add_seconds(number, result.decision, seconds)
                self._use(number, k, atom, result.decision, tuple(source for source, _ in ways))
            results.append(result)
        self.decisions.decided.append((number, tuple(results)))
        self.decisions.placements.update(zip(eqn.outvars, results, strict=True))

    # -- shared

    def _decide(self, label: str, specs: Specs) -> Placement:
        """Add a decision with an option per spec."""
        self.decisions.labels.append(label)
        self.decisions.costs.append(np.zeros(len(specs)))
        self.decisions.parts.append(np.zeros((2, len(specs))))
        return Placement(len(self.decisions.costs) - 1, specs)

    def _add_seconds(self, number: int, decision: int, parts: np.ndarray | None) -> None:
        """Add the seconds of an equation to a decision, if it has any.

        Args:
            number: number of the equation.
            decision: the decision.
            parts: seconds of its kernels and of completing its results, shape (2, options).
        """
        if parts is None:
            return
        self.decisions.costs[decision] += parts[0] + parts[1]
        self.decisions.parts[decision] += parts
        self.decisions.shares.append((number, (decision,), parts))

    def _use_operands(
        self, number: int, eqn: JaxprEqn, decision: int, candidates: Candidates
    ) -> None:
        for k, (atom, specs) in enumerate(zip(eqn.invars, candidates.operands, strict=True)):
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
        assert isinstance(atom, Var)
        matrix = self.seconds.resharding(eqn, atom, placement.specs, required)
        self.decisions.uses.append(Use(eqn, operand, placement, decision, required, matrix))
        if matrix is None:
            return
        i, j = placement.decision, decision
        self.decisions.shares.append((-1 if eqn is None else eqn, (i, j), matrix))
        if i == j:
            self.decisions.costs[i] = self.decisions.costs[i] + np.diagonal(matrix)
            return
        key, matrix = ((i, j), matrix) if i < j else ((j, i), matrix.T)
        self.decisions.edges[key] = (
            self.decisions.edges[key] + matrix if key in self.decisions.edges else matrix
        )

    def _placement(self, atom: Atom) -> Placement | None:
        return None if isinstance(atom, Literal) else self.decisions.placements[atom]
