"""The stages of a plan: their meshes, and the placement of each array that the plan decides."""

import re
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Literal, Self, override

from jax.sharding import PartitionSpec
from pydantic import BaseModel, ConfigDict, NonNegativeInt, model_validator

from autopar.ir.spec import LogicalMesh, Spec, local_shape, partition_spec
from autopar.sharding.dataflow import InputRole
from simulator.files import brief

MAX_DEVICES = 2**17
"""Number of devices that a plan may address; a damaged number would make clusters of its size."""

OperatorKind = Literal["column", "row", "vocab", "expert", "sequence"]
"""The part of an operator that a mesh axis splits, seen from a parameter: see `AxisUse`."""

Split = Literal["batch", "none"] | OperatorKind


class PlanPart(BaseModel):
    """Base class of what a plan is made of: frozen, and saved as JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class _Array(PlanPart):
    """An array and its placement.

    Attributes:
        shape: its global shape.
        dtype: its dtype by name, e.g. "float32".
        itemsize: bytes of an element; 0 for float0, the dtype of gradients of integers.
        spec: for each dim the mesh axes that shard it.
    """

    shape: tuple[NonNegativeInt, ...]
    dtype: str
    itemsize: NonNegativeInt
    spec: Spec

    def device_bytes(self, mesh: LogicalMesh) -> int:
        """Return the bytes of one device's shard."""
        return prod(local_shape(self.shape, self.spec, mesh)) * self.itemsize


class AxisUse(PlanPart):
    """How one mesh axis parallelizes the computation with a parameter.

    Attributes:
        axis: name of the mesh axis.
        splits: what the axis splits in the equations of the forward pass that combine the parameter
            with activations: the batch ("batch"), the kernel's output dim ("column") or contracted
            dim ("row"), the rows of an embedding ("vocab"), experts ("expert"), a dim of the
            activations that is neither batch nor feature ("sequence"), or nothing ("none"). There
            are several entries if the equations differ.
        completions: the collectives along the axis that complete the gradient.
    """

    axis: str
    splits: tuple[Split, ...]
    completions: tuple[Literal["all_reduce", "reduce_scatter"], ...]


class Value(_Array):
    """An input or output of a stage.

    Attributes:
        path: its place in the pytree of arguments or results, e.g. `0/params/Dense_0/kernel`.
        role: "batch", "parameter", "state" (carried to the next step, but no parameter), "received"
            from another stage, "other", or "output".
        axes: for a parameter, the use of each mesh axis of more than one device.
        on_host: whether it is in the memory of the hosts.
    """

    path: str
    role: InputRole | Literal["output"]
    axes: tuple[AxisUse, ...] = ()
    on_host: bool = False

    @override
    def device_bytes(self, mesh: LogicalMesh) -> int:
        return 0 if self.on_host else super().device_bytes(mesh)


class ShardingConstraint(_Array):
    """The sharding of a value inside a stage, as `jax.lax.with_sharding_constraint` imposes it.

    Attributes:
        eqn: number of the equation in the flat jaxpr.
        side: "in" to reshard an operand before the equation reads it, "out" to shard a result.
        index: number of that operand or result.
        name: the equation's scope in the model and its primitive, for a reader.
    """

    eqn: int
    side: Literal["in", "out"]
    index: int
    name: str


class OffloadedValue(_Array):
    """A forward value that is in host memory until the backward pass reads it.

    Attributes:
        name: the scope in the model and the primitive of the equation that computes it.
    """

    name: str


