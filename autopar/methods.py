"""Methods that make a plan: the values of `parallelize(method=...)`, `plan_step` and `predict`.

A `PlanningMethod` says what a plan may choose and on which devices it runs. `derived_methods` has
those that run an existing plan or derive one from another step.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, get_args, override

from jax.sharding import PartitionSpec

from autopar.checks import (
    BYTES,
    NONE,
    PATH,
    OptionError,
    check,
    instance,
    integer,
    one_of,
    satisfying,
)
from autopar.devices import DEVICES, Devices
from autopar.ir.host_memory import Offload
from autopar.ir.step_graph import (
    BatchStatistics,
    Exactness,
    RandomBits,
    Remat,
    StepGraph,
    WhileLoops,
)
from autopar.layering.layer_options import AutoLayerOption, LayerOption, ManualLayerOption
from autopar.pipeline.pipeline_schedules import schedule_kind, schedule_names, splits_backward
from autopar.pipeline.schedule_kinds import Pipeline
from autopar.pipeline.stage_options import AutoStageOption, StageOption, UniformStageOption
from autopar.sharding.options import AUTO, DATA_PARALLEL, PINS, ZERO2, ZERO3, ShardingOptions
from autopar.sharding.pins import specs_by_path
from simulator.hardware.cluster import Cluster
from simulator.hardware.heterogeneous import AnyCluster, HeterogeneousCluster

CLUSTER = (
    instance(
        "a simulator.Cluster or HeterogeneousCluster, the name of one or a path",
        Cluster,
        HeterogeneousCluster,
    )
    | PATH
)
COMMON_CHECKS: dict[str, Any] = {
    "devices": DEVICES,
    "cluster": CLUSTER | NONE,
    "memory_budget": BYTES | NONE,
    "rng": one_of(*get_args(RandomBits.__value__)),
    "batch_statistics": one_of(*get_args(BatchStatistics.__value__)),
    "while_loops": one_of(*get_args(WhileLoops.__value__)),
    "remat": one_of(*get_args(Remat.__value__)),
    "offload": one_of(*get_args(Offload.__value__)),
}
_SHARDING = instance("an autopar.ShardingOptions", ShardingOptions)


class MethodPlanner[Planned](Protocol):
    """Plans a step; `PlanningMethod.plan_with` selects how."""

    def as_program(self, method: "PlanningMethod") -> Planned:
        """Plan the step as one program on one mesh."""
        ...

    def as_pipeline(self, method: "PipeshardParallel") -> Planned:
        """Plan the step in stages, each on a mesh of its own."""
        ...


@dataclass(frozen=True)
class PlanningMethod:
    """Base class of the methods that make a plan.

    Attributes:
        devices: the devices to run on: a `jax.sharding.Mesh`, a mesh shape such as (2, 4), a number
            or a list of devices; all by default.
        num_micro_batches: number of slices of the batch, over which gradients are accumulated.
        cluster: the hardware that the cost model describes: a `simulator.Cluster`, the name of a
            shipped one or the path of a cluster file, and for pipelines also a
            `simulator.HeterogeneousCluster`. By default the shipped one with devices of this kind.
        memory_budget: bytes of one device's memory that the step may use; by default its memory
            less the reserve in its cluster file. On GPUs, XLA overlaps fewer collectives of a
            step that is one program if the step would need more than the budget otherwise.
        rng: the random bits of microbatches. With "exact" the examples of a microbatch have the
            bits that they have in the whole batch. That takes keys of JAX's default generator,
            threefry; a step that draws with another one is refused. With "fold_in" such a
            generator draws other bits, from a key for each microbatch.
        batch_statistics: statistics of the batch, as batch normalization takes them. With "exact" a
            step is refused if microbatches can't use the statistics of the whole batch. With
            "microbatch" each microbatch uses its own in such places, and the plan's warnings name
            the lines. The loss, its gradients and running averages are then means over the
            microbatches.
        while_loops: the loops of Equinox that run until the last example is done, such as the
            adaptive steps of diffrax. With "exact" a step is refused if further iterations may
            change finished examples. With "microbatch" each microbatch runs them until its own last
            example is done, and the plan's warnings name the lines. The results equal those of the
            batch if further iterations do not change a finished example; in diffrax they do not.
        remat: what the backward pass computes again instead of keeping it in memory. "keep" does
            what `jax.checkpoint` says, "none" recomputes nothing. With "auto" the planner chooses,
            value by value, so that the step fits into memory in least time. In loops,
            `jax.checkpoint` stays as it is. Pipelines allow "keep" only.
        offload: arrays that are in the memory of the hosts while the devices don't need them.
            Copies pass the link that the cluster file describes. With "optimizer" it is all state
            that only the update reads, such as the moments of Adam; each array is moved to the
            devices for the update and back. With "activations" it is values of the forward pass
            until the backward pass reads them, as many as let the step fit into memory in least
            time; with remat="auto" the planner chooses, value by value, between keeping,
            recomputing and offloading. With "auto" it is as little as lets the step fit: state,
            activations or both, whatever is fastest. Pipelines offload all state or none, and all
            activations that one layer alone reads or none. With "none" everything stays on the
            devices.
    """

    devices: Devices = None
    num_micro_batches: int = 1
    cluster: AnyCluster | str | Path | None = None
    memory_budget: float | None = None
    rng: RandomBits = field(default="exact", kw_only=True)
    batch_statistics: BatchStatistics = field(default="exact", kw_only=True)
    while_loops: WhileLoops = field(default="exact", kw_only=True)
    remat: Remat = field(default="keep", kw_only=True)
    offload: Offload = field(default="none", kw_only=True)

    runs_step: ClassVar[bool] = True
    """Whether the function runs by a plan, which another function can follow."""
    has_stage_meshes: ClassVar[bool] = False
    """Whether stages have meshes of their own, so that only the number of `devices` counts."""

    @property
    def random_bits(self) -> RandomBits:
        """The random bits of microbatches."""
        return self.rng

    @property
    def exactness(self) -> Exactness:
        """How microbatches may differ from the whole batch."""
        return Exactness(self.rng, self.batch_statistics, self.while_loops)

    @property
    def sharding(self) -> ShardingOptions:
        """The limits on the shardings that a plan may choose, for any step."""
        raise NotImplementedError

    def sharding_of(self, step: StepGraph) -> ShardingOptions:
        """Return the limits on the shardings that a plan of `step` may choose."""
        return self.sharding

    def plan_with[Planned](self, planner: MethodPlanner[Planned]) -> Planned:
        """Plan a step with this method."""
        return planner.as_program(self)

    @property
    def recomputing(self) -> "tuple[str, PlanningMethod] | None":
        """The change to recomputation in words, and the method after it.

        It is None if the backward pass recomputes already.
        """
        if self.remat == "auto":
            return None
        return 'remat="auto"', replace(self, remat="auto")

    def __post_init__(self) -> None:
        check(self, num_micro_batches=integer(), **COMMON_CHECKS)


@dataclass(frozen=True)
class ShardParallel(PlanningMethod):
    """Finds the fastest sharding of every value that fits in memory (Alpa, OSDI'22, section 4).

    Data parallelism, operator parallelism and the sharded storage of ZeRO may be mixed freely.

    Attributes:
        options: limits on what the planner may choose, and specs that it must keep.

    Example:
        >>> method = autopar.ShardParallel(devices=(2, 4), num_micro_batches=4)
    """

    options: ShardingOptions = AUTO

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self, options=_SHARDING)

    @property
    def sharding(self) -> ShardingOptions:
        """The limits given as `options`."""
        return self.options


class DataParallel(PlanningMethod):
    """Shards the batch; parameters and optimizer state are replicated on every device."""

    @property
    def sharding(self) -> ShardingOptions:
        """The batch over all devices, parameters and optimizer state replicated."""
        return DATA_PARALLEL


class Zero2Parallel(PlanningMethod):
    """Data parallelism with sharded gradients and optimizer state (ZeRO-2, arXiv 1910.02054)."""

    @property
    def sharding(self) -> ShardingOptions:
        """The batch, gradients and optimizer state over all devices, parameters replicated."""
        return ZERO2


class Zero3Parallel(PlanningMethod):
    """Data parallelism with sharded gradients, optimizer state and parameters (ZeRO-3, or FSDP)."""

    @property
    def sharding(self) -> ShardingOptions:
        """The batch, gradients, optimizer state and parameters over all devices."""
        return ZERO3


@dataclass(frozen=True)
class ManualShardParallel(PlanningMethod):
    """Keeps the shardings that the user gives and leaves all others to XLA; nothing is solved.

    Inputs without a spec are replicated. An output that is the next value of an input, such as the
    updated parameters, has the sharding of that input. XLA's propagation decides everything else.
    This is Alpa's `ManualShardingOption`. Give `devices` as a `jax.sharding.Mesh` to name the mesh
    axes yourself; otherwise they are "x", "y", "z", "w".

    Attributes:
        in_specs: a tuple with an entry for each argument that is not static, as `jax.jit` takes
            `in_shardings`: a pytree of PartitionSpecs that is a prefix of the argument, with None
            for the leaves without a spec.
        out_specs: the same for the result.
        pins: specs by path or name, as in `ShardingOptions`, instead or in addition.

    Example:
        >>> P = jax.sharding.PartitionSpec
        >>> method = autopar.ManualShardParallel((2, 4), pins={"1/*": P("x")})
    """

    in_specs: Any = None
    out_specs: Any = None
    pins: Mapping[str, PartitionSpec] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self, pins=PINS)

    @property
    def sharding(self) -> ShardingOptions:
        """The pins alone: the paths of `in_specs` and `out_specs` depend on the step."""
        return ShardingOptions(mode="manual", pins=self.pins)

    def sharding_of(self, step: StepGraph) -> ShardingOptions:
        """Return all specs as pins by path.

        Raises:
            ShardingError: the specs do not have the structure of the arguments or of the result.
        """
        paths = step.in_paths[: step.in_tree.num_leaves]
        inputs = specs_by_path(self.in_specs, step.in_tree, paths, "in_specs")
        results = [f"result/{path}".removesuffix("/") for path in step.out_paths]
        outputs = specs_by_path(self.out_specs, step.out_tree, results, "out_specs")
        return replace(self.sharding, pins={**inputs, **outputs, **self.pins})


_STAGE_OPTIONS: dict[str, Callable[[], StageOption]] = {
    "uniform": UniformStageOption,
    "auto": AutoStageOption,
}
_LAYERS = (
    one_of("auto")
    | NONE
    | instance("a ManualLayerOption or an AutoLayerOption", *get_args(LayerOption))
)
_KEEP = satisfying(
    '"keep": a pipeline recomputes whole layers (AutoLayerOption(remat_layer=True)), or what'
    " jax.checkpoint says",
    lambda remat: remat == "keep",
)
_STAGES = one_of(*_STAGE_OPTIONS) | instance(
    "a UniformStageOption, a ManualStageOption or an AutoStageOption",
    *get_args(StageOption.__value__),
)


@dataclass(frozen=True)
class PipeshardParallel(PlanningMethod):
    """Pipeline parallelism between submeshes; each stage is sharded over its own submesh.

    In Alpa's terms: inter-operator parallelism between the stages, intra-operator parallelism
    within each. Options that are "auto" are searched, and the combination with the least predicted
    time is chosen. Combinations whose lower bound is above the best plan are not planned;
    `autopar.get_last_search_result` returns all of them, with their plans' times or bounds.

    Attributes:
        devices: as in the other methods; only their number and order matter, not the mesh shape.
        num_micro_batches: the number of microbatches, or "auto".
        default_auto_sharding_option: limits on the shardings of stages.
        pipeline_schedule: the name of a schedule, such as "gpipe" or "1f1b" (see
            `autopar.pipeline.pipeline_schedules.schedule_names`), or "auto".
        layer_option: how to cut the loss function into layers if no decorator does so; its
            `remat_layer` may be "auto". "auto" stands for the layers of the decorators if there are
            some, else for an `AutoLayerOption` of 8, 4 or 2 layers, the most that the loss has. If
            each layer is a stage, there are no more layers than stages that the devices have room
            for.
        stage_option: which layers form a stage, and on which devices. "uniform" stands for
            `UniformStageOption()` and "auto" for `AutoStageOption()`.
        stage_mode: "uniform" or "auto", the name of the same option in Alpa's tutorial. It takes
            precedence over `stage_option`.
        num_chunks: number of stages on each submesh, for the interleaved schedules, or "auto". By
            default the number that the schedule needs: two for "zero_bubble_v" and "dualpipe_v",
            one for the others. With an `AutoStageOption`, stages of a number above one are uniform.

    Example:
        >>> method = autopar.PipeshardParallel(
        ...     num_micro_batches=16, layer_option=autopar.AutoLayerOption(8), stage_option="auto"
        ... )
    """

    # "auto" is allowed for pipelines only
    num_micro_batches: int | Literal["auto"] = 1  # pyright: ignore[reportIncompatibleVariableOverride]
    default_auto_sharding_option: ShardingOptions = AUTO
    pipeline_schedule: str = "1f1b"
    layer_option: LayerOption | Literal["auto"] | None = None
    stage_option: StageOption | Literal["uniform", "auto"] = "uniform"
    stage_mode: Literal["uniform", "auto"] | None = None
    num_chunks: int | Literal["auto"] | None = None

    has_stage_meshes: ClassVar[bool] = True

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
            **{**COMMON_CHECKS, "remat": _KEEP},
        )
        if isinstance(self.num_chunks, int) and self.pipeline_schedule != "auto":
            schedule_kind(self.pipeline_schedule, Pipeline(1, 1, self.num_chunks))
        if self.offload == "activations" and not self.may_offload_activations:
            raise OptionError(
                f'offload is "activations", but pipeline_schedule {self.pipeline_schedule!r} splits'
                ' the backward pass in two, which both read them; use "1f1b", "gpipe" or "auto"'
            )

    @property
    def may_offload_activations(self) -> bool:
        """Whether some schedule keeps the backward pass of a microbatch in one piece."""
        return self.pipeline_schedule == "auto" or not splits_backward(self.pipeline_schedule)

    @property
    def chunks(self) -> int | Literal["auto"]:
        """The number of stages on each submesh: `num_chunks`, or what the schedule needs."""
        if self.num_chunks is not None:
            return self.num_chunks
        if self.pipeline_schedule == "auto":
            return 1
        return schedule_kind(self.pipeline_schedule).num_chunks or 1

    @property
    def sharding(self) -> ShardingOptions:
        """The limits given as `default_auto_sharding_option`."""
        return self.default_auto_sharding_option

    @property
    def stages(self) -> StageOption:
        """The stage option, with "uniform" and "auto" replaced by the options they stand for."""
        option = self.stage_mode or self.stage_option
        return _STAGE_OPTIONS[option]() if isinstance(option, str) else option

    @override
    def plan_with[Planned](self, planner: MethodPlanner[Planned]) -> Planned:
        return planner.as_pipeline(self)

    @property
    @override
    def recomputing(self) -> tuple[str, PlanningMethod] | None:
        """The change to layers that recompute, or to one program if layers have no such option."""
        layers = self.layer_option
        if isinstance(layers, AutoLayerOption | ManualLayerOption):
            if layers.remat_layer:
                return None
            recomputing = replace(layers, remat_layer=True)
            text = "remat_layer=True in the layer_option"
            return text, replace(self, layer_option=recomputing)
        count = self.num_micro_batches
        whole = ShardParallel(
            self.devices,
            count if isinstance(count, int) else 1,
            options=self.default_auto_sharding_option,
            rng=self.rng,
            batch_statistics=self.batch_statistics,
            while_loops=self.while_loops,
            remat="auto",
        )
        return 'ShardParallel with remat="auto"', whole


PLANNING_METHOD = instance(
    "one of autopar.methods that make a plan, e.g. autopar.ShardParallel()", PlanningMethod
)
