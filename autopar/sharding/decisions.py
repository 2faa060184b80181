"""From a traced step to a choice problem: which equations decide, what they may choose, and what follows them.

Every value is placed by one decision: an input's, or that of an equation that decides. A value that follows (Alpa, OSDI'22,
section 4.2) has one spec per option of the decision it follows, so it costs no variable. Values made of constants alone
are *free*: they are computed wherever they are needed.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any
from typing import Literal as OneOf

import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from autopar.gradients import accumulate_p
from autopar.graph import Atom, aval_of
from autopar.sharding.costs import Combined, MeshCosts, Step
from autopar.sharding.factors import Assignment, OpFactors
from autopar.sharding.options import Freedom, ShardingOptions
from autopar.sharding.problem import ChoiceProblem
from autopar.sharding.rules import PASS_THROUGH, POINTWISE, op_factors
from autopar.sharding.spec import LogicalMesh, Spec, all_specs, axes_of, divides, local_shape
from autopar.trace import StepGraph
from autopar.work import array_bytes, kernel_of

type Role = OneOf["batch", "parameter", "state", "other"]

Specs = tuple[Spec, ...]
"""One spec per option of a decision."""


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


@dataclass(frozen=True, slots=True)
class Option:
    """One candidate of an equation: how its factors are sharded and how partial results are completed."""

    assignment: Assignment
    results: tuple[Spec, ...]
    collectives: tuple[Step, ...]


@dataclass
class Decisions:
    """The choice problem of a step, and what each choice means.

    Attributes:
        labels: for each decision, the input path or the equation it belongs to.
        costs: for each decision, seconds of each option; edges likewise for pairs of decisions.
        placements: where each value is; None for a free one.
        decided: (equation number, placements of its results) for the equations whose results are to be pinned: those that
            decide, and those where microbatches accumulate.
        uses: every place where a value is read with a spec that some decision requires.
        roles: for each input "batch", "parameter", "state" or "other".
    """

    labels: list[str] = field(default_factory=list)
    costs: list[np.ndarray] = field(default_factory=list)
    edges: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)
    placements: dict[Var, Placement | None] = field(default_factory=dict)
    inputs: list[Placement] = field(default_factory=list)
    decided: list[tuple[int, tuple[Placement | None, ...]]] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    roles: list[Role] = field(default_factory=list)

    def problem(self) -> ChoiceProblem:
        return ChoiceProblem(self.costs, self.edges)


class ShardingError(ValueError):
    """The options can't hold for this step on this mesh."""


def enumerate_decisions(step: StepGraph, costs: MeshCosts, options: ShardingOptions) -> Decisions:
    """The decisions of `step` on the mesh of `costs`, limited by `options`.

    Raises:
        MissingRuleError: an equation has no sharding rule.
        ShardingError: `options` can't hold, e.g. the batch can't be divided over the mesh.
    """
    builder = _Builder(step, costs, options)
    builder.add_inputs()
    for number, eqn in enumerate(step.jaxpr.eqns):
        builder.add_equation(number, eqn)
    builder.add_outputs()
    return builder.found


