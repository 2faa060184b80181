"""The plan: everything that was decided about a step, as a value that is saved, printed, executed and simulated.

A plan holds no program. It says where each input, output and constrained value of a stage lives, and which traced step it was
made for (`fingerprint`).
"""

from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Literal, Self

from jax.sharding import PartitionSpec
from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError, model_validator
from rich.console import Console
from rich.table import Table

from autopar.ir.spec import LogicalMesh, Spec, local_shape, partition_spec
from autopar.layering.layers import LayerOption
from autopar.progress import ranges
from autopar.sharding.dataflow import Role
from autopar.sharding.options import ShardingOptions
from simulator.files import brief, one_line, parse_json, read_text, write_text
from simulator.memory import Role as MemoryRole
from simulator.memory import apportioned

VERSION = 3

OperatorKind = Literal["column", "row", "vocab", "expert", "sequence"]
"""What of an operator a mesh axis splits, seen from a parameter: see `AxisUse`."""

Split = Literal["batch", "none"] | OperatorKind


class PlanError(ValueError):
    """A plan that can't be read, or that belongs to another step or mesh."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class _Array(_Model):
    """An array and where it lives.

    Attributes:
        itemsize: bytes of an element.
    """

    shape: tuple[int, ...]
    dtype: str
    itemsize: PositiveInt
    spec: Spec

    def device_bytes(self, mesh: LogicalMesh) -> int:
        """Bytes of one device's shard."""
        return prod(local_shape(self.shape, self.spec, mesh)) * self.itemsize


class AxisUse(_Model):
    """What one mesh axis does with a parameter.

    Attributes:
        splits: what the axis splits where the parameter meets the activations of the forward pass: the "batch"; the kernel's output
            dim ("column") or contracted dim ("row"), the rows of an embedding ("vocab"), experts, a dim of the activations that
            is neither batch nor feature ("sequence"); or nothing ("none"). Uses may differ.
        completions: the collectives along the axis that complete the gradient.
    """

    axis: str
    splits: tuple[Split, ...]
    completions: tuple[Literal["all_reduce", "reduce_scatter"], ...]


class Value(_Array):
    """An input or output of a stage.

    Attributes:
        path: what the user calls it, e.g. `0/params/Dense_0/kernel`.
        role: "batch", "parameter", "state" (carried, but no parameter), "received" from another stage, "other", or "output".
        axes: for a parameter, what each mesh axis of more than one device does with it.
    """

    path: str
    role: Role | Literal["output"]
    axes: tuple[AxisUse, ...] = ()


class ShardingConstraint(_Array):
    """The sharding of a value inside a stage.

    Attributes:
        eqn: number of the equation in the flat jaxpr.
        side: "in" to reshard operand `index` before the equation reads it, "out" for result `index`.
        name: the equation for a reader: its place in the model and its primitive.
    """

    eqn: int
    side: Literal["in", "out"]
    index: int
    name: str


class Stage(_Model):
    """A run of layers on one submesh.

    Attributes:
        mesh_shape, axis_names: the logical mesh.
        constraints: what the step's values inside are pinned to.
        deferred: mesh axes along which devices accumulate gradients apart, and complete them once, after the last microbatch.
        layers: the layers that it consists of; none if it is the whole step.
        devices: the numbers of its devices in the cluster.
    """

    mesh_shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    constraints: tuple[ShardingConstraint, ...] = ()
    deferred: tuple[str, ...] = ()
    layers: tuple[int, ...] = ()
    devices: tuple[int, ...]

    @model_validator(mode="after")
    def _check_mesh(self) -> Self:
        """Specs name axes of the mesh, and there are as many devices as it has."""
        if len(self.mesh_shape) != len(self.axis_names) or min(self.mesh_shape, default=1) < 1:
            raise ValueError(
                f"mesh_shape {brief(self.mesh_shape)} with axis_names {brief(self.axis_names)}"
            )
        if len(set(self.devices)) != prod(self.mesh_shape) or len(self.devices) != prod(
            self.mesh_shape
        ):
            raise ValueError(
                f"devices {brief(self.devices)} for a mesh of shape {brief(self.mesh_shape)}"
            )
        for array in (*self.inputs, *self.outputs, *self.constraints):
            unknown = {axis for axes in array.spec for axis in axes}.difference(self.axis_names)
            if unknown or len(array.spec) != len(array.shape):
                raise ValueError(
                    f"spec {brief(array.spec)} of shape {brief(array.shape)} on axes {brief(self.axis_names)}"
                )
        return self

    @property
    def mesh(self) -> LogicalMesh:
        """The logical mesh of its devices."""
        return LogicalMesh(self.mesh_shape, self.axis_names)


