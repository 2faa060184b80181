"""The base class of hand-written strategies: a program for one device, and its arguments' specs."""

import re
from abc import abstractmethod
from collections.abc import Callable
from math import prod
from typing import Any, ClassVar, override

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

import autopar
from autopar import manual
from autopar.util import memory_of
from experiments.by_hand.networks import Layout, Params, network_of
from experiments.models import GPT, MLP, Model
from experiments.strategy import Runnable, Shape, SimulatedStep, Strategy, compile_here, simulated
from simulator import Cluster


class HandWritten(Strategy):
    """A strategy for MLP and GPT: a program for one device's shards, with explicit collectives.

    Attributes:
        axes: names of the mesh axes, as many as a mesh must have.
        heads_axis: the axis that attention heads are split over, if any.
    """

    axes: ClassVar[tuple[str, ...]]
    heads_axis: ClassVar[str | None] = None

    @abstractmethod
    def local_step(self, model: Model, mesh: Mesh) -> Callable[[Any, Params], Any]:
        """Return `model.train_step` as one device runs it."""

    @abstractmethod
    def state_spec(self, path: str, ndim: int) -> PartitionSpec:
        """Return the spec of a parameter or its moments; `path` joins its keys with slashes."""

    @abstractmethod
    def batch_spec(self, name: str) -> PartitionSpec:
        """Return the spec of an array of the batch."""

    def arrange(self, model: Model, mesh: Mesh, state: Any) -> Any:
        """Return the model's state, of arrays, in the structure that the program takes."""
        return state

    def restore(self, model: Model, state: Any) -> Any:
        """Return the state in the structure of the model; the inverse of `arrange`."""
        return state

    @override
    def runs_on(self, model: Model, mesh: Shape) -> bool:
        return isinstance(model, MLP | GPT) and len(mesh) == len(self.axes) and prod(mesh) > 1

    @override
    def prepare(
        self, model: Model, mesh: Shape, plan: autopar.Plan | None, args: tuple[Any, Any]
    ) -> Runnable:
        names = self._axes_of(mesh)
        devices = np.array(jax.devices()[: prod(mesh)]).reshape(mesh)
        device_mesh = Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))
        state, batch = args
        arranged = (self.arrange(model, device_mesh, state), batch)
        step, places = self._step(model, device_mesh, arranged)
        placed = jax.device_put(arranged, places)
        compiled, seconds = compile_here(step, placed)

        def gather(result: Any) -> Any:
            state, *loss = jax.device_get(result if type(result) is tuple else (result,))
            restored = self.restore(model, state)
            return (restored, *loss) if loss else restored

        return Runnable(compiled, placed, gather, memory_of(compiled).total, seconds)

    @override
    def predict(
        self, model: Model, mesh: Shape, plan: autopar.Plan | None, cluster: Cluster
    ) -> SimulatedStep:
        target_mesh = autopar.target_mesh(cluster, mesh, self._axes_of(mesh))
        state, batch = model.abstract_args()
        arranged = (
            jax.eval_shape(lambda state: self.arrange(model, target_mesh, state), state),
            batch,
        )
        step, places = self._step(model, target_mesh, arranged)
        args = jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
            arranged,
            places,
        )
        return simulated(autopar.compile_for(step, args, cluster), cluster)

    def _axes_of(self, mesh: Shape) -> tuple[str, ...]:
        if len(mesh) != len(self.axes):
            raise ValueError(
                f"{type(self).__name__} has the mesh axes {', '.join(self.axes)}; given a mesh of"
                f" {len(mesh)} axes, {mesh}"
            )
        return self.axes

    def _check(self, model: Model, mesh: Mesh) -> None:
        """Refuse models that are not written by hand, and heads that the devices do not divide."""
        network_of(model, Layout())
        if (
            isinstance(model, GPT)
            and self.heads_axis
            and model.num_heads % (count := mesh.shape[self.heads_axis])
        ):
            raise ValueError(
                f"{model.num_heads} heads can't be split over the {count} devices along"
                f" {self.heads_axis}; use a multiple of {count}"
            )

    def _step(self, model: Model, mesh: Mesh, args: tuple[Any, Any]) -> tuple[Any, tuple[Any, Any]]:
        """Return the jitted step, which donates its state, and the shardings of its arguments."""
        self._check(model, mesh)
        state, batch = args
        state_specs = jax.tree_util.tree_map_with_path(
            lambda path, x: self.state_spec(
                jax.tree_util.keystr(path, simple=True, separator="/"), x.ndim
            ),
            state,
        )
        batch_specs = {name: self.batch_spec(name) for name in batch}
        returns_loss = type(jax.eval_shape(model.train_step, *model.abstract_args())) is tuple
        step = jax.shard_map(
            self.local_step(model, mesh),
            mesh=mesh,
            in_specs=(state_specs, batch_specs),
            out_specs=(state_specs, PartitionSpec()) if returns_loss else state_specs,
        )
        places: tuple[Any, Any] = manual.shardings(mesh, (state_specs, batch_specs), args)
        return jax.jit(step, donate_argnums=0), places


def with_loss(
    model: Model, loss: Callable[[Params, Params], jax.Array], axis: manual.AxisName
) -> Callable[[Any, Params], Any]:
    """Return the model's training step with another loss: the mean along `axis` of `loss`.

    Args:
        model: the model.
        loss: returns the loss of (parameters, batch) on one device.
        axis: mesh axes along which the loss differs from device to device.
    """

    def step(state: Any, batch: Params) -> Any:
        def value_and_grad(_: Callable) -> Callable:
            return manual.value_and_grad(lambda params: loss(params, batch), axis=axis)

        return model.train_step(state, batch, value_and_grad=value_and_grad)

    return step


def spec_of(path: str, specs: tuple[tuple[str, PartitionSpec], ...]) -> PartitionSpec:
    """Return the first of `specs` whose pattern matches a path; replicated if none does.

    Args:
        path: the keys of a parameter, joined by slashes. `Dense_0`, `Dense_1`, ... of an MLP are
            called wide and narrow in turn.
        specs: patterns and specs.
    """
    path = re.sub(r"Dense_(\d+)", lambda match: "narrow" if int(match[1]) % 2 else "wide", path)
    return next((spec for pattern, spec in specs if re.search(pattern, path)), PartitionSpec())