class _Builder:
    def __init__(self, step: StepGraph, costs: MeshCosts, options: ShardingOptions) -> None:
        self.step, self.costs, self.options = step, costs, options
        self.mesh = costs.mesh
        self.found = Decisions()
        eqns = step.jaxpr.eqns
        self.factors = [None if eqn.primitive.name in PASS_THROUGH else op_factors(eqn) for eqn in eqns]
        self.marked, self.per_example = _batch_factors(step, self.factors)
        self.combined = MeshCosts(costs.mesh, Combined(costs.model))
        self.readers = Counter(
            atom
            for eqn, factors in zip(eqns, self.factors, strict=True)
            if factors is not None and factors.decides
            for atom in eqn.invars
            if isinstance(atom, Var)
        )
        self.stored = stored_values(step)
        self.depth: dict[Var, int] = {}
        self._known_costs: dict[Any, np.ndarray] = {}  # repeated layers ask again

    # -- inputs and outputs

    def add_inputs(self) -> None:
        parameters = _parameters(self.step, self.marked)
        states = set(self.step.carried.values())
        for i, (var, path) in enumerate(zip(self.step.jaxpr.invars, self.step.in_paths, strict=True)):
            role: Role = "batch" if i in self.step.batch else "other"
            if i in states:
                role = "parameter" if var in parameters else "state"
            self.found.roles.append(role)
            specs = tuple(self._input_specs(role, var, path))
            placement = self._decide(path, specs, np.zeros(len(specs)))
            self.found.inputs.append(placement)
            self.found.placements[var] = placement
            self.depth[var] = 0
        for var in self.step.jaxpr.constvars:
            specs = (((),) * len(aval_of(var).shape),)
            self.found.placements[var] = self._decide("constant", specs, np.zeros(1))
            self.depth[var] = 0

    def _input_specs(self, role: Role, var: Var, path: str) -> list[Spec]:
        shape, mesh = aval_of(var).shape, self.mesh
        specs = all_specs(shape, mesh)
        if role == "batch" and self.options.data_parallel:
            wanted = (tuple(a for a in mesh.axis_names if mesh.sizes[a] > 1), *((),) * (len(shape) - 1))
            if not divides(shape, wanted, mesh):
                raise ShardingError(
                    f"batch input {path} has shape {shape}: its first dim must divide evenly over"
                    f" {mesh.num_devices} devices; pad the batch or use a mesh of another size"
                )
            return [wanted]
        freedom: Freedom = "any"
        if role == "parameter":
            freedom = self.options.parameters
        elif role == "state":
            freedom = self.options.optimizer_state
        elif role == "other" and self.options.data_parallel:
            freedom = "replicated"
        if freedom == "replicated":
            return specs[:1]
        if freedom == "sharded":
            most = max(mesh.ways(axes_of(spec)) for spec in specs)
            return [spec for spec in specs if mesh.ways(axes_of(spec)) == most]
        return specs

    def add_outputs(self) -> None:
        """A carried output is wanted as its input is, so that the next step finds it in place."""
        for o, atom in enumerate(self.step.jaxpr.outvars):
            source = self.step.carried.get(o)
            if source is not None:
                target = self.found.inputs[source]
                self._use(None, o, atom, target.decision, target.specs)

    # -- equations

    def add_equation(self, number: int, eqn: JaxprEqn) -> None:
        placed = [self._placement(atom) for atom in eqn.invars]
        self.depth.update(dict.fromkeys(eqn.outvars, 1 + max((self._depth(a) for a in eqn.invars), default=0)))
        factors = self.factors[number]
        if factors is None:
            self.found.placements.update(zip(eqn.outvars, placed, strict=True))
            if eqn.primitive is accumulate_p:
                self.found.decided.append((number, tuple(placed)))
        elif not any(placed):
            self.found.placements.update(dict.fromkeys(eqn.outvars))
        elif factors.decides or not self._follow(number, eqn, factors, placed):
            self._choose(number, eqn, factors)

    def _follow(self, number: int, eqn: JaxprEqn, factors: OpFactors, placed: list[Placement | None]) -> bool:
        """Let the equation follow its largest (then deepest) operand, if it can under each of that one's options."""
        candidates = [k for k, placement in enumerate(placed) if placement is not None]
        leader = max(candidates, key=lambda k: (aval_of(eqn.invars[k]).size, self._depth(eqn.invars[k])))
        placement = placed[leader]
        assert placement is not None
        followed = _followed(factors, leader, placement.specs, self.mesh)
        if followed is None:
            return False
        results = self._results(eqn)
        options = [_completions(factors, assignment, results, False, self.mesh)[0] for assignment in followed]
        costs = self._costs(eqn, factors, options)
        self.found.costs[placement.decision] = self.found.costs[placement.decision] + costs
        self._use_operands(number, eqn, factors, placement.decision, followed)
        for r, var in enumerate(eqn.outvars):
            self.found.placements[var] = Placement(placement.decision, tuple(o.results[r] for o in options))
        return True

    def _choose(self, number: int, eqn: JaxprEqn, factors: OpFactors) -> None:
        """Make the equation a decision over all its candidates."""
        options = self._options(eqn, factors, self.marked[number])
        label = f"{eqn.primitive.name} in {eqn.source_info.name_stack}"
        costs = self._costs(eqn, factors, options)
        first = self._decide(label, tuple(o.results[0] for o in options), costs)
        results = [Placement(first.decision, tuple(o.results[r] for o in options)) for r in range(len(eqn.outvars))]
        self.found.decided.append((number, tuple(results)))
        self.found.placements.update(zip(eqn.outvars, results, strict=True))
        self._use_operands(number, eqn, factors, first.decision, tuple(o.assignment for o in options))

    def _options(self, eqn: JaxprEqn, factors: OpFactors, marked: frozenset[int]) -> list[Option]:
        assignments = factors.assignments(self.mesh)
        if self.options.data_parallel:
            assignments = _only(assignments, marked, self.mesh)
        scatter = not self.options.data_parallel or self.options.optimizer_state == "sharded"
        results = self._results(eqn)
        return [option for a in assignments for option in _completions(factors, a, results, scatter, self.mesh)]

    def _results(self, eqn: JaxprEqn) -> tuple[tuple[tuple[int, ...], int], ...]:
        return tuple((tuple(aval_of(var).shape), aval_of(var).dtype.itemsize) for var in eqn.outvars)

    def _costs(self, eqn: JaxprEqn, factors: OpFactors, options: Sequence[Option]) -> np.ndarray:
        """Seconds of each option on one device: its kernel (what it moves when fused), and completing partial results."""
        stored = tuple(isinstance(a, Var) and a in self.stored for a in (*eqn.invars, *eqn.outvars))
        avals = tuple(atom.aval for atom in (*eqn.invars, *eqn.outvars))
        numbers = eqn.params.get("dimension_numbers")
        key = (eqn.primitive.name, numbers, factors, avals, stored, tuple(options), eqn.outvars[0] in self.per_example)
        if key not in self._known_costs:
            self._known_costs[key] = np.array([self._cost(eqn, factors, option, stored) for option in options])
        return self._known_costs[key]

    def _cost(self, eqn: JaxprEqn, factors: OpFactors, option: Option, stored: Sequence[bool]) -> float:
        mesh, count = self.mesh, len(eqn.invars)
        specs = [factors.operand_spec(k, option.assignment) for k in range(count)]
        specs += [factors.result_spec(r, option.assignment) for r in range(len(eqn.outvars))]
        avals = [aval_of(atom) for atom in (*eqn.invars, *eqn.outvars)]
        shapes = [local_shape(aval.shape, spec, mesh) for aval, spec in zip(avals, specs, strict=True)]
        moved = sum(
            array_bytes(shape, aval.dtype) for shape, aval, held in zip(shapes, avals, stored, strict=True) if held
        )
        seconds = sum(self._costs_of(eqn.outvars[0]).collective(*step) for step in option.collectives)
        return seconds + (self.costs.model.kernel(kernel_of(eqn, shapes[:count], moved)) if moved else 0.0)

    # -- shared

    def _decide(self, label: str, specs: Specs, costs: np.ndarray) -> Placement:
        self.found.labels.append(label)
        self.found.costs.append(costs)
        return Placement(len(self.found.costs) - 1, specs)

    def _use_operands(
        self, number: int, eqn: JaxprEqn, factors: OpFactors, decision: int, assignments: tuple[Assignment, ...]
    ) -> None:
        for k, atom in enumerate(eqn.invars):
            required = _required(factors, k, assignments)
            self._use(number, k, atom, decision, required)

    def _use(self, eqn: int | None, operand: int, atom: Atom, decision: int, required: Specs) -> None:
        placement = self._placement(atom)
        if placement is None:
            return
        if placement.decision == decision and placement.specs == required:
            return
        self.found.uses.append(Use(eqn, operand, placement, decision, required))
        num_bytes = array_bytes(aval_of(atom).shape, aval_of(atom).dtype)
        matrix = self._costs_of(atom).reshard_matrix(num_bytes, placement.specs, required)
        if not matrix.any():
            return
        if eqn is not None and atom not in self.per_example and (factors := self.factors[eqn]) and factors.decides:
            matrix = matrix / self.readers[atom]  # pyright: ignore[reportArgumentType]  # the compiler makes one copy for all who want the same
        i, j = placement.decision, decision
        if i == j:
            self.found.costs[i] = self.found.costs[i] + np.diagonal(matrix)
            return
        key, matrix = ((i, j), matrix) if i < j else ((j, i), matrix.T)
        self.found.edges[key] = self.found.edges[key] + matrix if key in self.found.edges else matrix

    def _costs_of(self, atom: Atom) -> MeshCosts:
        """Costs of collectives on this value; those of weights and gradients are combined by the compiler."""
        return self.costs if atom in self.per_example else self.combined

    def _placement(self, atom: Atom) -> Placement | None:
        return None if isinstance(atom, Literal) else self.found.placements[atom]

    def _depth(self, atom: Atom) -> int:
        return 0 if isinstance(atom, Literal) else self.depth[atom]


