"""Where a stage has its values, and in which shape, as its plan says."""

from jax.extend.core import Var

from autopar.ir.array_sizes import array_bytes
from autopar.ir.graph import aval_of
from autopar.ir.spec import Spec, local_shape, replicated
from autopar.pipeline.stage_graph import StageGraph
from autopar.plan import Stage
from autopar.sharding.memory_roles import MEMORY_ROLES
from simulator.memory import Role as MemoryRole


class StageValues:
    """The values of a stage between its tasks.

    Along deferred axes (`autopar.sharding.deferred_sync`) each device computes with examples of its own. What it adds up, and what it
    hands on that depends on its examples without having a row for each, gets a leading dim: an entry per device.

    Attributes:
        ways: number of devices that compute apart.
        apart: the values with a leading dim.
        roles: what memory the stage's inputs take.
    """

    def __init__(self, found: StageGraph, stage: Stage) -> None:
        self.mesh, self.deferred = stage.mesh, stage.deferred
        self.ways = self.mesh.ways(stage.deferred)
        jaxpr = found.step.jaxpr
        # A program of the whole step takes whole batches and cuts them itself; its equations are those of a microbatch.
        whole = found.partition.is_whole_step
        self._shapes: dict[Var, tuple[int, ...]] = {}
        if whole:
            self._shapes = {
                v: value.shape for v, value in zip(jaxpr.invars, stage.inputs, strict=True)
            }
        self._specs: dict[Var, Spec] = {
            v: value.spec for v, value in zip(jaxpr.invars, stage.inputs, strict=True)
        }
        self.roles: dict[Var, MemoryRole] = {
            v: MEMORY_ROLES[value.role] for v, value in zip(jaxpr.invars, stage.inputs, strict=True)
        }
        for constraint in stage.constraints:
            if constraint.side == "out":
                self._specs.setdefault(
                    jaxpr.eqns[constraint.eqn].outvars[constraint.index], constraint.spec
                )
        for atom, value in zip(jaxpr.outvars, stage.outputs, strict=True):
            if isinstance(atom, Var) and atom not in jaxpr.invars:
                self._specs[atom] = value.spec
        totals = [each for task in found.tasks for each in found.partition.totals.get(task, ())]
        for each in totals:
            spec = self._specs.get(each.total, replicated(aval_of(each.total).ndim))
            self._specs[each.sum] = tuple(
                tuple(a for a in axes if a not in stage.deferred) for axes in spec
            )
        apart = stage.deferred and not whole
        self.apart = (
            {each.sum for each in totals} | found.partition.batch_facts.mixed
            if apart
            else frozenset()
        )

    def shape(self, var: Var) -> tuple[int, ...]:
        """Return the shape of a value as tasks get and give it."""
        shape: tuple[int, ...] = self._shapes.get(var) or aval_of(var).shape
        return (self.ways, *shape) if var in self.apart else shape

    def spec(self, var: Var) -> Spec:
        """Return the spec of a value as tasks get and give it."""
        spec = self._specs.get(var, replicated(aval_of(var).ndim))
        return (self.deferred, *spec) if var in self.apart else spec

    def device_bytes(self, var: Var) -> int:
        """Return the bytes of one device's shard of a value."""
        return array_bytes(
            local_shape(self.shape(var), self.spec(var), self.mesh), aval_of(var).dtype
        )
