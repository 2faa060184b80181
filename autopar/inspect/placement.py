"""Where the inputs and outputs of a step live, in the step's own structure."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding

from autopar.graph import aval_of
from autopar.plan import Stage, Value, spec_text
from autopar.planned import Planned
from autopar.sharding.spec import partition_spec


@dataclass(frozen=True, slots=True)
class PlacementSpec:
    """Where one array lives.

    Attributes:
        aval: shape and dtype of the whole array.
        mesh_ids: the stages on whose meshes it is.
        sharding_specs: how it is sharded over each of these meshes; they name axes and sizes, but no devices.
    """

    aval: jax.ShapeDtypeStruct
    mesh_ids: tuple[int, ...]
    sharding_specs: tuple[NamedSharding, ...]

    def __repr__(self) -> str:
        places = zip(self.sharding_specs, self.mesh_ids, strict=True)
        where = ", ".join(f"{spec_text(sharding.spec)} on mesh {mesh}" for sharding, mesh in places)
        return f"PlacementSpec({array_text(self.aval)}, {where})"


def input_placement_specs(planned: Planned) -> Any:
    """A tuple like the (dynamic) arguments of the step, with a PlacementSpec for every array."""
    step, (stage,) = planned.step, planned.plan.stages
    weak = [aval_of(var).weak_type for var in step.jaxpr.invars]
    return jax.tree.unflatten(step.in_tree, _specs(stage, stage.inputs, weak))


def output_placement_specs(planned: Planned) -> Any:
    """A pytree like the result of the step, with a PlacementSpec for every array."""
    step, (stage,) = planned.step, planned.plan.stages
    weak = [aval_of(atom).weak_type for atom in step.jaxpr.outvars]
    return jax.tree.unflatten(step.out_tree, _specs(stage, stage.outputs, weak))


def placed(aval: Any, sharding: NamedSharding, mesh_id: int) -> PlacementSpec:
    """The PlacementSpec of an array that is on the devices of one mesh of a pipeline."""
    abstract = NamedSharding(sharding.mesh.abstract_mesh, sharding.spec)
    struct = jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
    return PlacementSpec(struct, (mesh_id,), (abstract,))


def array_text(array: Any) -> str:
    """`float32[32,256]`, as JAX writes an abstract value."""
    return f"{array.dtype}[{','.join(map(str, array.shape))}]"


def _specs(stage: Stage, values: Iterable[Value], weak: Iterable[bool]) -> list[PlacementSpec]:
    mesh = AbstractMesh(stage.mesh_shape, stage.axis_names)
    return [
        PlacementSpec(
            jax.ShapeDtypeStruct(value.shape, value.dtype, weak_type=is_weak),
            (0,),
            (NamedSharding(mesh, partition_spec(value.spec)),),
        )
        for value, is_weak in zip(values, weak, strict=True)
    ]
