"""Pipelines of Alpa's Wide-ResNets on V100s, with its stages and with those of its baselines."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import autopar
from experiments.models.model_sizes import wide_resnet
from experiments.models.wide_resnet import BLOCKS, WideResNet
from experiments.paper.published_values import published_table
from experiments.validation.pipeline_quality import COUNT_EPS, LayerWork, StageOption, p3, step_of

EPS = 1.0
"""How uneven layers may be: as many layers as blocks, whose work differs."""


@dataclass(frozen=True, slots=True)
class WideResNetPlan:
    """A plan that Alpa found for a Wide-ResNet.

    Attributes:
        gpus: number of V100s.
        model: the model with its batch.
        micro_batches: number of microbatches.
        blocks: residual blocks of each stage.
        devices: devices of each stage.
        intra_mesh: logical mesh of the plan without stages.
        intra_images: images of a microbatch of the plan without stages.
    """

    gpus: int
    model: WideResNet
    micro_batches: int
    blocks: tuple[int, ...]
    devices: tuple[int, ...]
    intra_mesh: tuple[int, ...]
    intra_images: int

    @property
    def stages(self) -> autopar.ManualStageOption:
        """Alpa's stages; their shardings are to be planned."""
        return stages_of(self.blocks, self.devices)


SMOKE = WideResNetPlan(
    gpus=4,
    model=WideResNet(8, 8, 2, image_size=32, num_classes=16, batch_size=32),
    micro_batches=2,
    blocks=(1, 1),
    devices=(2, 2),
    intra_mesh=(4,),
    intra_images=16,
)
"""A tiny plan, for the smoke configuration."""

DATA_STAGES = autopar.AutoStageOption(
    submesh_physical_shape_space="small_power_of_two",
    submesh_logical_shape_space="data_parallel_only",
    stage_imbalance_tolerance=1.0,
)
"""The search of stages that divide the batch alone."""

STAGES = replace(DATA_STAGES, submesh_logical_shape_space="same_as_physical")
"""The search of stages on meshes of hosts x devices."""


def alpa_plans() -> dict[int, WideResNetPlan]:
    """Return the plans that Alpa found, by number of GPUs."""
    plans = {}
    for row in published_table("alpa_wide_resnet_plans").itertuples():
        plans[row.gpus] = WideResNetPlan(
            row.gpus,
            wide_resnet(row.layers, row.channels, row.width, row.batch),
            row.micro_batches,
            tuple(map(int, str(row.blocks).split())),
            tuple(map(int, str(row.devices).split())),
            tuple(int(size) for size in row.intra_mesh.split("x") if size != "1") or (1,),
            row.intra_sequences,
        )
    return plans


def stages_of(layers: tuple[int, ...], devices: tuple[int, ...]) -> autopar.ManualStageOption:
    """Return an option with stages of given numbers of layers and devices, in their order."""
    ids: Iterator[int] = iter(range(sum(layers)))
    return autopar.ManualStageOption(
        [[next(ids) for _ in range(count)] for count in layers],
        [(max(1, count // 8), min(count, 8)) for count in devices],
        [(count,) for count in devices],
    )


def plan_wide_resnet(
    plan: WideResNetPlan,
    stages: StageOption,
    *,
    layers: int | None = None,
    work: LayerWork = "flops",
    data_parallel: bool = False,
) -> autopar.Plan:
    """Plan a Wide-ResNet as a 1F1B pipeline whose layers are recomputed, as Alpa does.

    Args:
        plan: the model, its microbatches and its GPUs.
        stages: how stages are formed.
        layers: number of layers; by default that of its blocks.
        work: what is even among layers.
        data_parallel: whether stages use data parallelism alone.

    Raises:
        NoStagesError, InfeasibleError: no plan fits in the memory.
    """
    train_step, args = step_of(plan.model)
    options = autopar.DataParallel().sharding if data_parallel else autopar.ShardingOptions()
    eps = EPS if work == "flops" else COUNT_EPS
    method = autopar.PipeshardParallel(
        num_micro_batches=plan.micro_batches,
        batch_statistics="microbatch",
        layer_option=autopar.AutoLayerOption(
            layers or sum(plan.blocks), remat_layer=True, eps=eps, cost_criteria=work
        ),
        stage_option=stages,
        default_auto_sharding_option=options,
    )
    return autopar.plan_step(train_step, args, method=method, cluster=p3(plan.gpus))


def convolution_flops(model: WideResNet) -> float:
    """Return the FLOP of a step's convolutions, forward and backward, without recomputation."""
    size = model.image_size // 2
    flops = 2.0 * size**2 * 49 * 3 * model.channels
    size, inputs = size // 2, model.channels
    for group, count in enumerate(BLOCKS[model.num_layers]):
        channels = model.channels * 2**group
        wide, outputs = channels * model.width, 4 * channels
        for block in range(count):
            smaller = size // 2 if group and not block else size
            flops += 2.0 * size**2 * inputs * channels
            flops += 2.0 * smaller**2 * wide * (9 * channels + outputs)
            flops += 2.0 * smaller**2 * inputs * outputs if block == 0 else 0.0
            size, inputs = smaller, outputs
    return 3 * model.batch_size * (flops + 2.0 * inputs * model.num_classes)
