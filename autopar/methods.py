"""Methods: what a plan may choose, and on which devices. The value of `parallelize(method=...)`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import jax
from jax.sharding import Mesh, PartitionSpec

from autopar.checks import (
    BYTES,
    FLAG,
    NONE,
    PATH,
    OptionError,
    check,
    checked,
    instance,
    integer,
    one_of,
    satisfying,
)
from autopar.devices import DEVICES, Devices, device_mesh, requested_mesh
from autopar.ir.step_graph import StepGraph
from autopar.layering.layers import AutoLayerOption, LayerOption
from autopar.pipeline.pipeline_schedules import Pipeline, schedule_kind, schedule_names
from autopar.pipeline.stage_options import AutoStageOption, StageOption, UniformStageOption
from autopar.plan import Plan
from autopar.sharding.options import AUTO, DATA_PARALLEL, PINS, ZERO2, ZERO3, ShardingOptions
from autopar.sharding.pins import specs_by_path
from simulator.hardware.cluster import Cluster
from simulator.hardware.heterogeneous import AnyCluster, MixedCluster

CLUSTER = (
    instance(
        "a simulator.Cluster or MixedCluster, the name of one or a path", Cluster, MixedCluster
    )
    | PATH
)
_COMMON: dict[str, Any] = {
    "devices": DEVICES,
    "cluster": CLUSTER | NONE,
    "memory_budget": BYTES | NONE,
}
_SHARDING = instance("an autopar.ShardingOptions", ShardingOptions)


@dataclass(frozen=True)
class PlanningMethod:
    """What the methods that make a plan have in common.

    Attributes:
        devices: where to run: a `jax.sharding.Mesh`, a mesh shape such as (2, 4), a number or a list of devices; all by default.
        num_micro_batches: parts to cut the batch into; gradients from `autopar.grad` are accumulated over them.
        cluster: the hardware that the cost model describes (a `simulator.Cluster`, for pipelines also a `simulator.MixedCluster`, a
            name or a path); the devices' own by default.
        memory_budget: bytes of one device that the step may use; by default its memory less the reserve that its cluster
            file states.
    """

    devices: Devices = None
    num_micro_batches: int = 1
    cluster: AnyCluster | str | Path | None = None
    memory_budget: float | None = None

    @property
    def sharding(self) -> ShardingOptions:
        """What plans may choose, for any step."""
        raise NotImplementedError

    def sharding_of(self, step: StepGraph) -> ShardingOptions:
        """What plans of `step` may choose."""
        return self.sharding

    def __post_init__(self) -> None:
        check(self, num_micro_batches=integer(), **_COMMON)


@dataclass(frozen=True)
class ShardParallel(PlanningMethod):
    """Finds the cheapest sharding of every value: data, operator and ZeRO parallelism in any mixture.

    Attributes:
        options: limits on what it may choose, and specs that it must keep.
    """

    options: ShardingOptions = AUTO

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self, options=_SHARDING)

    @property
    def sharding(self) -> ShardingOptions:
        return self.options


class DataParallel(PlanningMethod):
    """Shards the batch; parameters and optimizer state are whole on every device."""

    @property
    def sharding(self) -> ShardingOptions:
        return DATA_PARALLEL


class Zero2Parallel(PlanningMethod):
    """Data parallelism with sharded gradients and optimizer state (ZeRO stage 2, arXiv 1910.02054)."""

    @property
    def sharding(self) -> ShardingOptions:
        return ZERO2


class Zero3Parallel(PlanningMethod):
    """Data parallelism with sharded gradients, optimizer state and parameters (ZeRO stage 3, or FSDP)."""

    @property
    def sharding(self) -> ShardingOptions:
        return ZERO3


@dataclass(frozen=True)
class ManualShardParallel(PlanningMethod):
    """Keeps the shardings that the user gives and leaves everything else to XLA; nothing is solved.

    Inputs without a spec are whole on every device, outputs that are the next value of an input are where that input is, and the
    rest is wherever XLA's propagation puts it. (Alpa's `ManualShardingOption`; give `devices` as a `jax.sharding.Mesh` for axis
    names of your own.)

    Attributes:
        in_specs: a tuple with an entry for each argument that is not static, as `jax.jit` takes `in_shardings`: a pytree of
            PartitionSpecs that is a prefix of the argument, None where nothing is given.
        out_specs: the same for the result.
        pins: specs by path or name, as in `ShardingOptions`, instead or in addition.
    """

    in_specs: Any = None
    out_specs: Any = None
    pins: Mapping[str, PartitionSpec] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self, pins=PINS)

    @property
    def sharding(self) -> ShardingOptions:
        return ShardingOptions(mode="manual", pins=self.pins)

    def sharding_of(self, step: StepGraph) -> ShardingOptions:
        """Raises ShardingError when the specs don't have the structure of the arguments or the result."""
        inputs = specs_by_path(self.in_specs, step.in_tree, step.in_paths, "in_specs")
        results = [f"result/{path}".removesuffix("/") for path in step.out_paths]
        outputs = specs_by_path(self.out_specs, step.out_tree, results, "out_specs")
        return replace(self.sharding, pins={**inputs, **outputs, **self.pins})


