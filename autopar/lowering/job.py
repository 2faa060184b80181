"""The job of a planned step: the instructions and arrays that workers execute.

A job is plain data that can be sent to other processes; it contains nothing traced. It names values
as the program does and numbers devices as plans do, host by host.
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
    """The devices of a stage and the logical mesh that they form.

    Attributes:
        devices: numbers of the devices in the plan, in row-major order of the mesh.
        shape: shape of the logical mesh.
        axis_names: names of its axes.
    """

    devices: tuple[int, ...]
    shape: tuple[int, ...]
    axis_names: tuple[str, ...]

    @property
    def logical(self) -> LogicalMesh:
        """The logical mesh without devices."""
        return LogicalMesh(self.shape, self.axis_names)

    def on(self, devices: Mapping[int, Any]) -> Mesh:
        """Return the mesh of JAX devices.

        Args:
            devices: JAX devices by their number in the plan.
        """
        array = np.array([devices[number] for number in self.devices]).reshape(self.shape)
        return Mesh(array, self.axis_names, axis_types=(AxisType.Auto,) * len(self.shape))


@dataclass(frozen=True, slots=True)
class Place:
    """The mesh that an array is on, and how it is sharded over it.

    Attributes:
        mesh: its mesh.
        spec: its spec.
        memory_kind: JAX's name of the memory; None for device memory.
    """

    mesh: StageMesh
    spec: Spec
    memory_kind: str | None = None

    @staticmethod
    def of(placement: "PlacementSpec") -> "Place":
        """Return where a step expects an array: on the first of its meshes, its home."""
        sharding, devices = placement.sharding_specs[0], placement.devices[0]
        mesh = StageMesh(devices, sharding.mesh.axis_sizes, sharding.mesh.axis_names)
        spec = from_partition_spec(sharding.spec, placement.aval.ndim)
        array = Array.of("", placement.aval, mesh, spec, memory_kind=sharding.memory_kind)
        return array.place

    def sharding(self, devices: Mapping[int, Any]) -> NamedSharding:
        """Return the sharding over JAX devices.

        Args:
            devices: JAX devices by their number in the plan.
        """
        return NamedSharding(
            self.mesh.on(devices), partition_spec(self.spec), memory_kind=self.memory_kind
        )

    def abstract(self) -> NamedSharding:
        """Return the sharding over devices that are not in this process."""
        return NamedSharding(
            self.mesh.logical.abstract(), partition_spec(self.spec), memory_kind=self.memory_kind
        )


@dataclass(frozen=True, slots=True)
class Array:
    """A value on one mesh.

    Attributes:
        name: name of the value in the program.
        shape: shape of the whole value.
        dtype: dtype of its elements; a key dtype for random keys that are stored as keys.
        place: its mesh and sharding.
        impl: PRNG implementation of random keys that are stored as key data, the numbers that they
            consist of, in one more dim. None for other values.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    place: Place
    impl: str | None = None

    @classmethod
    def of(
        cls,
        name: str,
        aval: Any,
        mesh: StageMesh,
        spec: Spec,
        keys_as_data: bool = True,
        memory_kind: str | None = None,
    ) -> "Array":
        """Return the value with a given aval and spec.

        Args:
            name: name of the value in the program.
            aval: its shape and dtype for the user.
            mesh: its mesh.
            spec: its spec.
            keys_as_data: whether random keys are stored as key data, as between processes.
            memory_kind: JAX's name of its memory; None for device memory.
        """
        if is_key(aval.dtype) and not keys_as_data:
            return cls(name, aval.shape, aval.dtype, Place(mesh, spec))
        data = data_aval(aval)
        impl = impl_of(aval.dtype) if is_key(aval.dtype) else None
        spec += ((),) * (data.ndim - len(spec))
        return cls(name, data.shape, np.dtype(data.dtype), Place(mesh, spec, memory_kind), impl)

    @property
    def raw(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype on workers."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype)

    @property
    def aval(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype for the user, with random keys as keys."""
        if self.impl is None:
            return self.raw
        return jax.ShapeDtypeStruct(self.shape[:-1], key_dtype(self.impl))

    @property
    def sharding(self) -> NamedSharding:
        """Sharding for the user, on a mesh without devices."""
        return replace(self.place, spec=self.place.spec[: self.aval.ndim]).abstract()


@dataclass(frozen=True, slots=True)
class Call:
    """The call that a run instruction makes.

    Attributes:
        program: key of the exported program; within one process, the name of the task.
        operands: arrays that it reads.
        results: arrays that it computes.
        donated: positions of operands whose memory the results may take.
    """

    program: str
    operands: tuple[Array, ...]
    results: tuple[Array, ...]
    donated: tuple[int, ...] = ()

    @property
    def devices(self) -> tuple[int, ...]:
        """Devices that it runs on; none if it has nothing to do."""
        values = self.results or self.operands
        return values[0].place.mesh.devices if values else ()


@dataclass(frozen=True, slots=True)
class Delivery:
    """A value that every step sends from one mesh to another.

    Attributes:
        number: number of the delivery, unique in its job.
        plan: how the value is resharded.
        dtype: dtype of its elements.
        source: mesh that sends it.
        to: mesh that receives it.
    """

    number: int
    plan: Resharding
    dtype: np.dtype
    source: StageMesh
    to: StageMesh


@dataclass(frozen=True, slots=True)
class Input:
    """An input of the step, and the values that it becomes on one mesh.

    Attributes:
        number: number of the input.
        mesh: number of the mesh.
        home: the whole input where the step expects it. If that is another mesh, one of the job's
            `spreads` brings it to this one.
        parts: its values on the mesh: itself, or its microbatches
            (`autopar.microbatch.batch_rows`).
    """

    number: int
    mesh: int
    home: Array
    parts: tuple[Array, ...]


@dataclass(frozen=True, slots=True)
class Output:
    """An output of the step.

    Attributes:
        number: number of the output.
        mesh: number of the mesh.
        value: its value.
        is_copy: whether it is a copy, because its value is also another output or an argument that
            the caller keeps.
    """

    number: int
    mesh: int
    value: Array
    is_copy: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """A step as workers execute it.

    Attributes:
        programs: serialized `jax.export.Exported` by key; empty within one process.
        meshes: devices of each mesh.
        order: instructions with their meshes, in the order of `walk`.
        calls: call of each run instruction.
        deliveries: values that meshes send to one another, by name and receiving mesh.
        inputs: inputs of the step on each mesh that reads them.
        outputs: outputs of the step that are not constants.
        zeros: for each mesh the sums that microbatches are added to.
        spreads: deliveries before the first instruction, by input and receiving mesh: inputs that
            several meshes read.
        chunks: runs of neighbouring examples that a microbatch consists of
            (`autopar.microbatch.batch_rows`).
        positions: number of the input with the positions of the examples, which every mesh makes
            for itself; None if the step has none.
        memory_budget: bytes of one device that the program of a whole step may take; None for no
            limit.
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
    positions: int | None = None
    memory_budget: float | None = None

    @property
    def num_deliveries(self) -> int:
        """Number of values that a step sends from mesh to mesh."""
        return len(self.deliveries) + len(self.spreads)

    def of(self, devices: Sequence[int]) -> "Job":
        """Return the part of the job that concerns a worker.

        Args:
            devices: numbers of the worker's devices.
        """
        own = set(devices)
        meshes = {mesh for mesh, members in enumerate(self.meshes) if not own.isdisjoint(members)}
        order = tuple((mesh, instruction) for mesh, instruction in self.order if mesh in meshes)
        runs = {instruction for _, instruction in order if isinstance(instruction, Run)}
        calls = {run: call for run, call in self.calls.items() if run in runs}
        keys = dict.fromkeys(call.program for call in calls.values())
        return replace(
            self,
            programs={key: self.programs[key] for key in keys},
            order=order,
            calls=calls,
            deliveries=_deliveries_of(own, self.deliveries),
            spreads=_deliveries_of(own, self.spreads),
            inputs=tuple(input_ for input_ in self.inputs if input_.mesh in meshes),
            outputs=tuple(output for output in self.outputs if output.mesh in meshes),
            zeros=tuple(sums if mesh in meshes else () for mesh, sums in enumerate(self.zeros)),
        )


def _deliveries_of[Key](
    devices: set[int], deliveries: Mapping[Key, Delivery]
) -> dict[Key, Delivery]:
    """Return the deliveries that some of these devices send or receive."""
    return {
        key: delivery
        for key, delivery in deliveries.items()
        if not devices.isdisjoint((*delivery.source.devices, *delivery.to.devices))
    }


def worker_groups(
    meshes: Iterable[Sequence[int]], owner: Mapping[int, int]
) -> frozenset[tuple[int, ...]]:
    """Return the groups of workers that share meshes, each a distributed JAX of its own.

    Args:
        meshes: devices of each mesh.
        owner: worker of each device.

    Raises:
        ValueError: a worker would belong to two groups.
    """
    owners = {tuple(sorted({owner[device] for device in mesh})) for mesh in meshes}
    groups = {group for group in owners if len(group) > 1}
    for worker in {worker for group in groups for worker in group}:
        joined = [group for group in groups if worker in group]
        if len(joined) > 1:
            raise ValueError(
                f"host {worker} has devices in stages that span hosts {joined[0]} and {joined[1]};"
                " a host can share only one stage with other hosts: choose submeshes of whole"
                " hosts, or within one"
            )
    return frozenset(groups)
