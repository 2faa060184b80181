"""A plan played back over its step: where every value is, and how every equation is split, with no solver and no device.

A plan pins the values that were decided; the rest follows from the factors of each equation, as it did for the planner.
"""

from dataclasses import dataclass
from typing import Literal as OneOf

from jax.extend.core import JaxprEqn, Literal, Var

from autopar.ir.graph import Atom, aval_of
from autopar.ir.spec import LogicalMesh, Spec, axes_of, replicated
from autopar.lowering.planned import Planned
from autopar.microbatch.gradients import accumulate_p
from autopar.primitives.factors import Assignment, OpFactors, assignment_of
from autopar.sharding.dataflow import analyse


@dataclass(frozen=True, slots=True)
class ShardedEquation:
    """One equation as the plan runs it.

    Attributes:
        number: its number in the flat jaxpr.
        factors: what it does to array dims; None when its results are its operands.
        assignment: the mesh axes of each factor.
        sources: where each operand is before; None for what is computed wherever it is needed.
        operands: the spec with which the equation reads each operand.
        results: the spec of each result, completed.
        batch: the factors that run over the batch.
        deferred: mesh axes along which results stay partial, until they have been accumulated.
    """

    number: int
    eqn: JaxprEqn
    factors: OpFactors | None
    assignment: Assignment
    sources: tuple[Spec | None, ...]
    operands: tuple[Spec, ...]
    results: tuple[Spec, ...]
    batch: frozenset[int]
    deferred: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Its place in the model and its primitive."""
        return equation_name(self.eqn)

    @property
    def completions(self) -> tuple[tuple[OneOf["all_reduce", "reduce_scatter"], str], ...]:
        """How partial results are completed along each axis over which there are some."""
        if self.factors is None:
            return ()
        found = completions(self.factors, self.assignment, self.results[0])
        return tuple((kind, axis) for kind, axis in found if axis not in self.deferred)

    def synchronised(self, result: int) -> dict[str, OneOf["all_reduce", "reduce_scatter"]]:
        """How a result that microbatches accumulated apart is completed along each axis."""
        if self.eqn.primitive is not accumulate_p:
            return {}
        there = axes_of(self.results[result])
        return {axis: "reduce_scatter" if axis in there else "all_reduce" for axis in self.deferred}


@dataclass(frozen=True, slots=True)
class Replay:
    """A step as a plan runs it.

    Attributes:
        mesh: the logical mesh.
        equations: one for each equation of the flat jaxpr.
        values: where each value is; those computed wherever they are needed are absent.
    """

    mesh: LogicalMesh
    equations: tuple[ShardedEquation, ...]
    values: dict[Var, Spec]


def replay(planned: Planned) -> Replay:
    """Follow the plan through the step.

    Raises:
        PlanError: the plan is for another step.
    """
    step, plan = planned.step, planned.plan
    plan.check(step.fingerprint)
    (stage,) = plan.stages
    pins = {(c.eqn, c.side, c.index): c.spec for c in stage.constraints}
    values = {var: value.spec for var, value in zip(step.jaxpr.invars, stage.inputs, strict=True)}
    values.update((var, replicated(len(aval_of(var).shape))) for var in step.jaxpr.constvars)
    flow = analyse(step)
    apart = (
        {n for n, _ in (*step.microbatching.body, *step.microbatching.marks)}
        if step.microbatching
        else set()
    )
    equations = []
    for number, (eqn, factors, marked) in enumerate(
        zip(step.jaxpr.eqns, flow.factors, flow.marked, strict=True)
    ):
        sources = tuple(None if isinstance(a, Literal) else values.get(a) for a in eqn.invars)
        read = [pins.get((number, "in", k), source) for k, source in enumerate(sources)]
        pinned = [pins.get((number, "out", r)) for r in range(len(eqn.outvars))]
        if factors is None:
            results = [
                pin if pin is not None else spec
                for pin, spec in zip(pinned, read, strict=bool(pinned))
            ]
            assignment = ()
            operands = tuple(
                spec if spec is not None else _whole(a)
                for spec, a in zip(read, eqn.invars, strict=True)
            )
        else:
            assignment = assignment_of(factors, read, pinned)
            known = any(spec is not None for spec in read)
            derived = [
                factors.result_spec(r, assignment) if known else None for r in range(len(pinned))
            ]
            results = [
                pin if pin is not None else spec for pin, spec in zip(pinned, derived, strict=True)
            ]
            operands = tuple(factors.operand_spec(k, assignment) for k in range(len(read)))
        values.update(
            (var, spec) for var, spec in zip(eqn.outvars, results, strict=True) if spec is not None
        )
        full = tuple(
            spec if spec is not None else _whole(v)
            for spec, v in zip(results, eqn.outvars, strict=True)
        )
        equations.append(
            ShardedEquation(
                number,
                eqn,
                factors,
                assignment,
                sources,
                operands,
                full,
                marked,
                stage.deferred if number in apart else (),
            )
        )
    return Replay(stage.mesh, tuple(equations), values)


def completions(
    factors: OpFactors, assignment: Assignment, result: Spec
) -> tuple[tuple[OneOf["all_reduce", "reduce_scatter"], str], ...]:
    """The collective that completes the first result, which ends up as `result`, along each axis over which it is partial."""
    scattered = axes_of(result)
    partial = factors.partial_axes(assignment)
    return tuple(
        ("reduce_scatter" if axis in scattered else "all_reduce", axis) for axis in partial
    )


def equation_name(eqn: JaxprEqn) -> str:
    """Its place in the model and its primitive, as in `autopar.plan.ShardingConstraint`."""
    return f"{eqn.source_info.name_stack}/{eqn.primitive.name}".removeprefix("/")


def _whole(atom: Atom) -> Spec:
    return replicated(len(aval_of(atom).shape))
