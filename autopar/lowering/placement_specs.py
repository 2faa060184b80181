"""Placement specs: where the inputs and outputs of a step are, in the step's own structure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from autopar.ir.host_memory import HOST_KIND
from autopar.plan_stages import spec_text


@dataclass(frozen=True, slots=True)
class PlacementSpec:
    """The place of one array.

    Attributes:
        aval: shape and dtype of the whole array.
        mesh_ids: stages on whose meshes the array is.
        sharding_specs: sharding over each of these meshes, with axes and sizes but no devices.
        devices: devices of each of these meshes, in its order. They are ids in JAX if the step runs
            in this process. Otherwise they are numbers in the plan, which counts the devices of all
            hosts, host by host.
    """

    aval: jax.ShapeDtypeStruct
    mesh_ids: tuple[int, ...]
    sharding_specs: tuple[NamedSharding, ...]
    devices: tuple[tuple[int, ...], ...]

    def __repr__(self) -> str:
        places = zip(self.sharding_specs, self.mesh_ids, strict=True)
        where = ", ".join(
            f"{spec_text(sharding.spec)} on mesh {mesh}"
            + (f" in {sharding.memory_kind} memory" if sharding.memory_kind == HOST_KIND else "")
            for sharding, mesh in places
        )
        return f"PlacementSpec({array_text(self.aval)}, {where})"

    def sharding(self) -> NamedSharding:
        """Return the array's sharding over devices of this process, on the first of its meshes.

        Raises:
            ValueError: some of its devices are not in this process.
        """
        local_devices = {device.id: device for device in jax.local_devices()}
        missing = sorted(set(self.devices[0]) - set(local_devices))
        if missing:
            raise ValueError(
                f"{self} is on devices {list(self.devices[0])}, but this process has no devices"
                f" {missing}; compile the step for the devices that are here, and take its"
                " placements"
            )
        spec = self.sharding_specs[0]
        devices = np.array([local_devices[number] for number in self.devices[0]]).reshape(
            spec.mesh.axis_sizes
        )
        return NamedSharding(
            Mesh(devices, spec.mesh.axis_names, (AxisType.Auto,) * devices.ndim),
            spec.spec,
            memory_kind=spec.memory_kind,
        )


@dataclass(frozen=True, slots=True)
class JoinedPlacement:
    """The places of an array whose pieces are on the meshes of different stages.

    Attributes:
        pieces: the place of each piece.
        dim: the dim along which the pieces follow one another.
    """

    pieces: tuple[PlacementSpec, ...]
    dim: int

    @property
    def aval(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the whole array."""
        first = self.pieces[0].aval
        shape = list(first.shape)
        shape[self.dim] = sum(piece.aval.shape[self.dim] for piece in self.pieces)
        return jax.ShapeDtypeStruct(tuple(shape), first.dtype, weak_type=first.weak_type)

    def __repr__(self) -> str:
        return f"JoinedPlacement({', '.join(map(repr, self.pieces))})"

    def sharding(self) -> tuple[NamedSharding, ...]:
        """Return the sharding of each piece over devices of this process.

        Raises:
            ValueError: some of their devices are not in this process.
        """
        return tuple(piece.sharding() for piece in self.pieces)


def placed(
    aval: Any, sharding: NamedSharding, mesh_id: int, devices: Sequence[int] | None = None
) -> PlacementSpec:
    """Return the placement of an array that is on one mesh of a pipeline.

    Args:
        aval: shape and dtype of the array.
        sharding: its sharding.
        mesh_id: stage on whose mesh the array is.
        devices: devices of the mesh, in its order; by default the ids of the devices of `sharding`.
    """
    abstract = NamedSharding(
        sharding.mesh.abstract_mesh, sharding.spec, memory_kind=sharding.memory_kind
    )
    struct = jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
    if devices is None:
        assert isinstance(sharding.mesh, Mesh)
        devices = [device.id for device in sharding.mesh.devices.flat]
    return PlacementSpec(struct, (mesh_id,), (abstract,), (tuple(devices),))


def array_text(array: Any) -> str:
    """Return the text of an array's type as JAX writes it, e.g. `float32[32,256]`."""
    return f"{array.dtype}[{','.join(map(str, array.shape))}]"
