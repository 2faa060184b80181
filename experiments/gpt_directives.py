"""Schedules by hand for models of the sweep: how an expert would run them, apart from the models."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
from flax.training.train_state import TrainState
from jax.sharding import Mesh

import autopar
from autopar import model_schedules
from autopar.directives import BuiltModel, ModelSchedule
from autopar.model_schedules import Knobs, TransformerNames
from experiments.models.gpt import GPT
from experiments.models.model import Batch, Model
from experiments.models.transformer import attend


def _attend_before(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    return attend(query, key, value, causal=True)


NAMES: TransformerNames = replace(model_schedules.GPT, attend=_attend_before)
"""Those of the sweep's GPT, which writes its attention out."""


def schedule_gpt(model: GPT, mesh: Any) -> ModelSchedule:
    """An empty schedule for the model."""
    state, batch = model.abstract_args()
    return autopar.create_schedule(state.apply_fn, state.params, [batch["tokens"]], mesh)


def split_attention(sch: ModelSchedule, mesh_axis: str | None = None) -> None:
    """Attention by heads, and nothing else."""
    model_schedules.split_layer(sch, Knobs(mesh_axis), NAMES, NAMES.attention)


def megatron(sch: ModelSchedule, mesh_axis: str | None = None) -> None:
    """Tensor parallelism throughout (Megatron-LM, Shoeybi et al., arXiv 1909.08053)."""
    model_schedules.schedule_gpt(sch, Knobs(mesh_axis, vocabulary_parallel=True), NAMES)


def train_step(
    model: Model, built: BuiltModel
) -> Callable[[TrainState, Batch], tuple[TrainState, jax.Array]]:
    """The model's own training step, with the scheduled model in it; gradients are accumulated over microbatches, if there are any."""

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, jax.Array]:
        updated, loss = model.train_step(
            state.replace(apply_fn=built.apply), batch, autopar.value_and_grad
        )
        return updated.replace(apply_fn=state.apply_fn), loss

    return step


def scheduled_step(
    model: GPT,
    mesh: Callable[[Sequence[int]], Mesh],
    shape: tuple[int, int],
    knobs: Knobs,
    num_micro_batches: int,
) -> tuple[Callable[..., Any], tuple[TrainState, Batch], autopar.PlanningMethod]:
    """The training step of a scheduled GPT, its arguments, and the method that keeps the schedule.

    Args:
        mesh: from a shape to devices.
        shape: (data, tensor) degrees, those of one stage where there are several.
    """
    stages = knobs.pipeline_stages
    sch = schedule_gpt(model, mesh(shape))
    model_schedules.schedule_gpt(sch, replace(knobs, batch_axis="x"), NAMES)
    # Microbatches are left to XLA's partitioner, as they were in what the README tells of tuning.
    backend = "auto" if stages > 1 else "manual" if num_micro_batches == 1 else "gspmd"
    devices = mesh((stages * shape[0] * shape[1],)) if stages > 1 else None
    built = autopar.build(sch, backend, "x", num_micro_batches=num_micro_batches, devices=devices)
    return train_step(model, built), model.abstract_args(), built.method
