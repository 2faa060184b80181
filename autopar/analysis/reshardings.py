"""Reshardings of a plan: the values that change their sharding, and the collectives for it."""

from collections.abc import Iterator
from dataclasses import dataclass

from jax.extend.core import Literal, Var

from autopar.analysis.replay import Replay, equation_name, replay
from autopar.ir.array_sizes import value_bytes
from autopar.ir.graph import Atom, aval_of
from autopar.ir.spec import LogicalMesh, Spec, partition_spec
from autopar.ir.step_graph import StepGraph
from autopar.lowering.placement_specs import array_text
from autopar.lowering.planned import Planned
from autopar.plan_stages import spec_text
from autopar.sharding.mesh_costs import Step, reshard_steps


@dataclass(frozen=True, slots=True)
class ReshardingTask:
    """A value that is read with another spec than it is stored with.

    Attributes:
        value: the value: the path of an input, or the equation that computes it.
        reader: the equation or output that reads it.
        eqn: number of that equation; None for an output.
        array: dtype and shape of the value.
        source: its spec before.
        target: its spec after.
        num_bytes: bytes of the whole array.
        collectives: the collectives of the resharding as (kind, bytes, mesh axes); empty if every
            device slices its shard from what it has.
    """

    value: str
    reader: str
    eqn: int | None
    array: str
    source: Spec
    target: Spec
    num_bytes: int
    collectives: tuple[Step, ...]

    def __str__(self) -> str:
        change = (
            f"{spec_text(partition_spec(self.source))} -> {spec_text(partition_spec(self.target))}"
        )
        how = [
            f"{kind} of {num_bytes:,.0f} bytes over {', '.join(axes)}"
            for kind, num_bytes, axes in self.collectives
        ]
        at = self.reader if self.eqn is None else f"#{self.eqn} {self.reader}"
        return (
            f"{self.value} {self.array} {change} for {at}: {', then '.join(how) or 'local slice'}"
        )


def resharding_tasks(planned: Planned) -> tuple[ReshardingTask, ...]:
    """Return the reshardings in a step in the order of its equations, then of its outputs.

    Args:
        planned: a step and its plan, which has a single stage (see `single_stage`).

    Raises:
        PlanError: the plan is for another step.
    """
    return tuple(_tasks(planned, replay(planned)))


def value_names(step: StepGraph) -> dict[Var, str]:
    """Return names of values: the path of an input, or its equation, `#12 Dense_0/dot_general`."""
    names = dict(zip(step.jaxpr.invars, step.in_paths, strict=True))
    names.update((var, "constant") for var in step.jaxpr.constvars)
    for number, eqn in enumerate(step.jaxpr.eqns):
        names.update((var, f"#{number} {equation_name(eqn)}") for var in eqn.outvars)
    return names


def _tasks(planned: Planned, replayed: Replay) -> Iterator[ReshardingTask]:
    names = value_names(planned.step)
    mesh = replayed.mesh
    for equation in replayed.equations:
        reads = zip(equation.eqn.invars, equation.sources, equation.operands, strict=True)
        for atom, source, target in reads:
            if isinstance(atom, Var) and source is not None and source != target:
                name = names[atom]
                yield _task(name, equation.name, equation.number, atom, source, target, mesh)
    for atom, value in zip(planned.step.jaxpr.outvars, planned.plan.stages[0].outputs, strict=True):
        if isinstance(atom, Literal) or atom not in replayed.values:
            continue
        source = replayed.values[atom]
        if source != value.spec:
            yield _task(names[atom], value.path, None, atom, source, value.spec, mesh)


def _task(
    value: str,
    reader: str,
    eqn: int | None,
    atom: Atom,
    source: Spec,
    target: Spec,
    mesh: LogicalMesh,
) -> ReshardingTask:
    aval = aval_of(atom)
    size = value_bytes(atom)
    steps = tuple(reshard_steps(size, source, target, mesh))
    return ReshardingTask(value, reader, eqn, array_text(aval), source, target, size, steps)
