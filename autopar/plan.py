"""The plan: every decision about a step, as a value that is saved, printed, executed and simulated.

A plan contains no program. It stores its stages (`plan_stages`), with the PartitionSpec of each
input, output and constrained value, and the `fingerprint` of the traced step.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Self

from pydantic import (
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)
from rich.console import Console
from rich.table import Table

from autopar.ir.step_graph import BatchStatistics, Exactness, RandomBits, Remat, WhileLoops
from autopar.layering.layer_options import LayerOption
from autopar.plan_stages import PlanPart, Stage
from autopar.progress import ranges
from autopar.sharding.options import ShardingOptions
from simulator.files import brief, one_line, parse_json, read_text, write_text
from simulator.memory import Role as MemoryRole
from simulator.memory import apportion

VERSION = 3


class PlanError(ValueError):
    """A plan cannot be read, or belongs to another step or mesh."""


WHOLE_STEP_SCHEDULE = "whole_step"
"""Name of the schedule that runs a step as one program: a single stage with the single phase S."""


class PipelineSchedule(PlanPart):
    """The order in which the stages of a plan run.

    Attributes:
        name: "whole_step", or one of `autopar.pipeline.pipeline_schedules.schedule_names`.
        num_chunks: number of stages on each submesh; the schedule maps stages to submeshes.
        layer_option: how the loss function is cut into layers; None if a decorator of it says so.
    """

    name: str
    num_chunks: PositiveInt = 1
    layer_option: LayerOption | None = None

    @property
    def is_whole_step(self) -> bool:
        """Whether the step runs as one program instead of in stages and phases."""
        return self.name == WHOLE_STEP_SCHEDULE


WHOLE_STEP = PipelineSchedule(name=WHOLE_STEP_SCHEDULE)


class TimeSplit(PlanPart):
    """Seconds of one step by cause.

    Attributes:
        compute: seconds of kernels.
        communication: seconds of the collectives that complete partial results.
        resharding: seconds of the collectives that change the sharding of values.
    """

    compute: float
    communication: float
    resharding: float


class MemorySplit(PlanPart):
    """Bytes on one device at its peak, by `simulator.memory.Role`."""

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
        """Return the split of `total` bytes into `roles`; the remainder counts as temporaries."""
        return cls(**apportion(roles, total, "temporaries"))

    def __str__(self) -> str:
        """Return the parts of at least one percent, largest first."""
        total = sum(self.model_dump().values())
        parts = sorted(self.model_dump().items(), key=lambda part: -part[1])
        return ", ".join(
            f"{name} {size / total:.0%}" for name, size in parts if size >= 0.01 * total > 0
        )


class Plan(PlanPart):
    """How to run one step on one cluster.

    A plan is frozen. It is saved as JSON (`save`, `load`) and prints as a table.

    Attributes:
        version: version of the JSON format.
        step: name of the function that the plan is for.
        fingerprint: hash of the traced function.
        method: name of the method that made the plan.
        options: limits on the shardings that the planner respected.
        cluster: name of the cluster that the plan was made for.
        num_micro_batches: number of microbatches, over which gradients are accumulated.
        stages: the stages; a single one for a step that is not cut into stages.
        schedule: the order in which the stages run; `WHOLE_STEP` for a single program.
        predicted_seconds: predicted seconds of one step.
        predicted_split: these seconds by cause.
        predicted_bytes: predicted peak memory of the fullest device, in bytes.
        predicted_memory: these bytes by role.
        memory_budget: the method's limit on the bytes of one device, to which XLA is held when the
            step is one program; None for the memory of the device.
        gap: proven bound on the relative distance of `predicted_seconds` from the optimum of the
            planner's model; None where nothing was proven.
        planning_seconds: seconds that planning took, without tracing. If several plans were
            compared, the sum over all of them.
        memory_limited: whether the memory budget excluded faster shardings of a stage. If so, a
            step that is one program may repeat equations or offload values instead.
        rng: the random bits of microbatches (`autopar.PlanningMethod`).
        batch_statistics: the statistics of the batch in microbatches (`autopar.PlanningMethod`).
        while_loops: the while loops in microbatches (`autopar.PlanningMethod`).
        remat: what the backward pass computes again (`autopar.PlanningMethod`).
        recomputed: with remat="auto", the numbers of the equations that the backward pass repeats.
            They count equations of the step without recomputation; constraints have the numbers of
            the step with it.
        offloaded: with offload, the numbers of the inputs that stay in host memory between steps.
        offloaded_results: with offload, the numbers of the equations whose results the backward
            pass fetches from host memory, counted as in `recomputed`.
        first_pass: the plan of the pass over the microbatches that runs before the step itself and
            completes what the step needs of the whole batch; None if there is no such pass. The
            predicted seconds and bytes include both.
        warnings: notes for a reader, e.g. primitives that every device computes whole because no
            rule splits them.

    Example:
        >>> plan = autopar.plan_step(train_step, (state, batch), cluster="dgx_a100_80")
        >>> plan.save("plan.json")
        >>> print(autopar.Plan.load("plan.json"))
    """

    version: Literal[3] = VERSION
    step: str
    fingerprint: str
    method: str
    options: ShardingOptions
    cluster: str
    num_micro_batches: PositiveInt = 1
    stages: tuple[Stage, ...]
    schedule: PipelineSchedule = WHOLE_STEP
    predicted_seconds: float
    predicted_split: TimeSplit
    predicted_bytes: int
    predicted_memory: MemorySplit = MemorySplit()
    memory_budget: PositiveFloat | None = None
    gap: float | None = 0.0
    planning_seconds: float
    memory_limited: bool = False
    rng: RandomBits = "exact"
    batch_statistics: BatchStatistics = "exact"
    while_loops: WhileLoops = "exact"
    remat: Remat = "keep"
    recomputed: tuple[int, ...] = ()
    offloaded: tuple[int, ...] = ()
    offloaded_results: tuple[int, ...] = ()
    first_pass: "Plan | None" = None
    warnings: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _check_stages(self) -> Self:
        """Check that a whole step is one stage, and that each layer is in one stage."""
        count = len(self.stages)
        if self.schedule.is_whole_step and count != 1:
            raise ValueError(f"{count} stages of a step that is not a pipeline; expected one")
        if self.schedule.is_whole_step and self.schedule.num_chunks != 1:
            raise ValueError(
                f"num_chunks is {brief(self.schedule.num_chunks)} for a step that is not a"
                " pipeline; expected 1"
            )
        if count % self.schedule.num_chunks:
            raise ValueError(
                f"num_chunks is {brief(self.schedule.num_chunks)} for {count} stages; expected a"
                " number that divides them"
            )
        layers = sorted(layer for stage in self.stages for layer in stage.layers)
        if not self.schedule.is_whole_step and (not count or layers != list(range(len(layers)))):
            raise ValueError(
                f"layers of stages are {brief([stage.layers for stage in self.stages])}; expected"
                " each number from 0 in one stage"
            )
        return self

    @property
    def exactness(self) -> Exactness:
        """In what microbatches differ from the whole batch."""
        return Exactness(self.rng, self.batch_statistics, self.while_loops)

    @property
    def num_passes(self) -> int:
        """The number of passes over the microbatches."""
        return 1 if self.first_pass is None else 1 + self.first_pass.num_passes

    def to_json(self) -> str:
        """Return the plan as JSON; `from_json` reads it back to an equal plan."""
        return self.model_dump_json(indent=1)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the plan that `to_json` wrote.

        Raises:
            PlanError: `text` is not the JSON of a plan of this version.
        """
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
        """Write the plan to a JSON file.

        Raises:
            FileError: the file cannot be written.
        """
        write_text(path, self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Return the plan that `save` wrote to `path`.

        Raises:
            PlanError: the file cannot be read, or contains no plan of this version.
        """
        text = read_text(path, "a plan that Plan.save wrote", PlanError)
        try:
            return cls.from_json(text)
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from error

    def check(self, fingerprint: str) -> None:
        """Raise PlanError unless the plan is for the step with this fingerprint."""
        if fingerprint != self.fingerprint:
            raise PlanError(
                f"this plan is for {self.step} with fingerprint {self.fingerprint}, but this step"
                f" has {fingerprint}: its code, shapes, dtypes or number of microbatches differ;"
                " plan the step again"
            )

    def meshes_text(self) -> str:
        """Return the text of the meshes of all stages."""
        return ", ".join(str(stage.mesh) for stage in self.stages)

    def table(self) -> Table:
        """Return a `rich` table of the inputs, constrained values and outputs.

        Values whose names differ in numbers alone, as in repeated layers, share a row if
        they also have the same role, shape, dtype and spec. Such a row has `*` for the numbers, and
        the count of values. The bytes are for one value on one device.
        """
        deferred = ", ".join(axis for stage in self.stages for axis in stage.deferred)
        passes = f"{self.num_passes} passes over " if self.first_pass else ""
        count = f"{passes}{self.num_micro_batches}"
        once = f" (gradients completed once along {deferred})" if deferred else ""
        schedule = "" if self.schedule.is_whole_step else f"schedule {self.schedule.name}, "
        title = (
            f"{self.method} on {self.cluster}, mesh {self.meshes_text()}, {schedule}{count}"
            f" microbatch(es){once}, {self.predicted_seconds * 1e3:.3g} ms and"
            f" {self.predicted_bytes / 1e9:.3g} GB per device by the planner's estimate"
        )
        if split := str(self.predicted_memory):
            title += f": {split}"
        table = Table(
            title=title,
            title_justify="left",
            caption="\n".join(self.warnings),
            caption_justify="left",
        )
        numbers = ("count", "bytes per device")
        for name in ("value", "count", "role", "shape", "dtype", "spec", "bytes per device"):
            table.add_column(name, justify="right" if name in numbers else "left", overflow="fold")
        for number, stage in enumerate(self.stages):
            if not self.schedule.is_whole_step:
                place = f"layers {ranges(stage.layers)} on devices {ranges(stage.devices)}"
                table.add_row(f"stage {number}: {place}")
                table.add_section()
            for section in stage.table_rows():
                for row in section:
                    table.add_row(*row)
                table.add_section()
        return table

    def __str__(self) -> str:
        console = Console(width=140)
        with console.capture() as captured:
            console.print(self.table())
        return captured.get()