_STAGE_OPTIONS: dict[str, Callable[[], StageOption]] = {
    "uniform": UniformStageOption,
    "auto": AutoStageOption,
}
_LAYERS = NONE | instance("a ManualLayerOption or an AutoLayerOption", *get_args(LayerOption))
_STAGES = one_of(*_STAGE_OPTIONS) | instance(
    "a UniformStageOption, a ManualStageOption or an AutoStageOption",
    *get_args(StageOption.__value__),
)


@dataclass(frozen=True)
class PipeshardParallel(PlanningMethod):
    """Pipeline (inter-operator) parallelism between submeshes, with every stage sharded (intra-operator) over its own.

    What is "auto" is chosen: every combination is planned, and the one with the least predicted time is taken
    (`autopar.get_last_search_result` tells of all). That takes as many times as long.

    Attributes:
        num_micro_batches: a number, or "auto".
        default_auto_sharding_option: limits on the shardings of stages.
        pipeline_schedule: one of `autopar.pipeline.pipeline_schedules.schedule_names()`, or "auto".
        layer_option: how the loss function is cut into layers, if no decorator says so; its `remat_layer` may be "auto".
        stage_option: which layers form a stage, on which devices; "uniform" and "auto" are a `UniformStageOption()` and an
            `AutoStageOption()`. stage_mode: the same, in the words of Alpa's tutorial.
        num_chunks: stages on each submesh, for the interleaved schedule; or "auto". By default as many as the schedule runs: two of
            "zero_bubble_v" and "dualpipe_v", one of the others. With an `AutoStageOption`, several are even stages.
    """

    num_micro_batches: int | Literal["auto"] = 1  # pyright: ignore[reportIncompatibleVariableOverride]  # only here it may be left open
    default_auto_sharding_option: ShardingOptions = AUTO
    pipeline_schedule: str = "1f1b"
    layer_option: LayerOption | None = None
    stage_option: StageOption | Literal["uniform", "auto"] = "uniform"
    stage_mode: Literal["uniform", "auto"] | None = None
    num_chunks: int | Literal["auto"] | None = None

    def __post_init__(self) -> None:
        count = integer() | one_of("auto")
        check(
            self,
            num_micro_batches=count,
            default_auto_sharding_option=_SHARDING,
            pipeline_schedule=one_of(*schedule_names(), "auto"),
            layer_option=_LAYERS,
            stage_option=_STAGES,
            stage_mode=one_of(*_STAGE_OPTIONS) | NONE,
            num_chunks=count | NONE,
            **_COMMON,
        )
        if isinstance(self.num_chunks, int) and self.pipeline_schedule != "auto":
            schedule_kind(self.pipeline_schedule, Pipeline(1, 1, self.num_chunks))

    @property
    def chunks(self) -> int | Literal["auto"]:
        """The stages on each submesh, spelled out."""
        if self.num_chunks is not None:
            return self.num_chunks
        return (
            1
            if self.pipeline_schedule == "auto"
            else schedule_kind(self.pipeline_schedule).num_chunks or 1
        )

    @property
    def sharding(self) -> ShardingOptions:
        return self.default_auto_sharding_option

    @property
    def stages(self) -> StageOption:
        """The stage option, spelled out."""
        given = self.stage_mode or self.stage_option
        return _STAGE_OPTIONS[given]() if isinstance(given, str) else given