WHOLE_STEP_SCHEDULE = "whole_step"
"""The name of the schedule that runs a step as one program: one stage, whose only phase is S."""


class PipelineSchedule(_Model):
    """The order in which the stages of a plan run.

    Attributes:
        name: "whole_step", or one of `autopar.pipeline.pipeline_schedules.schedule_names`.
        num_chunks: stages on each submesh; which ones they are the schedule says.
        layer_option: how the loss function is cut into layers, unless it says so itself.
    """

    name: str
    num_chunks: PositiveInt = 1
    layer_option: LayerOption | None = None

    @property
    def is_whole_step(self) -> bool:
        """Whether the step is one program, not cut into stages and phases."""
        return self.name == WHOLE_STEP_SCHEDULE


WHOLE_STEP = PipelineSchedule(name=WHOLE_STEP_SCHEDULE)


class TimeSplit(_Model):
    """Seconds of kernels, of completing partial results, and of bringing values where they are wanted."""

    compute: float
    communication: float
    resharding: float


class MemorySplit(_Model):
    """Bytes on one device when it is fullest; `simulator.memory.Role` says what the parts are."""

    parameters: int = 0
    optimizer: int = 0
    gradients: int = 0
    activations: int = 0
    inputs: int = 0
    outputs: int = 0
    communication: int = 0
    temporaries: int = 0

    @classmethod
    def of(cls, roles: Mapping[MemoryRole, float], total: int) -> Self:
        """The parts of `total` bytes."""
        return cls(**apportioned(roles, total, "temporaries"))

    def __str__(self) -> str:
        """The parts from one percent on, largest first."""
        total = sum(self.model_dump().values())
        parts = sorted(self.model_dump().items(), key=lambda part: -part[1])
        return ", ".join(
            f"{name} {size / total:.0%}" for name, size in parts if size >= 0.01 * total > 0
        )


