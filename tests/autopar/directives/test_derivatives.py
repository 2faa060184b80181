"""Functions with a custom derivative keep it on shards."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar.directives import ModelSchedule, Verify, build, create_schedule
from tests.autopar.directives.scheduled_models import collectives

X = jax.random.normal(jax.random.key(0), (4, 8))
PARAMS = {
    "first": jax.random.normal(jax.random.key(1), (8, 16)),
    "scale": jax.random.normal(jax.random.key(2), (16,)),
    "gain": jnp.array(1.5),
    "second": jax.random.normal(jax.random.key(3), (16, 8)),
}


@jax.custom_vjp
def scaled(x: jax.Array, scale: jax.Array, gain: jax.Array, count: jax.Array) -> jax.Array:
    """Scale `x`, with a custom gradient that is clipped."""
    return jnp.sin(x) * scale * gain * count


def forward(x: jax.Array, scale: jax.Array, gain: jax.Array, count: jax.Array) -> Any:
    return scaled(x, scale, gain, count), (x, scale, gain)


def backward(residuals: Any, gradient: jax.Array) -> Any:
    x, scale, gain = residuals
    gradient = jnp.clip(gradient, -0.5, 0.5)
    return (
        gradient * jnp.cos(x) * scale * gain,
        jnp.sum(gradient * x, 0),
        jnp.sum(gradient * scale),
        None,
    )


scaled.defvjp(forward, backward)


def layers(params: Any, x: jax.Array) -> jax.Array:
    with jax.named_scope("first"):
        x = scaled(x @ params["first"], params["scale"], params["gain"], jnp.arange(16))
    with jax.named_scope("second"):
        return x @ params["second"]


def tensor_parallel(mesh: Any = 4) -> ModelSchedule:
    sch = create_schedule(layers, PARAMS, [X], mesh=mesh)
    axis = {"mesh_axis": "y"} if mesh == (2, 2) else {}
    sch.shard("first", axis=1, **axis).shard("second", axis=0, **axis)
    sch["second"].sync("fwd_post", "all_reduce", **axis)
    return sch


@pytest.mark.parametrize("split_scale", [False, True])
@pytest.mark.parametrize("mesh", [4, (2, 2)])
def test_a_custom_vjp_runs_on_shards(mesh: Any, split_scale: bool) -> None:
    """Values and parameters are split; gradients of replicated parameters are summed."""
    sch = tensor_parallel(mesh)
    if split_scale:
        sch.shard("scale", axis=0)
    Verify(sch, [X], params=PARAMS, batch_axis=None if mesh == 4 else "x").check()


def test_gradients_of_replicated_operands_are_summed_and_of_split_ones_gathered() -> None:
    run = build(tensor_parallel()).apply
    loss = jax.jit(jax.grad(lambda p: jnp.sum(run(p, X) ** 2)))
    # There is one all_reduce forward. Backward, the gradient of `scale` is split. That of `gain` is
    # a sum of scalars, which is not counted.
    assert collectives(loss.lower(PARAMS).compile()) == {"all-reduce": 1, "all-gather": 1}


def test_a_recomputed_function_keeps_its_custom_vjp() -> None:
    sch = tensor_parallel()
    sch["first"].checkpoint()
    Verify(sch, [X], params=PARAMS).check()
