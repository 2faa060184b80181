"""Methods: what a plan may choose, and on which devices. The value of `parallelize(method=...)`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, Literal

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from autopar.devices import Devices
from autopar.layers import AutoLayerOption, LayerOption
from autopar.pipeline.schedules import schedule_kind
from autopar.pipeline.stage_options import AutoStageOption, StageOption, UniformStageOption
from autopar.plan import Plan
from autopar.sharding.options import AUTO, DATA_PARALLEL, ZERO2, ZERO3, ShardingOptions
from autopar.sharding.pins import specs_by_path
from autopar.trace import StepGraph
from simulator.mixed import AnyCluster


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
        if self.num_micro_batches < 1:
            raise ValueError(f"num_micro_batches is {self.num_micro_batches}, expected at least 1")


@dataclass(frozen=True)
class ShardParallel(PlanningMethod):
    """Finds the cheapest sharding of every value: data, operator and ZeRO parallelism in any mixture.

    Attributes:
        options: limits on what it may choose, and specs that it must keep.
    """

    options: ShardingOptions = AUTO

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

    @property
    def sharding(self) -> ShardingOptions:
        return ShardingOptions(mode="manual", pins=self.pins)

    def sharding_of(self, step: StepGraph) -> ShardingOptions:
        """Raises ShardingError when the specs don't have the structure of the arguments or the result."""
        inputs = specs_by_path(self.in_specs, step.in_tree, step.in_paths, "in_specs")
        results = [f"result/{path}".removesuffix("/") for path in step.out_paths]
        outputs = specs_by_path(self.out_specs, step.out_tree, results, "out_specs")
        return replace(self.sharding, pins={**inputs, **outputs, **self.pins})


@dataclass(frozen=True)
class PipeshardParallel(PlanningMethod):
    """Pipeline (inter-operator) parallelism between submeshes, with every stage sharded (intra-operator) over its own.

    What is "auto" is chosen: every combination is planned, and the one with the least predicted time is taken
    (`autopar.get_last_search_result` tells of all). That takes as many times as long.

    Attributes:
        num_micro_batches: a number, or "auto".
        default_auto_sharding_option: limits on the shardings of stages.
        pipeline_schedule: one of `autopar.pipeline.schedules.schedule_names()`, or "auto".
        layer_option: how the loss function is cut into layers, if no decorator says so; its `remat_layer` may be "auto".
        stage_option: which layers form a stage, on which devices; "uniform" and "auto" are a `UniformStageOption()` and an
            `AutoStageOption()`. stage_mode: the same, in the words of Alpa's tutorial.
        num_chunks: stages on each submesh, for the interleaved schedule; or "auto". With an `AutoStageOption`, several are even stages.
    """

    num_micro_batches: int | Literal["auto"] = 1  # pyright: ignore[reportIncompatibleVariableOverride]  # only here it may be left open
    default_auto_sharding_option: ShardingOptions = AUTO
    pipeline_schedule: str = "1f1b"
    layer_option: LayerOption | None = None
    stage_option: StageOption | Literal["uniform", "auto"] = "uniform"
    stage_mode: Literal["uniform", "auto"] | None = None
    num_chunks: int | Literal["auto"] = 1

    def __post_init__(self) -> None:
        for name, number in (("num_micro_batches", self.num_micro_batches), ("num_chunks", self.num_chunks)):
            if number != "auto" and not (isinstance(number, int) and number >= 1):
                raise ValueError(f"{name} is {number!r}, expected at least 1, or 'auto'")
        if self.pipeline_schedule != "auto":
            schedule_kind(self.pipeline_schedule)
        if self.layer_option is not None and not isinstance(self.layer_option, LayerOption):
            raise TypeError(
                f"layer_option is {self.layer_option!r}, expected a ManualLayerOption or an AutoLayerOption"
            )
        _ = self.stages

    @property
    def sharding(self) -> ShardingOptions:
        return self.default_auto_sharding_option

    @property
    def stages(self) -> StageOption:
        """The stage option, spelled out."""
        given = self.stage_mode or self.stage_option
        if isinstance(given, str):
            if given not in _STAGE_OPTIONS:
                raise ValueError(
                    f"stage option {given!r}, expected one of {', '.join(_STAGE_OPTIONS)}, or a stage option"
                )
            return _STAGE_OPTIONS[given]()
        return given


_STAGE_OPTIONS: dict[str, Callable[[], StageOption]] = {"uniform": UniformStageOption, "auto": AutoStageOption}


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
    count = device_count(devices)
    if data_parallel == -1:
        data_parallel = max(1, count // (operator_parallel * pipeline_parallel))
    if data_parallel * operator_parallel * pipeline_parallel != count:
        raise ValueError(
            f"data_parallel={data_parallel} x operator_parallel={operator_parallel} x pipeline_parallel={pipeline_parallel} is not"
            f" the number of devices, {count}"
        )
    shape = (data_parallel, operator_parallel)
    sharding = ShardingOptions(batch_axis="x") if data_parallel > 1 else AUTO
    if pipeline_parallel == 1 and allow_degenerate_into_shard_parallel:
        return ShardParallel(shape, num_micro_batches, options=sharding)
    stages = UniformStageOption(pipeline_parallel, (1, data_parallel * operator_parallel), shape)
    options = {"layer_option": AutoLayerOption(pipeline_parallel), **options}
    return PipeshardParallel(
        devices, num_micro_batches, default_auto_sharding_option=sharding, stage_option=stages, **options
    )


def device_count(devices: Devices) -> int:
    """How many devices are meant."""
    if devices is None:
        return len(jax.devices())
    if isinstance(devices, Mesh | AbstractMesh):
        return devices.size
    if isinstance(devices, int):
        return devices
    given = list(devices)
    return prod(given) if given and all(isinstance(each, int) for each in given) else len(given)


@dataclass(frozen=True)
class PlanMethod:
    """Runs a plan that is there already, without solving.

    Attributes:
        devices: where to run; must be as many as the plan's mesh has, by default the first ones that are there. On other hosts it is
            always the first ones, and only their number may be given.
    """

    plan: Plan
    devices: Devices = None


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


@dataclass(frozen=True)
class CreateStateParallel:
    """Makes a state right where a training step wants it, so that it is never whole on one device.

    Attributes:
        train_step: the parallelized step; the state is its first argument.
        other_args: its other arguments, a sequence; ShapeDtypeStructs will do. A single one may be given as it is.
    """

    train_step: Any
    other_args: Any


type Method = PlanningMethod | PlanMethod | FollowParallel | CreateStateParallel