@lru_cache(maxsize=65536)
def _followed(factors: OpFactors, leader: int, specs: Specs, mesh: LogicalMesh) -> tuple[Assignment, ...] | None:
    """The assignment under each spec of the operand that an equation follows; None when it can't keep one of them."""
    assignments = []
    for spec in specs:
        assignment = factors.assign(leader, spec, mesh)
        if assignment is None:
            return None
        assignments.append(assignment)
    return tuple(assignments)


@lru_cache(maxsize=65536)
def _completions(
    factors: OpFactors,
    assignment: Assignment,
    results: tuple[tuple[tuple[int, ...], int], ...],
    scatter: bool,
    mesh: LogicalMesh,
) -> tuple[Option, ...]:
    """The ways to complete partial results: an all_reduce, or (when `scatter`) a reduce_scatter onto some dim per axis.

    `results` are (shape, bytes of an element) of each result. The plain all_reduce comes first.
    """
    specs = tuple(factors.result_spec(r, assignment) for r in range(len(results)))
    partial = factors.partial_axes(assignment)
    if not partial:
        return (Option(assignment, specs, ()),)
    shape, _ = results[0]
    scatter = scatter and len(results) == 1 and "max" not in factors.kinds
    options = []
    for dims in product((None, *range(len(shape))) if scatter else (None,), repeat=len(partial)):
        spec = tuple(
            (*axes, *(axis for axis, onto in zip(partial, dims, strict=True) if onto == dim))
            for dim, axes in enumerate(specs[0])
        )
        if not divides(shape, spec, mesh):
            continue
        steps: list[Step] = []
        for r, (size, width) in enumerate(results):
            local: float = prod(local_shape(size, specs[r], mesh)) * width
            for dim in (*range(len(shape)), None):
                axes = tuple(axis for axis, onto in zip(partial, dims, strict=True) if onto == dim)
                if axes and dim is not None:
                    steps.append(("reduce_scatter", local, axes))
                    local /= mesh.ways(axes)
                elif axes:
                    steps.append(("all_reduce", local, axes))
        options.append(Option(assignment, (spec, *specs[1:]), tuple(steps)))
    return tuple(options)


