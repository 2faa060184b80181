"""Directives for the sweep's GPT: Megatron's tensor parallelism, or that of attention alone."""

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


def _causal_attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    return attend(query, key, value, causal=True)


NAMES: TransformerNames = replace(model_schedules.GPT, attend=_causal_attention)
"""Names of the parts of the sweep's GPT, and its attention, which is not a module of Flax."""


def schedule_gpt(model: GPT, mesh: Any) -> ModelSchedule:
    """Return a schedule for the model without any directives."""
    state, batch = model.abstract_args()
    return autopar.create_schedule(state.apply_fn, state.params, [batch["tokens"]], mesh)


def split_attention(sch: ModelSchedule) -> None:
    """Split attention by heads, and nothing else."""
    model_schedules.split_layer(sch, Knobs(), NAMES, NAMES.attention)


def megatron(sch: ModelSchedule) -> None:
    """Split every layer as Megatron-LM does (Shoeybi et al., arXiv 1909.08053)."""
    model_schedules.schedule_gpt(sch, Knobs(vocabulary_parallel=True), NAMES)


def train_step(
    model: Model, built: BuiltModel
) -> Callable[[TrainState, Batch], tuple[TrainState, jax.Array]]:
    """Return the model's own training step, in which the scheduled model takes the model's place.

    Gradients are accumulated over the microbatches of the method that runs it.
    """

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
    """Return the training step of a scheduled GPT, its arguments, and the method that keeps it so.

    Args:
        model: the model; its arguments are shapes and dtypes.
        mesh: returns the devices of a mesh of a given shape.
        shape: degrees of data and tensor parallelism, within each stage.
        knobs: what the schedule does.
        num_micro_batches: parts of the batch that gradients are accumulated over.
    """
    stages = knobs.pipeline_stages
    sch = schedule_gpt(model, mesh(shape))
    model_schedules.schedule_gpt(sch, replace(knobs, batch_axis="x"), NAMES)
    # With microbatches the step is left to XLA's partitioner, as in the tutorial on tuning.
    backend = "auto" if stages > 1 else "manual" if num_micro_batches == 1 else "gspmd"
    devices = mesh((stages * shape[0] * shape[1],)) if stages > 1 else None
    built = autopar.build(sch, backend, "x", num_micro_batches=num_micro_batches, devices=devices)
    return train_step(model, built), model.abstract_args(), built.method
