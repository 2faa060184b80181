"""A pipeline as one program for all devices, which shift activations along a ring.

Each device of the ring is a stage. In every tick it runs its blocks, and a ppermute sends the
result to the next one.
"""

from collections.abc import Callable
from math import ceil, gcd
from typing import Any, override

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from autopar import manual
from experiments.by_hand.hand_written import HandWritten, with_loss
from experiments.by_hand.networks import Layout, Network, Params, network_of
from experiments.models import Model


class Pipeline(HandWritten):
    """Blocks are split over `stage`; embedding and head are replicated, and split by the batch.

    All forward passes come before all backward ones (GPipe; Huang et al., 2019), since JAX
    transposes the loop over ticks. If the number of stages does not divide that of blocks, the last
    stages ignore the results of some, but take as long as the others, since all run one program.
    """

    axes = ("stage",)

    @override
    def local_step(self, model: Model, mesh: Mesh) -> Callable[[Any, Params], Any]:
        network, stages = network_of(model, Layout()), mesh.shape["stage"]
        # Several microbatches for each stage keep the bubble small.
        num_micro_batches = gcd(model.batch_size, 4 * stages)

        def loss(params: Params, batch: Params) -> jax.Array:
            blocks, rest = params["blocks"], params["rest"]
            x = network.first(rest, batch)
            micro = x.reshape(num_micro_batches, -1, *x.shape[1:])
            last = _through_ring(micro, lambda x: _own_blocks(network, blocks, x), stages)
            return network.last(rest, last.reshape(-1, *x.shape[1:]), batch)

        return with_loss(model, loss, axis="stage")

    @override
    def state_spec(self, path: str, ndim: int) -> PartitionSpec:
        return PartitionSpec("stage") if "/blocks/" in f"/{path}" else PartitionSpec()

    @override
    def batch_spec(self, name: str) -> PartitionSpec:
        return PartitionSpec("stage") if name in ("y", "labels") else PartitionSpec()

    @override
    def arrange(self, model: Model, mesh: Mesh, state: Any) -> Any:
        network, stages = network_of(model, Layout()), mesh.shape["stage"]

        def stack(params: Params) -> Params:
            blocks, rest = network.split(params)
            unused = stages * ceil(len(blocks) / stages) - len(blocks)
            blocks += [jax.tree.map(jnp.zeros_like, blocks[0])] * unused
            return {
                "blocks": jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks),
                "rest": rest,
            }

        return _map_params(stack, "params", state)

    @override
    def restore(self, model: Model, state: Any) -> Any:
        network = network_of(model, Layout())

        def unstack(params: Params) -> Params:
            blocks = [
                jax.tree.map(lambda leaf, i=i: leaf[i], params["blocks"])
                for i in range(network.num_blocks)
            ]
            return network.join(blocks, params["rest"])

        return _map_params(unstack, "blocks", state)


def _through_ring(
    micro: jax.Array, stage_function: Callable[[jax.Array], jax.Array], stages: int
) -> jax.Array:
    """Send every microbatch through all stages.

    Args:
        micro: microbatches along dim 0, the same on every stage.
        stage_function: runs the blocks of this stage.
        stages: number of stages.

    Returns:
        Outputs of the last stage for a part of the microbatches: stage i gets the i-th part.
    """
    stage = jax.lax.axis_index("stage")
    entering = jnp.where(stage == 0, micro, 0)

    def tick(received: jax.Array, entering: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = stage_function(jnp.where(stage == 0, entering, received))
        return manual.shift(out, "stage"), out

    # Microbatch m is in stage i at tick m + i, so the ring runs on for `stages - 1` ticks after the
    # last one has entered.
    drain = jnp.zeros_like(entering[: stages - 1])
    _, out = jax.lax.scan(tick, jnp.zeros_like(entering[0]), jnp.concatenate([entering, drain]))
    finished = jnp.where(stage == stages - 1, out[stages - 1 :], 0)
    return manual.reduce_scatter(finished, "stage", dim=0)


def _own_blocks(network: Network, blocks: Params, x: jax.Array) -> jax.Array:
    """Run the blocks of this stage, with stacked parameters; those past the last are identities."""
    places = len(jax.tree.leaves(blocks)[0])
    for place in range(places):
        out = network.block(jax.tree.map(lambda leaf, place=place: leaf[place], blocks), x)
        number = jax.lax.axis_index("stage") * places + place
        x = jnp.where(number < network.num_blocks, out, x)
    return x


def _map_params(function: Callable[[Params], Params], key: str, state: Any) -> Any:
    """Apply a function to the parameters and their moments, which are the dicts that have `key`."""

    def is_params(node: Any) -> bool:
        return isinstance(node, dict) and key in node

    return jax.tree.map(
        lambda node: function(node) if is_params(node) else node, state, is_leaf=is_params
    )
