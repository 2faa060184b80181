"""The parts that schedules of transformers are made of. Each takes the schedule to add to, the knobs, and where the model has what."""

from collections.abc import Callable
from dataclasses import dataclass

import jax

from autopar.directives.definitions import DirectiveError
from autopar.directives.model_graph import joined
from autopar.directives.scheduled_model import ModelSchedule
from autopar.model_schedules.knobs import Knobs

type Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""From queries, keys and values, (batch, length, heads, features), to what is attended to, of the same shape."""


@dataclass(frozen=True, slots=True)
class ColumnRowLayer:
    """A module in which products by column meet in one by row: attention or feed-forward.

    Attributes:
        path: in a block; "" where the products are the block's own. columns, row: in the layer. The kernels of columns are split
            along their second dim, those of rows along their first, be it of features or of heads.
    """

    path: str
    columns: tuple[str, ...]
    row: str


@dataclass(frozen=True, slots=True)
class TransformerNames:
    """Where a transformer has what. For a model of other names: `dataclasses.replace(LLAMA, blocks="layers_*")`.

    Attributes:
        blocks: a glob.
        embedding: the module that looks up tokens.
        head: the module that makes logits: the embedding where they are tied.
        head_bias: a parameter of the model itself that is added to the logits.
        loss: where the schedule is for a loss, the `jax.named_scope` in which cross-entropy is computed from the logits.
        attend: what attention computes between its projections, written as the model does; to be found by.
        flash: what stands in for it, such as a kernel for the devices at hand.
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
    """All parts, as the knobs say."""
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
    """Megatron-LM's tensor parallelism (Shoeybi et al., arXiv 1909.08053): in by column, out by row, one collective at either end.

    With sequence parallelism that gathers tokens before and scatters sums after, which takes as long as two all_reduces.
    """
    axis, path = knobs.tensor_axis, joined(names.blocks, layer.path)
    columns = [joined(path, column) for column in layer.columns]
    for column in columns:
        _shard(sch, column, 1, axis)
    row = sch[joined(path, layer.row)].shard("kernel", axis=0, mesh_axis=axis)
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
    """Embedding and logits by tokens (as above): what is looked up in parts is added up, logits stay in parts.

    So they do in the loss, if that is scheduled: of each position the largest logit, the sum of exponentials and the logit of the label
    are put together.
    """
    axis = knobs.tensor_axis
    embedding = sch[names.embedding].shard("embedding", axis=0, mesh_axis=axis)
    if knobs.sequence_parallel:
        embedding.sync("fwd_post", "reduce_scatter", axis=1, mesh_axis=axis)
    else:
        embedding.sync("fwd_post", "all_reduce", mesh_axis=axis)
        sch[names.head].sync("bwd_post", "all_reduce", mesh_axis=axis)
    if names.head != names.embedding:
        _shard(sch, names.head, 1, axis)
    if names.head_bias is not None:
        sch.shard(names.head_bias, axis=0, mesh_axis=axis)
    if names.loss is not None:
        sch[names.loss].sync("fwd_post", "all_reduce", mesh_axis=axis)


def split_sequence(sch: ModelSchedule, knobs: Knobs, names: TransformerNames) -> None:
    """What is between split layers, by tokens: from the embedding, or where that is whole the first block, to the logits."""
    axis = knobs.tensor_axis
    if knobs.vocabulary_parallel:
        sch[names.head].sync("fwd_pre", "all_gather", axis=1, mesh_axis=axis)
        return
    sch[sch[names.blocks].paths[0]].sync("fwd_pre", "scatter", axis=1, mesh_axis=axis)
    sch[names.head].sync("fwd_pre", "all_gather", axis=1, mesh_axis=axis, backward="scatter")


def replace_attention(sch: ModelSchedule, names: TransformerNames) -> None:
    """Queries, keys and values go into `names.flash`. Raises DirectiveError where the model does not attend as `names.attend` says."""
    found = sch[joined(names.blocks, names.attention.path)].find(names.attend)
    if not found:
        raise DirectiveError(
            "flash_attention: the model's attention is not what names.attend computes; give a function of query, key and value,"
            " (batch, length, heads, features), that computes what the model does between its projections, and as it does"
        )
    sch.replace(names.flash, found)


def checkpoint_blocks(sch: ModelSchedule, knobs: Knobs, blocks: str) -> None:
    """The first blocks are computed again in the backward pass."""
    paths = sch[blocks].paths
    for path in paths[: round(knobs.checkpoint_ratio * len(paths))]:
        sch[path].checkpoint()


def cut_stages(sch: ModelSchedule, knobs: Knobs, blocks: str) -> None:
    """Stages with as many blocks each, as far as possible. Raises DirectiveError for more stages than blocks."""
    paths, stages = sch[blocks].paths, knobs.pipeline_stages
    if stages > len(paths):
        raise DirectiveError(
            f"pipeline_stages is {stages}, but the model has {len(paths)} blocks, at {blocks!r}"
        )
    for stage in range(1, stages):
        sch[paths[len(paths) * stage // stages - 1]].cut_pipeline_stage()


def _shard(sch: ModelSchedule, pattern: str, axis: int, mesh_axis: str | None) -> None:
    """Kernels along a dim, and biases, where there are any, along with them."""
    for path in sch[pattern].paths:
        module = sch[path].shard("kernel", axis=axis, mesh_axis=mesh_axis)
        if "bias" in sch.modules.by_path[path].params:
            module.shard("bias", axis=0, mesh_axis=mesh_axis)
