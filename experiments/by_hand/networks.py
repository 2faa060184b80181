"""MLP and GPT as functions of the shards of one device.

They are written over the operations in which strategies differ, the methods of `Layout`. They take
the parameters of `experiments.models`, and on one device they give the same loss.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from experiments.models import GPT, MLP, Model
from experiments.models.transformer import attend

type Params = dict[str, Any]


class Layout:
    """The part of each operation that a device computes: here all of it.

    Strategies that split operations override them. The features of activations are their last dim,
    the tokens (the examples of an MLP) the one before.
    """

    def layer(self, function: Callable[..., Any], remat: bool = False) -> Callable[..., Any]:
        """Return a layer that takes the parameters of this device.

        Args:
            function: the layer, `function(params, *activations)`.
            remat: whether to recompute the layer in the backward pass.
        """
        return jax.checkpoint(function) if remat else function

    def column(self, params: Params, x: jax.Array) -> jax.Array:
        """Apply a dense layer before `row`, into attention heads or a wide hidden layer."""
        return product(x, params) + params["bias"].astype(x.dtype)

    def row(self, params: Params, x: jax.Array) -> jax.Array:
        """Apply the dense layer after `column`."""
        return product(x, params) + params["bias"].astype(x.dtype)

    def feature_mean(self, x: jax.Array) -> jax.Array:
        """Return the mean over all features, kept as a dim of size 1."""
        return x.mean(-1, keepdims=True)

    def embed(self, table: jax.Array, tokens: jax.Array) -> jax.Array:
        """Return the rows of `table`, (vocabulary, features), for token ids."""
        return table[tokens]

    def cross_entropy(self, table: jax.Array, x: jax.Array, labels: jax.Array) -> jax.Array:
        """Return the mean over tokens of the cross-entropy of the logits `x @ table.T`."""
        logits = (x @ table.T).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@dataclass(frozen=True, slots=True)
class Network:
    """A model under some layout: an embedding, blocks and a loss.

    Attributes:
        num_blocks: number of blocks.
        split: returns the parameters of each block, and the rest.
        join: the inverse of `split`.
        first: returns the input of the first block from (rest, batch).
        block: returns the output of a block from (its parameters, input), in the same shape.
        last: returns the loss from (rest, output of the last block, batch).
    """

    num_blocks: int
    split: Callable[[Params], tuple[list[Params], Params]]
    join: Callable[[list[Params], Params], Params]
    first: Callable[..., jax.Array]
    block: Callable[..., jax.Array]
    last: Callable[..., jax.Array]

    def loss(self, params: Params, batch: Params) -> jax.Array:
        """Return the loss of a forward pass on this device."""
        blocks, rest = self.split(params)
        x = self.first(rest, batch)
        for block in blocks:
            x = self.block(block, x)
        return self.last(rest, x, batch)


def network_of(model: Model, layout: Layout) -> Network:
    """Return the network of a model.

    Raises:
        ValueError: the model is not written by hand.
    """
    match model:
        case MLP(num_layers=layers) if layers % 2 == 0:
            return _mlp(model, layout)
        case MLP():
            raise ValueError(
                "layers of an MLP by hand go in pairs;"
                f" given num_layers={model.num_layers}, make it even"
            )
        case GPT(scan_layers=False):
            return _gpt(model, layout)
        case GPT():
            raise ValueError("GPT by hand has a block after the other; give it scan_layers=False")
    raise ValueError(
        f"MLP and GPT are written by hand; given {type(model).__name__}, use an automatic strategy"
    )


def product(x: jax.Array, params: Params) -> jax.Array:
    """Multiply `x` by a kernel, in the dtype of `x`."""
    return x @ params["kernel"].astype(x.dtype)


def _mlp(model: MLP, layout: Layout) -> Network:
    def split(params: Params) -> tuple[list[Params], Params]:
        layers = [params["params"][f"Dense_{i}"] for i in range(model.num_layers)]
        return [
            {"wide": w, "narrow": n} for w, n in zip(layers[::2], layers[1::2], strict=True)
        ], {}

    def join(blocks: list[Params], rest: Params) -> Params:
        layers = [block[name] for block in blocks for name in ("wide", "narrow")]
        return {"params": {f"Dense_{i}": layer for i, layer in enumerate(layers)}}

    def block(params: Params, x: jax.Array) -> jax.Array:
        return jax.nn.relu(
            layout.row(params["narrow"], jax.nn.relu(layout.column(params["wide"], x)))
        )

    def last(rest: Params, x: jax.Array, batch: Params) -> jax.Array:
        return jnp.mean((x - batch["y"]) ** 2)

    return Network(
        model.num_layers // 2,
        split,
        join,
        lambda rest, batch: batch["x"],
        layout.layer(block),
        last,
    )


def _gpt(model: GPT, layout: Layout) -> Network:
    def split(params: Params) -> tuple[list[Params], Params]:
        rest = dict(params["params"])
        return [rest.pop(f"block_{i}") for i in range(model.num_layers)], rest

    def join(blocks: list[Params], rest: Params) -> Params:
        return {"params": {**{f"block_{i}": block for i, block in enumerate(blocks)}, **rest}}

    def first(rest: Params, batch: Params) -> jax.Array:
        tables = [rest[name]["embedding"].astype(model.dtype) for name in ("tokens", "positions")]
        return layout.embed(tables[0], batch["tokens"]) + tables[1]

    def last(rest: Params, x: jax.Array, batch: Params) -> jax.Array:
        table = rest["tokens"]["embedding"] if model.tied_head else rest["head"]["kernel"].T
        return layout.cross_entropy(
            table.astype(x.dtype), _norm(layout, rest["norm"], x), batch["labels"]
        )

    block = partial(_gpt_block, layout, model.hidden_size // model.num_heads)
    parts = layout.layer(first), layout.layer(block, model.remat), layout.layer(last)
    return Network(model.num_layers, split, join, *parts)


def _gpt_block(layout: Layout, head_dim: int, params: Params, x: jax.Array) -> jax.Array:
    x = x + _attention(
        layout, head_dim, params["attention"], _norm(layout, params["LayerNorm_0"], x)
    )
    wide = layout.column(params["feed_forward"]["up"], _norm(layout, params["LayerNorm_1"], x))
    return x + layout.row(params["feed_forward"]["down"], jax.nn.gelu(wide))


def _attention(layout: Layout, head_dim: int, params: Params, x: jax.Array) -> jax.Array:
    """Apply causal attention with the heads of this device.

    The columns of `qkv` are queries, keys and values of the first head, then of the second, and so
    on.
    """
    qkv = layout.column(params["qkv"], x)
    batch, length, width = qkv.shape
    query, key, value = jnp.split(
        qkv.reshape(batch, length, width // (3 * head_dim), 3 * head_dim), 3, axis=-1
    )
    mixed = attend(query, key, value, causal=True)
    return layout.row(params["out"], mixed.reshape(batch, length, width // 3))


def _norm(layout: Layout, params: Params, x: jax.Array) -> jax.Array:
    """Apply layer normalization in float32."""
    wide = x.astype(jnp.float32)
    mean = layout.feature_mean(wide)
    variance = layout.feature_mean(wide**2) - mean**2
    scale = jax.lax.rsqrt(jnp.maximum(variance, 0) + 1e-6) * params["scale"]
    return ((wide - mean) * scale + params["bias"]).astype(x.dtype)
