"""Fully sharded data parallelism: weights are sharded, and gathered before each use.

FSDP (Zhao et al., 2023) is what ZeRO-3 (Rajbhandari et al., 2020) describes.
"""

from collections.abc import Callable
from typing import Any, override

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec

from autopar import manual
from experiments.by_hand.hand_written import HandWritten, with_loss
from experiments.by_hand.networks import Layout, Params, network_of
from experiments.models import Model

_GATHERED = "gathered"


class GatherOnUse(Layout):
    """Each layer gathers its weights in the dtype it computes in, and again in the backward pass.

    The transpose of all_gather is the reduce_scatter of the gradients, so the backward pass needs
    no code of its own. XLA removes the gathering of parameters that a layer does not use.
    """

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype

    @override
    def layer(self, function: Callable[..., Any], remat: bool = False) -> Callable[..., Any]:
        def gathered(params: Params, *activations: Any) -> Any:
            return function(jax.tree.map(self._gather, params), *activations)

        all_but_weights = jax.checkpoint_policies.save_anything_except_these_names(_GATHERED)
        return jax.checkpoint(gathered, policy=None if remat else all_but_weights)

    def _gather(self, shard: jax.Array) -> jax.Array:
        # Parameters of one dim belong to normalization, which computes in float32.
        cast = shard.astype(self._dtype) if shard.ndim > 1 else shard
        return checkpoint_name(manual.all_gather(cast, "data", dim=0), _GATHERED)


class Fsdp(HandWritten):
    """Dim 0 of every parameter and of the optimizer's state is split over the axis of the batch."""

    axes = ("data",)

    @override
    def local_step(self, model: Model, mesh: Mesh) -> Callable[[Any, Params], Any]:
        return with_loss(model, network_of(model, GatherOnUse(model.dtype)).loss, axis="data")

    @override
    def state_spec(self, path: str, ndim: int) -> PartitionSpec:
        return PartitionSpec("data") if ndim else PartitionSpec()

    @override
    def batch_spec(self, name: str) -> PartitionSpec:
        return PartitionSpec("data")