def get_3d_parallel_method(
    num_micro_batches: int,
    data_parallel: int = -1,
    operator_parallel: int = 1,
    pipeline_parallel: int = 1,
    devices: Devices = None,
    allow_degenerate_into_shard_parallel: bool = True,
    **options: Any,
) -> PlanningMethod:
    """Data, operator and pipeline parallelism in given degrees, as Megatron-LM users think of it.

    Args:
        data_parallel: ways of data parallelism within a stage; -1: what the other two leave.
        devices: a number or a list of devices; all by default.
        allow_degenerate_into_shard_parallel: without pipeline parallelism, shard the step as a whole.
        options: for `PipeshardParallel`; layers come from decorators, or are found, one for each stage.

    Raises:
        ValueError: the degrees don't multiply to the number of devices.
    """
    degrees = {"operator_parallel": operator_parallel, "pipeline_parallel": pipeline_parallel}
    operator_parallel, pipeline_parallel = (
        checked(name, each, integer()) for name, each in degrees.items()
    )
    data_parallel = checked("data_parallel", data_parallel, integer(-1))
    degenerates = checked(
        "allow_degenerate_into_shard_parallel", allow_degenerate_into_shard_parallel, FLAG
    )
    devices = checked("devices", devices, DEVICES)
    count = device_count(devices)
    if data_parallel == -1:
        data_parallel = max(1, count // (operator_parallel * pipeline_parallel))
    if data_parallel * operator_parallel * pipeline_parallel != count:
        raise OptionError(
            f"data_parallel={data_parallel} x operator_parallel={operator_parallel} x pipeline_parallel={pipeline_parallel} is not"
            f" the number of devices, {count}"
        )
    shape = (data_parallel, operator_parallel)
    sharding = ShardingOptions(batch_axis="x") if data_parallel > 1 else AUTO
    options = {
        "layer_option": AutoLayerOption(pipeline_parallel),
        "stage_option": UniformStageOption(
            pipeline_parallel, (1, data_parallel * operator_parallel), shape
        ),
        **options,
    }
    method = PipeshardParallel(
        devices, num_micro_batches, default_auto_sharding_option=sharding, **options
    )
    if pipeline_parallel > 1 or not degenerates:
        return method
    mesh = reshaped(devices, shape)
    return ShardParallel(mesh, num_micro_batches, method.cluster, method.memory_budget, sharding)


def reshaped(devices: Devices, shape: tuple[int, ...]) -> Devices:
    """The same devices as a mesh of another shape, with the default axis names."""
    match devices:
        case Mesh():
            return device_mesh(list(devices.devices.flat), shape)
        case [jax.Device(), *_]:
            return device_mesh(devices, shape)
        case _:
            return shape


def device_count(devices: Devices) -> int:
    """How many devices are meant."""
    return len(jax.devices()) if devices is None else requested_mesh(devices, 0).num_devices


PLAN = instance("an autopar.Plan, such as plan_step returns", Plan)
_PARALLELIZED = satisfying(
    "what autopar.parallelize returns", lambda step: hasattr(step, "get_last_executable")
)


@dataclass(frozen=True)
class PlanMethod:
    """Runs a plan that is there already, without solving.

    Attributes:
        devices: where to run; must be as many as the plan's mesh has, by default the first ones that are there. On other hosts it is
            always the first ones, and only their number may be given.
    """

    plan: Plan
    devices: Devices = None

    def __post_init__(self) -> None:
        check(self, plan=PLAN, devices=DEVICES)


@dataclass(frozen=True)
class FollowParallel:
    """Runs a step where another one has put what both read: an evaluation of the parameters of a training step.

    Inputs are found by name, shape and dtype. After a pipeline the step runs in the same stages, forward only; results with a
    row per example are put together from the microbatches.

    Attributes:
        src_func: the parallelized step to follow; it must have been compiled (called once, say).
        num_micro_batches: parts to cut the batch into, in a pipeline.
    """

    src_func: Any
    num_micro_batches: int | None = None

    def __post_init__(self) -> None:
        check(self, src_func=_PARALLELIZED, num_micro_batches=integer() | NONE)


@dataclass(frozen=True)
class CreateStateParallel:
    """Makes a state right where a training step wants it, so that it is never whole on one device.

    Attributes:
        train_step: the parallelized step; the state is its first argument.
        other_args: its other arguments, a sequence; ShapeDtypeStructs will do. A single one may be given as it is.
    """

    train_step: Any
    other_args: Any

    def __post_init__(self) -> None:
        check(self, train_step=_PARALLELIZED)


type Method = PlanningMethod | PlanMethod | FollowParallel | CreateStateParallel
