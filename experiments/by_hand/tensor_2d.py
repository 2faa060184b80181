"""Two-dimensional tensor parallelism: every weight is split into blocks over both mesh axes.

Weights are never communicated (Pope et al., 2022, section 3.2). Layers alternate between the axes:
one contracts features split over `rows` and leaves its outputs split over `columns`, the next the
reverse. Each needs a single all_reduce, of its partial sums over the axis that it contracts.
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
    (r"(qkv|up|wide|head)/kernel$", PartitionSpec("rows", "columns")),
    (r"(qkv|up|wide)/bias$", PartitionSpec("columns")),
    (r"(out|down|narrow)/kernel$", PartitionSpec("columns", "rows")),
    (r"tokens/embedding$", PartitionSpec("columns", "rows")),
    (r"positions/embedding$", PartitionSpec(None, "rows")),
    (r"(bias|scale)$", PartitionSpec("rows")),
)
"""Specs of parameters, by the ends of their paths."""


class Blocks(Layout):
    """Features are split over `rows` between layers, and over `columns` where they are wide."""

    @override
    def column(self, params: Params, x: jax.Array) -> jax.Array:
        return manual.all_reduce(product(x, params), "rows") + params["bias"].astype(x.dtype)

    @override
    def row(self, params: Params, x: jax.Array) -> jax.Array:
        return manual.all_reduce(product(x, params), "columns") + params["bias"].astype(x.dtype)

    @override
    def feature_mean(self, x: jax.Array) -> jax.Array:
        return jax.lax.pmean(x.mean(-1, keepdims=True), "rows")

    @override
    def embed(self, table: jax.Array, tokens: jax.Array) -> jax.Array:
        return manual.all_reduce(vocabulary.lookup(table, tokens, "columns"), "columns")

    @override
    def cross_entropy(self, table: jax.Array, x: jax.Array, labels: jax.Array) -> jax.Array:
        return vocabulary.cross_entropy(manual.all_reduce(x @ table.T, "rows"), labels, "columns")


class Tensor2D(HandWritten):
    """Features are split over `rows`; heads, hidden layers and vocabulary over `columns`.

    Every device has the whole batch.
    """

    axes = ("rows", "columns")
    heads_axis = "columns"

    @override
    def local_step(self, model: Model, mesh: Mesh) -> Callable[[Any, Params], Any]:
        # GPT's loss is the same on all devices; an MLP's is that of the device's own features.
        axis = () if isinstance(model, GPT) else "rows"
        return with_loss(model, network_of(model, Blocks()).loss, axis=axis)

    @override
    def state_spec(self, path: str, ndim: int) -> PartitionSpec:
        return spec_of(path, _SPECS)

    @override
    def batch_spec(self, name: str) -> PartitionSpec:
        return PartitionSpec() if name in ("tokens", "labels") else PartitionSpec(None, "rows")
