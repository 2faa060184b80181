"""The parts of transformer schedules.

Each function adds directives to a schedule, given options and the names of the model's modules.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax

from autopar.directives.definitions import DirectiveError
from autopar.directives.model_graph import join_path
from autopar.directives.scheduled_model import ModelSchedule
from autopar.model_schedules.knobs import Knobs

type Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""A function from query, key and value, (batch, length, heads, features), to attention."""


@dataclass(frozen=True, slots=True)
class ColumnRowLayer:
    """Column-parallel products followed by a row-parallel one: attention or feed-forward.

    Attributes:
        path: the path of the layer in a block; "" if the products are in the block itself.
        columns: the paths of the column-parallel products in the layer. Their kernels are split
            along the second dim, of features or of heads.
        row: the path of the row-parallel product in the layer. Its kernel is split along the first
            dim.
    """

    path: str
    columns: tuple[str, ...]
    row: str


@dataclass(frozen=True, slots=True)
class TransformerNames:
    """The names of the modules of a transformer.

    For a model with other names, use `dataclasses.replace(LLAMA, blocks="layers_*")`.

    Attributes:
        blocks: a glob that matches the blocks.
        attention: the attention layer of a block.
        feed_forward: the feed-forward layer of a block.
        embedding: the module that embeds tokens.
        head: the module that computes logits: the embedding if they are tied.
        attend: a pattern for `find`: a function that computes what the model computes between the
            projections of attention, in the same way.
        flash: the function that replaces it, such as a kernel for the device.
        head_bias: a parameter of the model itself that is added to the logits.
        loss: for a schedule of a loss, the `jax.named_scope` in which cross-entropy is computed
            from the logits.
    """

    blocks: str
    attention: ColumnRowLayer
    feed_forward: ColumnRowLayer
    embedding: str
    head: str
    attend: Attend
    flash: Attend
    head_bias: str | None = None
    loss: str | None = None


def schedule_transformer(sch: ModelSchedule, knobs: Knobs, names: TransformerNames) -> None:
    """Add the directives of all parts that the options enable."""
    for layer in (names.attention, names.feed_forward):
        split_layer(sch, knobs, names, layer)
    if knobs.vocabulary_parallel:
        split_vocabulary(sch, knobs, names)
    if knobs.sequence_parallel:
        split_sequence(sch, knobs, names)
    if names.loss is not None and knobs.batch_axis is not None:
        sch[names.loss].sync("fwd_post", "all_reduce", mesh_axis=knobs.batch_axis)
    if knobs.flash_attention:
        replace_attention(sch, names)
    checkpoint_blocks(sch, knobs, names.blocks)
    cut_stages(sch, knobs, names.blocks)


def split_layer(
    sch: ModelSchedule, knobs: Knobs, names: TransformerNames, layer: ColumnRowLayer
) -> None:
    """Add Megatron-LM's tensor parallelism of a layer (Shoeybi et al., arXiv 1909.08053).

    The forward pass has one all_reduce after the layer, the backward pass one before it. With
    sequence parallelism, tokens are gathered before the layer, and sums are scattered after it,
    which takes as long as the all_reduces.
    """
    axis = knobs.tensor_axis
    path = join_path(names.blocks, layer.path)
    columns = [join_path(path, column) for column in layer.columns]
    for column in columns:
        _shard_columns(sch, column, axis)
    row = sch[join_path(path, layer.row)].shard("kernel", axis=0, mesh_axis=axis)
    entries = [sch[entry] for entry in ([path] if layer.path else columns)]
    if knobs.sequence_parallel:
        for entry in entries:
            entry.sync("fwd_pre", "all_gather", axis=1, mesh_axis=axis)
        row.sync("fwd_post", "reduce_scatter", axis=1, mesh_axis=axis)
    else:
        for entry in entries:
            entry.sync("bwd_post", "all_reduce", mesh_axis=axis)
        row.sync("fwd_post", "all_reduce", mesh_axis=axis)


def split_vocabulary(sch: ModelSchedule, knobs: Knobs, names: TransformerNames) -> None:
    """Split embedding and logits by tokens of the vocabulary (Megatron-LM, as for `split_layer`).

    An all_reduce sums the embeddings, and logits stay split. If the schedule is of a loss, the loss
    combines the largest logit of each position, the sum of exponentials, and the logit of the label
    over the devices.
    """
    axis = knobs.tensor_axis
    embedding = sch[names.embedding].shard("embedding", axis=0, mesh_axis=axis)
    if knobs.sequence_parallel:
        embedding.sync("fwd_post", "reduce_scatter", axis=1, mesh_axis=axis)
    else:
        embedding.sync("fwd_post", "all_reduce", mesh_axis=axis)
        sch[names.head].sync("bwd_post", "all_reduce", mesh_axis=axis)
    if names.head != names.embedding:
        _shard_columns(sch, names.head, axis)
    if names.head_bias is not None:
        sch.shard(names.head_bias, axis=0, mesh_axis=axis)
    if names.loss is not None:
        sch[names.loss].sync("fwd_post", "all_reduce", mesh_axis=axis)


def split_sequence(sch: ModelSchedule, knobs: Knobs, names: TransformerNames) -> None:
    """Split activations between layers by tokens, from the first block to the logits.

    With `vocabulary_parallel` they are split from the embedding on.
    """
    axis = knobs.tensor_axis
    if knobs.vocabulary_parallel:
        sch[names.head].sync("fwd_pre", "all_gather", axis=1, mesh_axis=axis)
        return
    sch[sch[names.blocks].paths[0]].sync("fwd_pre", "scatter", axis=1, mesh_axis=axis)
    sch[names.head].sync("fwd_pre", "all_gather", axis=1, mesh_axis=axis, backward="scatter")


def replace_attention(sch: ModelSchedule, names: TransformerNames) -> None:
    """Replace attention by `names.flash`.

    Raises:
        DirectiveError: The model does not compute attention as `names.attend` does.
    """
    attentions = sch[join_path(names.blocks, names.attention.path)].find(names.attend)
    if not attentions:
        raise DirectiveError(
            "flash_attention: the model's attention is not what names.attend computes; give a"
            " function of query, key and value, (batch, length, heads, features), with the"
            " operations that the model has between its projections"
        )
    sch.replace(names.flash, attentions)


def checkpoint_blocks(sch: ModelSchedule, knobs: Knobs, blocks: str) -> None:
    """Recompute the first `checkpoint_ratio` of the blocks in the backward pass."""
    paths = sch[blocks].paths
    for path in paths[: round(knobs.checkpoint_ratio * len(paths))]:
        sch[path].checkpoint()


def cut_stages(sch: ModelSchedule, knobs: Knobs, blocks: str) -> None:
    """Cut pipeline stages of equally many blocks, or as equal as possible.

    Raises:
        DirectiveError: There are more stages than blocks.
    """
    paths = sch[blocks].paths
    stages = knobs.pipeline_stages
    if stages > len(paths):
        raise DirectiveError(
            f"pipeline_stages is {stages}, but the model has {len(paths)} blocks, at {blocks!r};"
            " use at most a stage for each block"
        )
    for stage in range(1, stages):
        sch[paths[len(paths) * stage // stages - 1]].cut_pipeline_stage()


def _shard_columns(sch: ModelSchedule, pattern: str, mesh_axis: str | None) -> None:
    """Split kernels along dim 1, and their biases, if any, along their only dim."""
    for path in sch[pattern].paths:
        module = sch[path].shard("kernel", axis=1, mesh_axis=mesh_axis)
        if "bias" in sch.modules.by_path[path].params:
            module.shard("bias", axis=0, mesh_axis=mesh_axis)