@lru_cache(maxsize=65536)
def _required(factors: OpFactors, operand: int, assignments: tuple[Assignment, ...]) -> Specs:
    """The spec that an operand must have under each assignment."""
    return tuple(factors.operand_spec(operand, assignment) for assignment in assignments)


def _only(assignments: Sequence[Assignment], marked: frozenset[int], mesh: LogicalMesh) -> list[Assignment]:
    """The assignments that shard the factors in `marked` as far as can be, and no others."""

    def ways(assignment: Assignment) -> int:
        return mesh.ways(axis for axes in assignment for axis in axes)

    allowed = [a for a in assignments if all(not axes or f in marked for f, axes in enumerate(a))]
    most = max(map(ways, allowed))
    return [a for a in allowed if ways(a) == most]


def _batch_factors(step: StepGraph, factors: Sequence[OpFactors | None]) -> tuple[list[frozenset[int]], frozenset[Var]]:
    """For each equation the factors that run over the batch, and the values that have a batch dim.

    Found by following the batch dims of the inputs.
    """
    dims_of: dict[Var, frozenset[int]] = {step.jaxpr.invars[i]: frozenset({0}) for i in step.batch}
    marked = []
    for eqn, op in zip(step.jaxpr.eqns, factors, strict=True):
        marks = [frozenset() if isinstance(a, Literal) else dims_of.get(a, frozenset()) for a in eqn.invars]
        if op is None:
            marked.append(frozenset())
            dims_of.update(zip(eqn.outvars, marks, strict=True))
            continue
        found = frozenset(op.operands[k][dim][0] for k, dims in enumerate(marks) for dim in dims if op.operands[k][dim])
        marked.append(found)
        for var, result in zip(eqn.outvars, op.results, strict=True):
            dims_of[var] = frozenset(dim for dim, of in enumerate(result) if of and of[0] in found)
    return marked, frozenset(var for var, dims in dims_of.items() if dims)


def _parameters(step: StepGraph, marked: Sequence[frozenset[int]]) -> set[Var]:
    """The inputs that computation per example depends on; other carried state belongs to the optimizer."""
    reaching: set[Atom] = set()
    for eqn, marks in zip(reversed(step.jaxpr.eqns), reversed(marked), strict=True):
        if marks or not reaching.isdisjoint(eqn.outvars):
            reaching.update(atom for atom in eqn.invars if isinstance(atom, Var))
    return {var for var in step.jaxpr.invars if var in reaching}


_FUSIBLE = POINTWISE | {"broadcast_in_dim", "iota", "reshape", "squeeze", "slice", "transpose"}
"""Primitives whose results a fusion keeps in registers when only other fusible equations or reductions read them."""


def stored_values(step: StepGraph) -> set[Var]:
    """The values that are written to memory: inputs, outputs, and what a kernel other than a fusion writes or reads."""
    stored = {*step.jaxpr.invars, *step.jaxpr.constvars, *(a for a in step.jaxpr.outvars if isinstance(a, Var))}
    for eqn in step.jaxpr.eqns:
        name = eqn.primitive.name
        if name not in _FUSIBLE and name not in PASS_THROUGH:
            stored.update(eqn.outvars)
            if not name.startswith("reduce_"):
                stored.update(atom for atom in eqn.invars if isinstance(atom, Var))
    return stored
