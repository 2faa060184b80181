"""Data parallelism: the state is replicated, the batch is split."""

from collections.abc import Callable
from functools import partial
from typing import Any, override

from jax.sharding import Mesh, PartitionSpec

from autopar import manual
from experiments.by_hand.hand_written import HandWritten
from experiments.by_hand.networks import Params
from experiments.models import Model


class DataParallel(HandWritten):
    """The model's own step on each device's part of the batch, with averaged gradients."""

    axes = ("data",)

    @override
    def local_step(self, model: Model, mesh: Mesh) -> Callable[[Any, Params], Any]:
        return partial(model.train_step, value_and_grad=partial(manual.value_and_grad, axis="data"))

    @override
    def state_spec(self, path: str, ndim: int) -> PartitionSpec:
        return PartitionSpec()

    @override
    def batch_spec(self, name: str) -> PartitionSpec:
        return PartitionSpec("data")
