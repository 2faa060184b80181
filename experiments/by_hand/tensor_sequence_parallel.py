"""Megatron-LM's tensor parallelism (Shoeybi et al., 2019) with sequence parallelism (Korthikanti et al., 2022), and data parallelism.

Layers alternate between columns and rows along the axis `tensor`. Before a column layer the tokens are gathered, after a row layer its
partial sums are scattered over the tokens, so that everything in between works on a part of the tokens.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from autopar import manual
from experiments.by_hand import vocabulary
from experiments.by_hand.hand_written import HandWritten, spec_of, with_loss
from experiments.by_hand.networks import Layout, Params, network_of, product
from experiments.models import GPT, Model

_SPECS = (
    (r"(qkv|up|wide|head)/kernel$", PartitionSpec(None, "tensor")),
    (r"(qkv|up|wide)/bias$", PartitionSpec("tensor")),
    (r"(out|down|narrow)/kernel$", PartitionSpec("tensor", None)),
    (r"(tokens|positions)/embedding$", PartitionSpec("tensor", None)),
)
"""Where parameters go, by the ends of their paths. A device has the positions of its part of the tokens."""


class ColumnRow(Layout):
    """Activations between a row layer and the next column layer are split by tokens, the others by features."""

    def column(self, params: Params, x: jax.Array) -> jax.Array:
        return product(_all_tokens(x), params) + params["bias"].astype(x.dtype)

    def row(self, params: Params, x: jax.Array) -> jax.Array:
        return _own_tokens(product(x, params)) + params["bias"].astype(x.dtype)

    def embed(self, table: jax.Array, tokens: jax.Array) -> jax.Array:
        tokens = manual.all_gather(tokens, "tensor", dim=1)
        return _own_tokens(vocabulary.lookup(table, tokens, "tensor"))

    def cross_entropy(self, table: jax.Array, x: jax.Array, labels: jax.Array) -> jax.Array:
        labels = manual.all_gather(labels, "tensor", dim=1)
        return vocabulary.cross_entropy(_all_tokens(x) @ table.T, labels, "tensor")


class Megatron(HandWritten):
    """Batch over `data`; tokens (of an MLP: examples), heads, hidden layers and vocabulary over `tensor`."""

    axes = ("data", "tensor")
    heads_axis = "tensor"

    def local_step(self, model: Model, mesh: Mesh) -> Callable[[Any, Params], Any]:
        # GPT's loss is the same along `tensor`; that of an MLP is of the device's own examples.
        axis = "data" if isinstance(model, GPT) else self.axes
        return with_loss(model, network_of(model, ColumnRow()).loss, axis=axis)

    def state_spec(self, path: str, ndim: int) -> PartitionSpec:
        return spec_of(path, _SPECS)

    def batch_spec(self, name: str) -> PartitionSpec:
        return (
            PartitionSpec("data", "tensor")
            if name in ("tokens", "labels")
            else PartitionSpec(("data", "tensor"))
        )


def _all_tokens(x: jax.Array) -> jax.Array:
    return manual.all_gather(x, "tensor", dim=x.ndim - 2)


def _own_tokens(x: jax.Array) -> jax.Array:
    return manual.reduce_scatter(x, "tensor", dim=x.ndim - 2)
