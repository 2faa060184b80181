"""Fully sharded data parallelism (Zhao et al., 2023; ZeRO-3 of Rajbhandari et al., 2020): weights are gathered where they are used."""

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec

from autopar import manual
from experiments.by_hand.hand_written import HandWritten, with_loss
from experiments.by_hand.networks import Layout, Params, network_of
from experiments.models import Model

_GATHERED = "gathered"


class GatherOnUse(Layout):
    """Each layer gathers its weights in the dtype it computes in, and again in the backward pass instead of keeping them.

    The transpose of the gathering is the reduce_scatter of the gradients, so that there is nothing more to write. What a layer is
    given and doesn't use is not gathered: XLA drops that.
    """

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype

    def layer(self, function: Callable[..., Any], remat: bool = False) -> Callable[..., Any]:
        def gathered(params: Params, *activations: Any) -> Any:
            return function(jax.tree.map(self._gather, params), *activations)

        all_but_weights = jax.checkpoint_policies.save_anything_except_these_names(_GATHERED)
        return jax.checkpoint(gathered, policy=None if remat else all_but_weights)

    def _gather(self, shard: jax.Array) -> jax.Array:
        computed_in = (
            shard.astype(self._dtype) if shard.ndim > 1 else shard
        )  # normalisation is computed in float32
        return checkpoint_name(manual.all_gather(computed_in, "data", dim=0), _GATHERED)


class Fsdp(HandWritten):
    """Dim 0 of every parameter, and of the optimizer's state, is split over the devices that the batch is split over."""

    axes = ("data",)

    def local_step(self, model: Model, mesh: Mesh) -> Callable[[Any, Params], Any]:
        return with_loss(model, network_of(model, GatherOnUse(model.dtype)).loss, axis="data")

    def state_spec(self, path: str, ndim: int) -> PartitionSpec:
        return PartitionSpec("data") if ndim else PartitionSpec()

    def batch_spec(self, name: str) -> PartitionSpec:
        return PartitionSpec("data")
