"""Megatron-LM's tensor and sequence parallelism, and data parallelism.

Tensor parallelism (Shoeybi et al., 2019) alternates between layers split by columns and by rows
along the axis `tensor`. Sequence parallelism (Korthikanti et al., 2022) gathers the tokens before a
column layer and scatters the partial sums of a row layer over the tokens, so that everything
between a row layer and the next column layer works on a part of the tokens.
"""

from collections.abc import Callable
from typing import Any, override

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
"""Specs of parameters, by the ends of their paths; positions are split like the tokens."""


class ColumnRow(Layout):
    """Activations are split by tokens between a row and a column layer, elsewhere by features."""

    @override
    def column(self, params: Params, x: jax.Array) -> jax.Array:
        return product(_all_tokens(x), params) + params["bias"].astype(x.dtype)

    @override
    def row(self, params: Params, x: jax.Array) -> jax.Array:
        return _own_tokens(product(x, params)) + params["bias"].astype(x.dtype)

    @override
    def embed(self, table: jax.Array, tokens: jax.Array) -> jax.Array:
        tokens = manual.all_gather(tokens, "tensor", dim=1)
        return _own_tokens(vocabulary.lookup(table, tokens, "tensor"))

    @override
    def cross_entropy(self, table: jax.Array, x: jax.Array, labels: jax.Array) -> jax.Array:
        labels = manual.all_gather(labels, "tensor", dim=1)
        return vocabulary.cross_entropy(_all_tokens(x) @ table.T, labels, "tensor")


class Megatron(HandWritten):
    """The batch is split over `data`; heads, hidden layers, vocabulary and tokens over `tensor`.

    The examples of an MLP take the place of tokens.
    """

    axes = ("data", "tensor")
    heads_axis = "tensor"

    @override
    def local_step(self, model: Model, mesh: Mesh) -> Callable[[Any, Params], Any]:
        # GPT's loss is the same along `tensor`; an MLP's is that of the device's own examples.
        axis = "data" if isinstance(model, GPT) else self.axes
        return with_loss(model, network_of(model, ColumnRow()).loss, axis=axis)

    @override
    def state_spec(self, path: str, ndim: int) -> PartitionSpec:
        return spec_of(path, _SPECS)

    @override
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
