"""Schedules of the models of `tests.models`, patterns, steps, and counts of collectives."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

import autopar
from autopar.directives import ModelSchedule, create_schedule
from tests.models import TutorialMLP


def scheduled(model: nn.Module, *args: Any, mesh: Any = 4) -> ModelSchedule:
    return create_schedule(model, jax.eval_shape(model.init, jax.random.key(0), *args), args, mesh)


def mlp_schedule(mesh: Any = 4, hidden: int = 32) -> ModelSchedule:
    """Return a schedule of `TutorialMLP` without directives."""
    return scheduled(TutorialMLP(hidden), jnp.zeros((2, 8, hidden)), mesh=mesh)


def tensor_parallel(sch: ModelSchedule) -> None:
    """Shard the layers by column and by row, as Megatron and the tutorial do."""
    sch["linear1"].shard("kernel", axis=1)
    sch["linear1"].shard("bias", axis=0)
    sch["linear2"].shard("kernel", axis=0)
    sch["linear2"].sync("fwd_post", "all_reduce")
    sch["linear1"].sync("bwd_post", "all_reduce")


def megatron(sch: ModelSchedule, mesh_axis: str | None = None) -> None:
    """Shard every block of a `Transformer` by column and by row."""
    for column in (
        "block_*/attention/q",
        "block_*/attention/k",
        "block_*/attention/v",
        "block_*/up",
    ):
        sch[column].shard("kernel", axis=1, mesh_axis=mesh_axis).shard(
            "bias", axis=0, mesh_axis=mesh_axis
        )
    for row in ("block_*/attention/out", "block_*/down"):
        sch[row].shard("kernel", axis=0, mesh_axis=mesh_axis).sync(
            "fwd_post", "all_reduce", mesh_axis=mesh_axis
        )
    for entry in ("block_*/attention", "block_*/up"):
        sch[entry].sync("bwd_post", "all_reduce", mesh_axis=mesh_axis)


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    """Normalize as Flax does: the variance is the mean of squares less the square of the mean."""
    mean = jnp.mean(x, -1, keepdims=True)
    variance = jnp.maximum(0.0, jnp.mean(jnp.square(x), -1, keepdims=True) - jnp.square(mean))
    return (x - mean) * (jax.lax.rsqrt(variance + 1e-6) * scale) + bias


def sgd_step(apply: Any) -> Any:
    """Return `step(params, x)`: SGD at rate 1 on the mean square of `apply(params, x)`."""

    def step(params: Any, x: Any) -> Any:
        value, gradients = autopar.value_and_grad(lambda p: jnp.mean(apply(p, x) ** 2))(params)
        return jax.tree.map(lambda p, g: p - g, params, gradients), value

    return step


def collectives(
    compiled: Any,
    kinds: Sequence[str] = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all"),
) -> dict:
    """Count the collectives of each kind in a compiled function, without those of scalars."""
    lines = [
        line
        for line in compiled.as_text().splitlines()
        if " = " in line and "[]" not in line.split(" = ")[1][:8]
    ]
    counts = {
        kind: sum(f" {kind}(" in line or f" {kind}-start(" in line for line in lines)
        for kind in kinds
    }
    return {kind: count for kind, count in counts.items() if count}