class Stage(PlanPart):
    """A run of layers on one submesh, or a whole step on one mesh.

    Attributes:
        mesh_shape: the shape of the logical mesh.
        axis_names: the names of its axes.
        inputs: the inputs of the stage with their placements.
        outputs: its outputs with theirs.
        constraints: the shardings of values inside the stage.
        offloaded: the values of its forward pass that are in host memory in between.
        deferred: mesh axes along which each device accumulates its partial gradients locally; one
            collective after the last microbatch completes them.
        layers: numbers of its layers; empty if the stage is the whole step.
        devices: numbers of its devices in the cluster, in the order of the mesh, row by row.
    """

    mesh_shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    constraints: tuple[ShardingConstraint, ...] = ()
    offloaded: tuple[OffloadedValue, ...] = ()
    deferred: tuple[str, ...] = ()
    layers: tuple[int, ...] = ()
    devices: tuple[int, ...]

    @model_validator(mode="after")
    def _check_mesh(self) -> Self:
        """Check that specs name axes of the mesh, each once, and that it has as many devices."""
        if len(self.mesh_shape) != len(self.axis_names) or min(self.mesh_shape, default=1) < 1:
            raise ValueError(
                f"mesh_shape {brief(self.mesh_shape)} with axis_names {brief(self.axis_names)}"
            )
        if not all(0 <= device < MAX_DEVICES for device in self.devices):
            raise ValueError(
                f"devices {brief(self.devices)}; expected numbers from 0 to {MAX_DEVICES - 1:,}"
            )
        if len(set(self.devices)) != prod(self.mesh_shape) or len(self.devices) != prod(
            self.mesh_shape
        ):
            raise ValueError(
                f"devices {brief(self.devices)} for a mesh of shape {brief(self.mesh_shape)};"
                " expected as many different devices as the mesh has"
            )
        for array in (*self.inputs, *self.outputs, *self.constraints, *self.offloaded):
            axes = [axis for axes in array.spec for axis in axes]
            is_valid = len(axes) == len(set(axes)) and set(axes) <= set(self.axis_names)
            if not is_valid or len(array.spec) != len(array.shape):
                raise ValueError(
                    f"spec {brief(array.spec)} of shape {brief(array.shape)}"
                    f" on axes {brief(self.axis_names)}; expected some of these axes for each dim,"
                    " each at most once"
                )
        return self

    @property
    def mesh(self) -> LogicalMesh:
        """The logical mesh."""
        return LogicalMesh(self.mesh_shape, self.axis_names)

    def table_rows(self) -> Iterator[list[tuple[str, ...]]]:
        """Yield the rows of `Plan.table`: inputs, constraints, offloaded values and outputs."""
        sections = (
            [(value.path, value.role, value) for value in self.inputs],
            [(pinned.name, pinned.side, pinned) for pinned in self.constraints],
            [(value.name, "offloaded", value) for value in self.offloaded],
            [(value.path, value.role, value) for value in self.outputs],
        )
        for section in sections:
            yield list(_rows(section, self.mesh))


def _rows(
    values: Iterable[tuple[str, str, Value | ShardingConstraint | OffloadedValue]],
    mesh: LogicalMesh,
) -> Iterator[tuple[str, ...]]:
    """Yield the rows of a table.

    Args:
        values: each with its name and its role or side.
        mesh: their mesh.
    """
    names_by_row: dict[tuple[str, ...], list[str]] = {}
    for name, role, value in values:
        spec = spec_text(partition_spec(value.spec))
        on_host = isinstance(value, OffloadedValue) or (isinstance(value, Value) and value.on_host)
        size = "on the host" if on_host else f"{value.device_bytes(mesh):,}"
        columns = role, str(value.shape), value.dtype, spec, size
        names_by_row.setdefault((_NUMBER.sub("*", name), *columns), []).append(name)
    for (_, *columns), names in names_by_row.items():
        count = str(len(names)) if len(names) > 1 else ""
        yield _common_name(names), count, *columns


_NUMBER = re.compile(r"(\d+)")


def _common_name(names: Sequence[str]) -> str:
    """Return what names have in common, with `*` for the numbers in which they differ."""
    parts = zip(*map(_NUMBER.split, names), strict=True)
    return "".join(part[0] if len(set(part)) == 1 else "*" for part in parts)


def spec_text(spec: PartitionSpec) -> str:
    """Return a PartitionSpec as source text, e.g. `P('x', None)`."""
    return f"P({', '.join(map(repr, spec))})"
