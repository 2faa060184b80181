"""Placement of a planned step's values on local devices."""

from collections.abc import Sequence

from jax.extend.core import Var
from jax.sharding import Mesh, NamedSharding

from autopar.planned import PlannedStep
from autopar.sharding.spec import partition_spec


class Places:
    """The plan's specs, on devices.

    Attributes:
        meshes: the devices of each stage; stages may share them.
    """

    def __init__(self, planned: PlannedStep, meshes: Sequence[Mesh]) -> None:
        self.planned, self.meshes = planned, tuple(meshes)

    def mesh_of(self, stage: int) -> int:
        """The number of a stage's mesh, as the program counts them."""
        return self.planned.schedule.pipeline.mesh_of(stage)

    def of(self, stage: int, var: Var) -> NamedSharding:
        """Where a stage has a value."""
        return NamedSharding(self.meshes[stage], partition_spec(self.planned.values[stage].spec(var)))

    def home(self, i: int) -> NamedSharding:
        """Where input `i` of the step is before it: where its next value is made, if it has one."""
        return self.of(self.planned.cut.input_stages[i][0], self.planned.step.jaxpr.invars[i])

    def read(self, mesh: int, name: str) -> NamedSharding | None:
        """Where the first task of a mesh that reads a value wants it; None if none does."""
        reader = self.planned.instructions.readers.get((mesh, name))
        return None if reader is None else self.of(*reader)