class Plan(_Model):
    """How to run one step on one cluster.

    Attributes:
        step: name of the function that the plan is for.
        fingerprint: hash of that function as traced.
        method: name of the method that made it.
        options: limits that it was made within.
        cluster: name of the cluster it was made for.
        num_micro_batches: parts that the batch is cut into, gradients being accumulated over them.
        schedule: the order in which stages run; `WHOLE_STEP` for a step that is not cut into stages.
        predicted_seconds: the planner's estimate of one step; predicted_split: what that time goes to.
        predicted_bytes: its estimate of the memory that one device needs; predicted_memory: what that is for.
        gap: proven relative distance of that estimate from the best one; None where nothing was proven.
        planning_seconds: what planning took, tracing aside; where several were compared, all of them.
        warnings: what a reader should know, e.g. primitives that every device computes whole for want of a better rule.
    """

    version: Literal[3] = VERSION
    step: str
    fingerprint: str
    method: str
    options: ShardingOptions
    cluster: str
    num_micro_batches: int = 1
    stages: tuple[Stage, ...]
    schedule: PipelineSchedule = WHOLE_STEP
    predicted_seconds: float
    predicted_split: TimeSplit
    predicted_bytes: int
    predicted_memory: MemorySplit = MemorySplit()
    gap: float | None = 0.0
    planning_seconds: float
    warnings: tuple[str, ...] = ()

    def to_json(self) -> str:
        return self.model_dump_json(indent=1)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The plan that `to_json` wrote. Raises PlanError for anything else."""
        data = parse_json(text, "not a plan", PlanError)
        if not isinstance(data, dict):
            raise PlanError(f"not a plan: {brief(data)}; expected the JSON that Plan.save writes")
        if (version := data.get("version")) != VERSION:
            raise PlanError(
                f"plan of version {brief(version)}, expected {VERSION}; plan the step again"
            )
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise PlanError(
                f"not a plan: {one_line(f'{where}: {first["msg"]}')}; plan the step again"
            ) from error

    def save(self, path: str | Path) -> None:
        write_text(path, self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The plan saved at `path`. Raises PlanError when the file holds none."""
        text = read_text(path, "a plan that Plan.save wrote", PlanError)
        try:
            return cls.from_json(text)
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from error

    def check(self, fingerprint: str) -> None:
        """Raise PlanError unless the plan is for the step of that fingerprint."""
        if fingerprint != self.fingerprint:
            raise PlanError(
                f"this plan is for {self.step} with fingerprint {self.fingerprint}, but this step has {fingerprint}: its"
                " code, shapes, dtypes or number of microbatches differ; plan the step again"
            )

    def table(self) -> Table:
        """Every input, output and constrained value: shape, dtype, PartitionSpec, bytes per device."""
        mesh = ", ".join(
            " x ".join(f"{a}={n}" for a, n in stage.mesh.sizes.items()) for stage in self.stages
        )
        deferred = ", ".join(axis for stage in self.stages for axis in stage.deferred)
        once = f" (gradients completed once along {deferred})" if deferred else ""
        schedule = "" if self.schedule.is_whole_step else f"schedule {self.schedule.name}, "
        title = (
            f"{self.method} on {self.cluster}, mesh {mesh}, {schedule}{self.num_micro_batches} microbatch(es){once},"
            f" {self.predicted_seconds * 1e3:.3g} ms and {self.predicted_bytes / 1e9:.3g} GB per device predicted"
        )
        if split := str(self.predicted_memory):
            title += f": {split}"
        table = Table(
            title=title,
            title_justify="left",
            caption="\n".join(self.warnings),
            caption_justify="left",
        )
        for name in ("value", "role", "shape", "dtype", "PartitionSpec", "bytes per device"):
            table.add_column(
                name, justify="right" if name == "bytes per device" else "left", overflow="fold"
            )
        for number, stage in enumerate(self.stages):
            if not self.schedule.is_whole_step:
                place = f"layers {ranges(stage.layers)} on devices {ranges(stage.devices)}"
                table.add_row(f"stage {number}: {place}", "", "", "", "", "")
                table.add_section()
            for value in stage.inputs:
                table.add_row(*_row(value.path, value.role, value, stage.mesh))
            table.add_section()
            for constraint in stage.constraints:
                table.add_row(*_row(constraint.name, constraint.side, constraint, stage.mesh))
            table.add_section()
            for value in stage.outputs:
                table.add_row(*_row(value.path, value.role, value, stage.mesh))
            table.add_section()
        return table

    def __str__(self) -> str:
        console = Console(width=140)
        with console.capture() as captured:
            console.print(self.table())
        return captured.get()


def _row(
    name: str, role: str, value: Value | ShardingConstraint, mesh: LogicalMesh
) -> Iterable[str]:
    spec = spec_text(partition_spec(value.spec))
    return name, role, str(value.shape), value.dtype, spec, f"{value.device_bytes(mesh):,}"


def spec_text(spec: PartitionSpec) -> str:
    """`P('x', None)`, as one writes it."""
    return f"P({', '.join(map(repr, spec))})"
