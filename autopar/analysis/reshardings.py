"""Reshardings of a plan: which values change their sharding, and with which collectives."""

from collections.abc import Iterator
from dataclasses import dataclass

from jax.extend.core import Literal, Var

from autopar.analysis.replay import Replay, equation_name, replay
from autopar.ir.array_sizes import array_bytes
from autopar.ir.graph import Atom, aval_of
from autopar.ir.spec import LogicalMesh, Spec, partition_spec
from autopar.ir.step_graph import StepGraph
from autopar.lowering.placement_specs import array_text
from autopar.lowering.planned import Planned
from autopar.plan import spec_text
from autopar.sharding.mesh_costs import Step, reshard_steps


@dataclass(frozen=True, slots=True)
class ReshardingTask:
    """One value that is read with another spec than it has.

    Attributes:
        value: the value: an input's path, or the equation that makes it.
        reader: the equation or output that reads it.
        eqn: number of that equation; None for an output.
        array: its dtype and shape.
        source, target: its spec before and after.
        num_bytes: bytes of the whole array.
        collectives: what brings it there, as (kind, bytes, mesh axes); nothing when every device cuts out its own part.
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
    """Every change of spec in the step, in its order; those of outputs come last.

    Raises:
        PlanError: the plan is for another step.
    """
    return tuple(resharding_in(planned, replay(planned)))


def value_names(step: StepGraph) -> dict[Var, str]:
    """What to call each value: the path of an input, or `#12 Dense_0/dot_general` after the equation that makes it."""
    names = dict(zip(step.jaxpr.invars, step.in_paths, strict=True))
    names.update((var, "constant") for var in step.jaxpr.constvars)
    for number, eqn in enumerate(step.jaxpr.eqns):
        names.update((var, f"#{number} {equation_name(eqn)}") for var in eqn.outvars)
    return names


def resharding_in(planned: Planned, played: Replay) -> Iterator[ReshardingTask]:
    """`resharding_tasks` of a plan that has been replayed."""
    names = value_names(planned.step)
    for each in played.equations:
        for atom, source, target in zip(each.eqn.invars, each.sources, each.operands, strict=True):
            if isinstance(atom, Var) and source is not None and source != target:
                yield _task(names[atom], each.name, each.number, atom, source, target, played.mesh)
    for atom, value in zip(planned.step.jaxpr.outvars, planned.plan.stages[0].outputs, strict=True):
        if isinstance(atom, Literal) or atom not in played.values:
            continue
        source = played.values[atom]
        if source != value.spec:
            yield _task(names[atom], value.path, None, atom, source, value.spec, played.mesh)


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
    size = array_bytes(aval.shape, aval.dtype)
    steps = tuple(reshard_steps(size, source, target, mesh))
    return ReshardingTask(value, reader, eqn, array_text(aval), source, target, size, steps)
