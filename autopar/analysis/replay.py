"""Sharding propagation of a plan: the spec of every value and the split of every equation.

A plan stores the specs that the planner decided. All others follow from the factors of each
equation, by the rules of the planner. Neither a solver nor a device is needed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal as OneOf

from jax.extend.core import JaxprEqn, Literal, Var

from autopar.ir.graph import Atom, aval_of
from autopar.ir.spec import LogicalMesh, Spec, axes_of, replicated
from autopar.lowering.planned import Planned
from autopar.lowering.stage_values import check_stage
from autopar.microbatch.gradients import accumulate_p
from autopar.primitives.factors import Assignment, OpFactors, assignment_of
from autopar.sharding.dataflow import analyze


@dataclass(frozen=True, slots=True)
class ShardedEquation:
    """An equation with the shardings of a plan.

    Attributes:
        number: its number in the flat jaxpr.
        eqn: the equation.
        factors: how it maps array dims; None if it passes its operands through as its results.
        assignment: for each factor the mesh axes that split it.
        sources: the spec that each operand is stored with; None for one that is computed on every
            device that reads it.
        operands: the spec that the equation reads each operand with.
        results: the spec of each result, after the collectives that complete it.
        batch: the factors that run over the batch.
        deferred: mesh axes along which results stay partial sums until all microbatches have been
            accumulated.
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
        """The equation's scope in the model and its primitive."""
        return equation_name(self.eqn)

    @property
    def completions(self) -> tuple[tuple[OneOf["all_reduce", "reduce_scatter"], str], ...]:
        """The collectives that complete the first result, as (kind, mesh axis) pairs."""
        if self.factors is None:
            return ()
        kinds = completions(self.factors, self.assignment, self.results[0])
        return tuple((kind, axis) for kind, axis in kinds if axis not in self.deferred)

    def synchronized(self, result: int) -> dict[str, OneOf["all_reduce", "reduce_scatter"]]:
        """Return the collectives that complete a locally accumulated result, by mesh axis."""
        if self.eqn.primitive is not accumulate_p:
            return {}
        sharded = axes_of(self.results[result])
        return {
            axis: "reduce_scatter" if axis in sharded else "all_reduce" for axis in self.deferred
        }


@dataclass(frozen=True, slots=True)
class Replay:
    """A step with the shardings of a plan.

    Attributes:
        mesh: the logical mesh.
        equations: the equations of the flat jaxpr, in their order.
        values: the spec that each value is stored with. Values that every device computes where it
            reads them, such as broadcast constants, are absent.
    """

    mesh: LogicalMesh
    equations: tuple[ShardedEquation, ...]
    values: dict[Var, Spec]


def replay(planned: Planned) -> Replay:
    """Propagate the shardings of a plan through its step.

    Args:
        planned: a step and its plan, which has a single stage.

    Raises:
        PlanError: the plan is for another step.
    """
    step, plan = planned.step, planned.plan
    plan.check(step.fingerprint)
    (stage,) = plan.stages
    check_stage(step, stage)
    pins = {(c.eqn, c.side, c.index): c.spec for c in stage.constraints}
    values = {var: value.spec for var, value in zip(step.jaxpr.invars, stage.inputs, strict=True)}
    values.update((var, replicated(len(aval_of(var).shape))) for var in step.jaxpr.constvars)
    flow = analyze(step)
    in_microbatches: set[int] = set()
    if step.microbatching:
        in_microbatches |= {number for number, _ in step.microbatching.body}
        in_microbatches |= {number for number, _ in step.microbatching.marks}
    equations = []
    for number, (eqn, factors, batch) in enumerate(
        zip(step.jaxpr.eqns, flow.factors, flow.batch_factors, strict=True)
    ):
        sources = tuple(None if isinstance(a, Literal) else values.get(a) for a in eqn.invars)
        read = [pins.get((number, "in", k), source) for k, source in enumerate(sources)]
        pinned = [pins.get((number, "out", r)) for r in range(len(eqn.outvars))]
        if factors is None:
            assignment = ()
            derived = read
            operands = _or_replicated(read, eqn.invars)
        else:
            assignment = assignment_of(factors, read, pinned)
            has_stored_operand = any(spec is not None for spec in read)
            derived = [
                factors.result_spec(r, assignment) if has_stored_operand else None
                for r in range(len(pinned))
            ]
            operands = tuple(factors.operand_spec(k, assignment) for k in range(len(read)))
        results = [
            pin if pin is not None else spec
            for pin, spec in zip(pinned, derived, strict=bool(pinned))
        ]
        values.update(
            (var, spec) for var, spec in zip(eqn.outvars, results, strict=True) if spec is not None
        )
        equations.append(
            ShardedEquation(
                number=number,
                eqn=eqn,
                factors=factors,
                assignment=assignment,
                sources=sources,
                operands=operands,
                results=_or_replicated(results, eqn.outvars),
                batch=batch,
                deferred=stage.deferred if number in in_microbatches else (),
            )
        )
    return Replay(stage.mesh, tuple(equations), values)


def completions(
    factors: OpFactors, assignment: Assignment, result: Spec
) -> tuple[tuple[OneOf["all_reduce", "reduce_scatter"], str], ...]:
    """Return the collectives that complete the first result, as (kind, mesh axis) pairs.

    Args:
        factors: how the equation maps array dims.
        assignment: for each factor the mesh axes that split it.
        result: the spec of the first result afterwards; axes in it are reduce-scattered.
    """
    scattered = axes_of(result)
    partial = factors.partial_axes(assignment)
    return tuple(
        ("reduce_scatter" if axis in scattered else "all_reduce", axis) for axis in partial
    )


def equation_name(eqn: JaxprEqn) -> str:
    """Return the equation's scope in the model and its primitive, e.g. `Dense_0/dot_general`."""
    return f"{eqn.source_info.name_stack}/{eqn.primitive.name}".removeprefix("/")


def _or_replicated(specs: Sequence[Spec | None], atoms: Sequence[Atom]) -> tuple[Spec, ...]:
    """Return the specs with replicated ones in place of None."""
    return tuple(
        spec if spec is not None else replicated(len(aval_of(atom).shape))
        for spec, atom in zip(specs, atoms, strict=True)
    )
