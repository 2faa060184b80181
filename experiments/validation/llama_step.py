"""A training step of Llama in plain JAX, with cuDNN's attention and its layers in a scan."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name

from experiments.models.llama import rotate

type Arrays = dict[str, Any]

type Recomputed = Literal["mlp", "full"]
"""What the backward pass recomputes, as `Execution.recompute` calls it.

"mlp" saves what attention projects and computes, "full" only the inputs of layers.
"""


@dataclass(frozen=True, slots=True)
class LlamaSizes:
    """Sizes of a Llama; the names are those of `simulator.transformer.Transformer`."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq: int

    @property
    def head(self) -> int:
        """The features of a head."""
        return self.hidden // self.heads

    def training_step(
        self, batch: int, recompute: Recomputed
    ) -> tuple[Callable[..., Any], tuple[Any, Any]]:
        """Return a step of AdamW with products in bfloat16, and its abstract arguments.

        Args:
            batch: number of sequences.
            recompute: what the backward pass recomputes.
        """
        block = jax.checkpoint(self._block)
        if recompute == "mlp":
            saved = jax.checkpoint_policies.save_only_these_names("projection", "context")
            block = jax.checkpoint(self._block, policy=saved)
        optimizer = optax.adamw(1e-4)

        def loss(params: Arrays, batch: Arrays) -> jax.Array:
            stream = params["embedding"].astype(jnp.bfloat16)[batch["tokens"]]
            stream, _ = jax.lax.scan(
                lambda x, layer: (block(x, layer), None), stream, params["layers"]
            )
            logits = _norm(stream, params["norm"]) @ params["head"].astype(jnp.bfloat16)
            losses = optax.softmax_cross_entropy_with_integer_labels(
                logits.astype(jnp.float32), batch["labels"]
            )
            return losses.mean()

        def step(state: tuple[Any, Any], batch: Arrays) -> tuple[tuple[Any, Any], jax.Array]:
            params, moments = state
            value, gradients = jax.value_and_grad(loss)(params, batch)
            updates, moments = optimizer.update(gradients, moments, params)
            return (optax.apply_updates(params, updates), moments), value

        params = self._parameters()
        tokens = jax.ShapeDtypeStruct((batch, self.seq), jnp.int32)
        state = params, jax.eval_shape(optimizer.init, params)
        return step, (state, {"tokens": tokens, "labels": tokens})

    def _parameters(self) -> Arrays:
        h, keys, ffn = self.hidden, self.kv_heads * self.head, self.ffn
        shapes = {
            "q": (h, h),
            "k": (h, keys),
            "v": (h, keys),
            "o": (h, h),
            "gate": (h, ffn),
            "up": (h, ffn),
            "down": (ffn, h),
            "norm1": (h,),
            "norm2": (h,),
        }
        return {
            "embedding": _abstract(self.vocab, h),
            "head": _abstract(h, self.vocab),
            "norm": _abstract(h),
            "layers": {name: _abstract(self.layers, *shape) for name, shape in shapes.items()},
        }

    def _block(self, x: jax.Array, layer: Arrays) -> jax.Array:
        """Return the stream after a layer; `checkpoint_name` marks what may be saved."""
        w = {name: value.astype(jnp.bfloat16) for name, value in layer.items()}
        batch = x.shape[0]
        y = _norm(x, layer["norm1"])
        q, k, v = (
            checkpoint_name(y @ w[name], "projection").reshape(batch, self.seq, -1, self.head)
            for name in ("q", "k", "v")
        )
        context = jax.nn.dot_product_attention(
            rotate(q), rotate(k), v, is_causal=True, implementation="cudnn"
        )
        context = checkpoint_name(context.reshape(batch, self.seq, -1), "context")
        x = x + checkpoint_name(context @ w["o"], "projection")
        y = _norm(x, layer["norm2"])
        return x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"]


def _abstract(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    root = jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-5)
    return (y * root * scale).astype(jnp.bfloat16)
