"""A job: a planned step as those that run it know it, plain data that can be sent, without anything traced.

A job names values as the program does. Devices are numbered host by host, as plans number them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from autopar.ir.keys import data_aval, impl_of, is_key, key_dtype
from autopar.ir.spec import LogicalMesh, Spec, from_partition_spec, partition_spec
from autopar.lowering.cross_mesh_resharding import Resharding
from simulator.program import Instruction, Run

if TYPE_CHECKING:
    from autopar.lowering.placement_specs import PlacementSpec


@dataclass(frozen=True, slots=True)
class StageMesh:
    """The devices of a stage and the logical mesh that they form."""

    devices: tuple[int, ...]
    shape: tuple[int, ...]
    axis_names: tuple[str, ...]

    @property
    def logical(self) -> LogicalMesh:
        return LogicalMesh(self.shape, self.axis_names)

    def on(self, devices: Mapping[int, Any]) -> Mesh:
        """The mesh of these devices, given by number."""
        here = np.array([devices[number] for number in self.devices]).reshape(self.shape)
        return Mesh(here, self.axis_names, axis_types=(AxisType.Auto,) * len(self.shape))


@dataclass(frozen=True, slots=True)
class Place:
    """Where an array is: the devices, and which of them has which part."""

    mesh: StageMesh
    spec: Spec

    @staticmethod
    def of(placement: "PlacementSpec") -> "Place":
        """Where a step wants an array: the first of its meshes, which is its home."""
        sharding, devices = placement.sharding_specs[0], placement.devices[0]
        mesh = StageMesh(devices, sharding.mesh.axis_sizes, sharding.mesh.axis_names)
        return Array.of(
            "", placement.aval, mesh, from_partition_spec(sharding.spec, placement.aval.ndim)
        ).place

    def sharding(self, devices: Mapping[int, Any]) -> NamedSharding:
        """On these devices, given by number."""
        return NamedSharding(self.mesh.on(devices), partition_spec(self.spec))

    def abstract(self) -> NamedSharding:
        """On devices that are elsewhere."""
        return NamedSharding(self.mesh.logical.abstract(), partition_spec(self.spec))


@dataclass(frozen=True, slots=True)
class Array:
    """A value of a mesh: what it is and where.

    Attributes:
        dtype: of its elements; of random keys that are keys.
        impl: of random keys that are sent as the numbers that they consist of, in one dim more, what they are made by.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    place: Place
    impl: str | None = None

    @classmethod
    def of(
        cls, name: str, aval: Any, mesh: StageMesh, spec: Spec, keys_as_data: bool = True
    ) -> "Array":
        """Return the value of that aval, which `spec` shards.

        Args:
            keys_as_data: whether random keys are sent as the numbers that they consist of: between processes.
        """
        if is_key(aval.dtype) and not keys_as_data:
            return cls(name, aval.shape, aval.dtype, Place(mesh, spec))
        data, impl = data_aval(aval), impl_of(aval.dtype) if is_key(aval.dtype) else None
        spec += ((),) * (data.ndim - len(spec))
        return cls(name, data.shape, np.dtype(data.dtype), Place(mesh, spec), impl)

    @property
    def raw(self) -> jax.ShapeDtypeStruct:
        """What it is on workers."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype)

    @property
    def aval(self) -> jax.ShapeDtypeStruct:
        """What it is to the user, to whom keys are keys."""
        if self.impl is None:
            return self.raw
        return jax.ShapeDtypeStruct(self.shape[:-1], key_dtype(self.impl))

    @property
    def sharding(self) -> NamedSharding:
        """How it is sharded to the user, on a mesh without devices."""
        return NamedSharding(
            self.place.mesh.logical.abstract(), partition_spec(self.place.spec[: self.aval.ndim])
        )


@dataclass(frozen=True, slots=True)
class Call:
    """What a run instruction calls.

    Attributes:
        program: the key of the exported program; the name of the task where the devices are those of this process.
        donated: positions of operands whose memory the results may take.
    """

    program: str
    operands: tuple[Array, ...]
    results: tuple[Array, ...]
    donated: tuple[int, ...] = ()

    @property
    def devices(self) -> tuple[int, ...]:
        """Those that it runs on; none if it has nothing to do."""
        values = self.results or self.operands
        return values[0].place.mesh.devices if values else ()


@dataclass(frozen=True, slots=True)
class Delivery:
    """A value that is sent from mesh to mesh, as often as there are steps.

    Attributes:
        number: tells it from the other deliveries of the job.
    """

    number: int
    plan: Resharding
    dtype: np.dtype
    source: StageMesh
    to: StageMesh


@dataclass(frozen=True, slots=True)
class Input:
    """An input of the step on its way to the values of a mesh.

    Attributes:
        number: of the input.
        home: the whole input, where the step wants it; the mesh may be another one, and gets it by one of the job's `spreads`.
        parts: what it becomes: itself, or microbatches (`autopar.microbatch.batch_rows`).
    """

    number: int
    mesh: int
    home: Array
    parts: tuple[Array, ...]


@dataclass(frozen=True, slots=True)
class Output:
    """An output of the step, made of a value of a mesh, or of those of all microbatches, example by example.

    Attributes:
        is_copy: whether it is a copy of its value, which is another output, too, or an argument that the caller keeps.
    """

    number: int
    mesh: int
    parts: tuple[Array, ...]
    whole: Array
    is_copy: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """A step, for workers.

    Attributes:
        programs: serialised `jax.export.Exported`, by key; none where the devices are those of this process.
        order: the instructions with their meshes, in the order of `walk`.
        meshes: the devices of each mesh.
        spreads: deliveries before the first instruction, by input and mesh: of inputs that other meshes read, too, than that which is
            their home.
        zeros: for each mesh the sums that microbatches are added to.
        chunks: runs of neighbouring examples that a microbatch consists of (`autopar.microbatch.batch_rows`).
    """

    programs: Mapping[str, bytes]
    meshes: tuple[tuple[int, ...], ...]
    order: tuple[tuple[int, Instruction], ...]
    calls: Mapping[Run, Call]
    deliveries: Mapping[tuple[str, int], Delivery]
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    zeros: tuple[tuple[Array, ...], ...]
    spreads: Mapping[tuple[int, int], Delivery] = field(default_factory=dict)
    chunks: int = 1

    @property
    def num_deliveries(self) -> int:
        """How many values a step sends from mesh to mesh."""
        return len(self.deliveries) + len(self.spreads)

    def of(self, devices: Sequence[int]) -> "Job":
        """The part that concerns a worker with these devices."""
        mine = {
            mesh for mesh, members in enumerate(self.meshes) if not set(devices).isdisjoint(members)
        }
        order = tuple((mesh, instruction) for mesh, instruction in self.order if mesh in mine)
        runs = {instruction for _, instruction in order if isinstance(instruction, Run)}
        calls = {run: call for run, call in self.calls.items() if run in runs}

        def concerns(delivery: Delivery) -> bool:
            return not set(devices).isdisjoint((*delivery.source.devices, *delivery.to.devices))

        return replace(
            self,
            programs={
                key: self.programs[key]
                for key in dict.fromkeys(call.program for call in calls.values())
            },
            order=order,
            calls=calls,
            deliveries={at: each for at, each in self.deliveries.items() if concerns(each)},
            spreads={at: each for at, each in self.spreads.items() if concerns(each)},
            inputs=tuple(each for each in self.inputs if each.mesh in mine),
            outputs=tuple(each for each in self.outputs if each.mesh in mine),
            zeros=tuple(each if mesh in mine else () for mesh, each in enumerate(self.zeros)),
        )


def worker_groups(
    meshes: Iterable[Sequence[int]], owner: Mapping[int, int]
) -> frozenset[tuple[int, ...]]:
    """The workers that form one distributed JAX with others, to share `meshes`, by the worker of each device.

    Raises:
        ValueError: a worker would belong to two.
    """
    found = {tuple(sorted({owner[device] for device in mesh})) for mesh in meshes}
    found = {group for group in found if len(group) > 1}
    for worker in {worker for group in found for worker in group}:
        several = [group for group in found if worker in group]
        if len(several) > 1:
            raise ValueError(
                f"host {worker} has devices in stages that span hosts {several[0]} and {several[1]}; a host can share only one"
                " stage with other hosts: choose submeshes of whole hosts, or within one"
            )
    return frozenset(found)
