"""The strategies of the sweep: how each plans a step, runs it, and predicts it for a cluster.

To add one, write a subclass of `Strategy` (or use `Planned` with another method of autopar) and add
a line to `STRATEGIES`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, override

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import autopar
from autopar.util import memory_of
from experiments.by_hand import BY_HAND
from experiments.models.model import Model, ValueAndGrad
from experiments.planned_strategies import SCHEDULED, Automatic, Pipelined, Planned
from experiments.strategy import Runnable, Shape, SimulatedStep, Strategy, compile_here, simulated
from simulator import Cluster


@dataclass(frozen=True, slots=True)
class Serial(Strategy):
    """`jax.jit` with a donated state, on meshes of one device."""

    @override
    def runs_on(self, model: Model, mesh: Shape) -> bool:
        return prod(mesh) == 1

    @override
    def prepare(
        self, model: Model, mesh: Shape, plan: autopar.Plan | None, args: tuple[Any, Any]
    ) -> Runnable:
        placed = jax.device_put(args, jax.devices()[0])
        compiled, seconds = compile_here(jax.jit(model.train_step, donate_argnums=0), placed)
        return Runnable(compiled, placed, lambda result: result, memory_of(compiled).total, seconds)

    @override
    def predict(
        self, model: Model, mesh: Shape, plan: autopar.Plan | None, cluster: Cluster
    ) -> SimulatedStep:
        place = NamedSharding(autopar.target_mesh(cluster, (1,), ("device",)), PartitionSpec())
        args = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), model.abstract_args()
        )
        step = jax.jit(model.train_step, donate_argnums=0)
        return simulated(autopar.compile_for(step, args, cluster), cluster)


@dataclass(frozen=True, slots=True)
class Pmap(Strategy):
    """Data parallelism as in the Alpa quickstart: `jax.pmap` that averages gradients.

    The state is *not* donated, as in the quickstart.
    """

    @override
    def runs_on(self, model: Model, mesh: Shape) -> bool:
        return len(mesh) == 1

    @override
    def prepare(
        self, model: Model, mesh: Shape, plan: autopar.Plan | None, args: tuple[Any, Any]
    ) -> Runnable:
        devices = jax.devices()[: prod(mesh)]
        device_mesh = Mesh(np.array(devices), ("batch",), axis_types=(AxisType.Auto,))
        per_device = NamedSharding(device_mesh, PartitionSpec("batch"))
        placed = jax.device_put(_replicate_and_split(args, len(devices)), per_device)
        compiled, seconds = compile_here(_pmapped(model, devices), placed)
        gather = partial(jax.tree.map, lambda x: x[0])
        return Runnable(compiled, placed, gather, memory_of(compiled).total, seconds)

    @override
    def predict(
        self, model: Model, mesh: Shape, plan: autopar.Plan | None, cluster: Cluster
    ) -> SimulatedStep:
        devices = autopar.target_devices(cluster, prod(mesh))
        args = jax.eval_shape(
            partial(_replicate_and_split, count=len(devices)), model.abstract_args()
        )
        return simulated(autopar.compile_for(_pmapped(model, devices), args, cluster), cluster)


STRATEGIES: dict[str, Strategy] = {
    "serial": Serial(),
    "pmap": Pmap(),
    "data": Planned(autopar.DataParallel),
    "zero2": Planned(autopar.Zero2Parallel),
    "zero3": Planned(autopar.Zero3Parallel),
    "shard": Planned(autopar.ShardParallel),
    "heuristic": Planned(
        partial(autopar.ShardParallel, options=autopar.ShardingOptions(mode="heuristic"))
    ),
    "pipeline": Pipelined(),
    "pipeshard": Automatic(),
    **BY_HAND,
    **SCHEDULED,
}


def _replicate_and_split(args: tuple[Any, Any], count: int) -> tuple[Any, Any]:
    """Return the state copied and the batch split `count` times along a new dim 0, for pmap."""

    def split(x: jax.Array) -> jax.Array:
        if x.shape[0] % count:
            raise ValueError(
                f"a batch of {x.shape[0]} can't be split over {count} devices;"
                f" use a multiple of {count}"
            )
        return x.reshape(count, x.shape[0] // count, *x.shape[1:])

    state, batch = args
    replicas = jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *jnp.shape(x))), state)
    return replicas, jax.tree.map(split, batch)


def _pmapped(model: Model, devices: Any) -> Any:
    """Return the training step under pmap, with gradients averaged over `devices`."""

    def averaged(fun: Callable, **options: Any) -> Callable:
        return lambda *args: jax.lax.pmean(
            jax.value_and_grad(fun, **options)(*args), axis_name="batch"
        )

    value_and_grad: ValueAndGrad = averaged
    return jax.pmap(
        partial(model.train_step, value_and_grad=value_and_grad), axis_name="batch", devices=devices
    )
