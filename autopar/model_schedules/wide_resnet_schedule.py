"""Directives for Wide-ResNet (Zagoruyko and Komodakis, 2016) and other bottleneck ResNets."""

from dataclasses import dataclass

from autopar.directives.definitions import DirectiveError
from autopar.directives.scheduled_model import ModelSchedule
from autopar.model_schedules.knobs import Knobs
from autopar.model_schedules.transformer_schedule import checkpoint_blocks, cut_stages


@dataclass(frozen=True, slots=True)
class ResNetNames:
    """The names of the modules of a residual network.

    Attributes:
        blocks: a glob that matches the blocks.
        convolutions: the first, the wide, and the last convolution of a block, in the block.
        norms: the norms after the first and the wide convolution, in the block.
        batch_norms: globs that match every batch normalization of the model.
    """

    blocks: str
    convolutions: tuple[str, str, str]
    norms: tuple[str, str]
    batch_norms: tuple[str, ...]


WIDE_RESNET = ResNetNames(
    blocks="block_*",
    convolutions=("Conv_0", "Conv_1", "Conv_2"),
    norms=("BatchNorm_0", "BatchNorm_1"),
    batch_norms=("stem_norm", "block_*/BatchNorm_*", "block_*/norm_skip"),
)


def schedule_wide_resnet(
    sch: ModelSchedule, knobs: Knobs | None = None, names: ResNetNames = WIDE_RESNET
) -> None:
    """Add the directives for a residual network, a function of ({"params", "batch_stats"}, images).

    The first two convolutions of a block and the norms after them are split by output channels, the
    last convolution by input channels. The few channels of the first convolution are gathered
    before the wide one, and an all_reduce completes the sums of the last one. With
    `knobs.batch_axis`, means and variances are those of the whole batch.

    Args:
        sch: the schedule to which directives are added.
        knobs: options.
        names: the names of the model's modules.

    Raises:
        DirectiveError: An option is one of transformers only.
    """
    knobs = knobs or Knobs()
    if knobs.sequence_parallel or knobs.vocabulary_parallel or knobs.flash_attention:
        raise DirectiveError(
            f"{knobs}: a residual network has no tokens and no attention; leave sequence_parallel,"
            " vocabulary_parallel and flash_attention out"
        )
    split_channels(sch, knobs.tensor_axis, names)
    if knobs.batch_axis is not None:
        for norms in names.batch_norms:
            sch[norms].sync("fwd_post", "all_reduce", mesh_axis=knobs.batch_axis)
    checkpoint_blocks(sch, knobs, names.blocks)
    cut_stages(sch, knobs, names.blocks)


def split_channels(sch: ModelSchedule, axis: str | None, names: ResNetNames) -> None:
    """Split the convolutions of each block; kernels are (height, width, inputs, outputs)."""
    first, wide, last = names.convolutions
    for convolution in (first, wide):
        sch[names.blocks][convolution].shard("kernel", axis=3, mesh_axis=axis)
    for norm in names.norms:
        for param in ("scale", "bias", "mean", "var"):
            sch[names.blocks][norm].shard(param, axis=0, mesh_axis=axis)
    sch[names.blocks][first].sync("bwd_post", "all_reduce", mesh_axis=axis)
    sch[names.blocks][wide].sync("fwd_pre", "all_gather", axis=3, mesh_axis=axis)
    sch[names.blocks][last].shard("kernel", axis=2, mesh_axis=axis).sync(
        "fwd_post", "all_reduce", mesh_axis=axis
    )
