"""Shapes, specs and memory roles of a stage's values between its tasks."""

from collections.abc import Sequence

from jax.extend.core import Var

from autopar.ir.array_sizes import array_bytes
from autopar.ir.graph import Atom, aval_of
from autopar.ir.host_memory import is_on_host
from autopar.ir.spec import Spec, local_shape, replicated
from autopar.ir.step_graph import StepGraph
from autopar.microbatch.batch_rows import rows_dim
from autopar.pipeline.partition import Total
from autopar.pipeline.stage_graph import StageGraph
from autopar.plan import PlanError
from autopar.plan_stages import Stage
from autopar.sharding.memory_roles import MEMORY_ROLES
from simulator.memory import Role as MemoryRole


class StageValues:
    """The values of a stage between its tasks, as its plan shards them.

    Along deferred axes (`autopar.sharding.deferred_sync`) each device computes with examples of its
    own. Its sums, and values that depend on its examples without a row for each, differ from device
    to device. They get a leading dim with an entry per device.

    Attributes:
        mesh: logical mesh of the stage.
        deferred: its deferred axes.
        ways: number of devices along the deferred axes.
        per_device: values with an entry per device.
        joined: running sums that have the rows of all microbatches.
        roles: memory role of each input.
    """

    def __init__(self, stage_graph: StageGraph, stage: Stage) -> None:
        """Find the shapes and specs of the values.

        Raises:
            PlanError: the plan is for a stage with other values.
        """
        check_stage(stage_graph.step, stage, stage_graph.stage)
        self.mesh = stage.mesh
        self.deferred = stage.deferred
        self.ways = self.mesh.ways(stage.deferred)
        jaxpr = stage_graph.step.jaxpr
        is_whole_step = stage_graph.partition.is_whole_step
        inputs = dict(zip(jaxpr.invars, stage.inputs, strict=True))
        # A whole step takes whole batches and divides them itself. Its jaxpr is for one microbatch.
        self._shapes: dict[Var, tuple[int, ...]] = (
            {var: value.shape for var, value in inputs.items()} if is_whole_step else {}
        )
        self._specs: dict[Var, Spec] = {var: value.spec for var, value in inputs.items()}
        self.roles: dict[Var, MemoryRole] = {
            var: MEMORY_ROLES[value.role] for var, value in inputs.items()
        }
        for constraint in stage.constraints:
            if constraint.side == "out":
                var = jaxpr.eqns[constraint.eqn].outvars[constraint.index]
                self._specs.setdefault(var, constraint.spec)
        for atom, value in zip(jaxpr.outvars, stage.outputs, strict=True):
            if isinstance(atom, Var) and atom not in jaxpr.invars:
                self._specs[atom] = value.spec
        partition = stage_graph.partition
        totals = [total for task in stage_graph.tasks for total in partition.totals.get(task, ())]
        for total in totals:
            spec = self._specs.get(total.total, replicated(aval_of(total.total).ndim))
            summed = _without(spec, stage.deferred)
            self._specs[total.sum] = (
                summed if total.index is None else self._with_rows(summed, total)
            )
        self.per_device: frozenset[Var] = frozenset()
        if stage.deferred and not is_whole_step:
            self.per_device = partition.batch_facts.mixed.union(
                total.sum for total in totals if total.index is None
            )
        self.joined = frozenset(total.sum for total in totals if total.index is not None)

    def _with_rows(self, spec: Spec, total: Total) -> Spec:
        """Return a spec with the rows of all microbatches on the devices that compute them."""
        whole, part = aval_of(total.sum).shape, aval_of(total.part).shape
        dim = rows_dim(whole, part)
        return (*spec[:dim], (*self.deferred, *spec[dim]), *spec[dim + 1 :])

    def shape(self, var: Var) -> tuple[int, ...]:
        """Return the shape of a value between tasks."""
        shape: tuple[int, ...] = self._shapes.get(var) or aval_of(var).shape
        return (self.ways, *shape) if var in self.per_device else shape

    def spec(self, var: Var) -> Spec:
        """Return the spec of a value between tasks."""
        spec = self._specs.get(var, replicated(aval_of(var).ndim))
        return (self.deferred, *spec) if var in self.per_device else spec

    def device_bytes(self, var: Var) -> int:
        """Return the bytes of one device's shard of a value; 0 if it is in host memory."""
        if is_on_host(var):
            return 0
        shape = local_shape(self.shape(var), self.spec(var), self.mesh)
        return array_bytes(shape, aval_of(var).dtype)


def _without(spec: Spec, axes: tuple[str, ...]) -> Spec:
    return tuple(tuple(axis for axis in of_dim if axis not in axes) for of_dim in spec)


def check_stage(step: StepGraph, stage: Stage, number: int = 0) -> None:
    """Check that a plan has the inputs and outputs of a stage, and constrains values of it.

    Args:
        step: the stage as a step.
        stage: the stage of the plan.
        number: its number, for the error.

    Raises:
        PlanError: the plan has other inputs, outputs or values.
    """
    jaxpr = step.jaxpr
    sides = (("inputs", jaxpr.invars, stage.inputs), ("outputs", jaxpr.outvars, stage.outputs))
    for side, atoms, values in sides:
        if len(atoms) != len(values):
            raise PlanError(
                f"stage {number} of the plan has {len(values)} {side}, expected the"
                f" {len(atoms)} of the step; plan the step again"
            )
        for atom, value in zip(atoms, values, strict=True):
            _check_rank(f"{value.path} in the {side} of stage {number}", value.shape, atom)
    eqns = jaxpr.eqns
    for constraint in stage.constraints:
        present: Sequence[Atom] = ()
        if 0 <= constraint.eqn < len(eqns):
            eqn = eqns[constraint.eqn]
            present = eqn.invars if constraint.side == "in" else eqn.outvars
        if not 0 <= constraint.index < len(present):
            raise PlanError(
                f"constraint {constraint.name!r} is on value {constraint.index} on the"
                f" {constraint.side!r} side of equation {constraint.eqn}, which stage"
                f" {number} does not have ({len(eqns)} equations); plan the step again"
            )
        _check_rank(f"constraint {constraint.name!r}", constraint.shape, present[constraint.index])


def _check_rank(name: str, shape: Sequence[int], atom: Atom) -> None:
    """Raise PlanError unless a shape in the plan has as many dims as the value of the step."""
    if len(shape) != aval_of(atom).ndim:
        raise PlanError(
            f"{name} has shape {tuple(shape)} in the plan, expected {aval_of(atom).ndim} dims; plan"
            " the step again"
        )
