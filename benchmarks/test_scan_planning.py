"""Seconds to plan Llama-7B whose layers run in `nn.scan`, sharded and as a pipeline.

Both include tracing. Compare the two in one run: `uv run pytest benchmarks/test_scan_planning.py`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import autopar

WIDTH, HEADS, HIDDEN, VOCABULARY, LAYERS = 4096, 32, 11008, 32000, 32  # Touvron et al., 2023
ROWS, LENGTH, MICROBATCHES = 64, 2048, 8
TX = optax.adamw(1e-4)


class Layer(nn.Module):
    """A layer of Llama in bfloat16, without rotary embeddings."""

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        kind: dict[str, Any] = {"use_bias": False, "dtype": jnp.bfloat16}
        normed = nn.RMSNorm(dtype=jnp.bfloat16)(x)
        heads = HEADS, WIDTH // HEADS
        q, k, v = (nn.DenseGeneral(heads, name=name, **kind)(normed) for name in "qkv")
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(WIDTH // HEADS)
        scores = jnp.where(jnp.tri(x.shape[1]) > 0, scores.astype(jnp.float32), -1e9)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", nn.softmax(scores).astype(jnp.bfloat16), v)
        x = x + nn.DenseGeneral(WIDTH, axis=(-2, -1), name="o", **kind)(mixed)
        normed = nn.RMSNorm(dtype=jnp.bfloat16)(x)
        hidden = nn.silu(nn.Dense(HIDDEN, **kind)(normed)) * nn.Dense(HIDDEN, **kind)(normed)
        return x + nn.Dense(WIDTH, **kind)(hidden), None


class Llama(nn.Module):
    """Llama-7B with the weights of all layers in one array of each kind."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(VOCABULARY, WIDTH, dtype=jnp.bfloat16)(tokens)
        layers = nn.scan(
            nn.remat(Layer, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=LAYERS,
        )
        x, _ = layers()(x, None)
        return nn.Dense(VOCABULARY, use_bias=False)(nn.RMSNorm()(x))


def llama_step(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
    """Take a step of AdamW on the mean cross entropy."""
    params, moments = state

    def loss(params: Any) -> jax.Array:
        logits = Llama().apply(params, tokens)
        assert isinstance(logits, jax.Array)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

    value, gradients = autopar.value_and_grad(loss)(params)
    updates, moments = TX.update(gradients, moments, params)
    return (optax.apply_updates(params, updates), moments), value


METHODS = {
    "ShardParallel": lambda: autopar.ShardParallel(num_micro_batches=MICROBATCHES),
    "4 stages": lambda: autopar.PipeshardParallel(
        num_micro_batches=MICROBATCHES, layer_option=autopar.AutoLayerOption(layer_num=4)
    ),
}


@pytest.mark.parametrize("name", METHODS)
def test_llama_in_a_scan(benchmark, name):
    tokens = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32)
    params = jax.eval_shape(Llama().init, jax.random.key(0), tokens)
    args = (params, jax.eval_shape(TX.init, params)), tokens

    def plan() -> autopar.Plan:
        jax.clear_caches()
        return autopar.plan_step(llama_step, args, method=METHODS[name](), cluster="dgx_h100")

    planned = benchmark.pedantic(plan, rounds=5, warmup_rounds=1)
    assert len(planned.stages) == (1 if name == "ShardParallel" else 4)
    shapes = [
        value.shape
        for stage in planned.stages
        for value in stage.inputs
        if "Layer" in value.path and value.role == "parameter"
    ]
    assert {shape[0] for shape in shapes} == (
        {LAYERS} if name == "ShardParallel" else {LAYERS // 4}
    )
