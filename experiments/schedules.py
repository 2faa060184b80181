"""Schedules by hand for models of the sweep: how an expert would run them, apart from the models."""

from collections.abc import Callable
from typing import Any

import jax
from flax.training.train_state import TrainState

import autopar
from autopar.schedule import Built, ModelSchedule
from experiments.models.gpt import GPT
from experiments.models.model import Batch


def schedule_gpt(model: GPT, mesh: Any) -> ModelSchedule:
    """An empty schedule for the model."""
    state, batch = model.abstract_args()
    return autopar.create_schedule(state.apply_fn, state.params, [batch["tokens"]], mesh)


def split_attention(sch: ModelSchedule, mesh_axis: str | None = None) -> None:
    """Attention by heads (Megatron-LM, Shoeybi et al., arXiv 1909.08053): projections in by column, out by row."""
    attention = sch["block_*/attention"].sync("bwd_post", "all_reduce", mesh_axis=mesh_axis)
    attention["qkv"].shard("kernel", axis=1, mesh_axis=mesh_axis).shard("bias", axis=0, mesh_axis=mesh_axis)
    attention["out"].shard("kernel", axis=0, mesh_axis=mesh_axis).sync("fwd_post", "all_reduce", mesh_axis=mesh_axis)


def split_feed_forward(sch: ModelSchedule, mesh_axis: str | None = None) -> None:
    """Of the two dense layers the first by column, the second by row (as above)."""
    layers = sch["block_*/feed_forward"].sync("bwd_post", "all_reduce", mesh_axis=mesh_axis)
    layers["up"].shard("kernel", axis=1, mesh_axis=mesh_axis).shard("bias", axis=0, mesh_axis=mesh_axis)
    layers["down"].shard("kernel", axis=0, mesh_axis=mesh_axis).sync("fwd_post", "all_reduce", mesh_axis=mesh_axis)


def split_vocabulary(sch: ModelSchedule, mesh_axis: str | None = None) -> None:
    """The tied embedding by tokens: looked up in parts that are added up, and logits in parts, too."""
    sch["tokens"].shard("embedding", axis=0, mesh_axis=mesh_axis).sync("fwd_post", "all_reduce", mesh_axis=mesh_axis)


def megatron(sch: ModelSchedule, mesh_axis: str | None = None) -> None:
    """Tensor parallelism throughout."""
    split_attention(sch, mesh_axis)
    split_feed_forward(sch, mesh_axis)
    split_vocabulary(sch, mesh_axis)


def train_step(model: GPT, built: Built) -> Callable[[TrainState, Batch], tuple[TrainState, jax.Array]]:
    """The model's own training step, with the scheduled model in it."""

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, jax.Array]:
        updated, loss = model.train_step(state.replace(apply_fn=built.apply), batch)
        return updated.replace(apply_fn=state.apply_fn), loss

    return step
