"""Training steps sharded by annotations, as experts write them.

Parameters and the results of modules have shardings, and XLA propagates the others. Tensor
parallelism follows Megatron-LM (Shoeybi et al., 2019): queries, keys, values and the first
feed-forward layer are split by columns, the layers after them by rows, embeddings by vocabulary.
Experts are split as in GShard (Lepikhin et al., 2020). FSDP also splits each parameter and its
optimizer state over the devices that have different data.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import autopar
from experiments.models.model import Model
from simulator import Cluster

_PARAMETERS: tuple[tuple[str, int], ...] = (
    (r"(qkv|up)/(kernel|bias)$", -1),
    (r"(out|down)/kernel$", -2),
    (r"experts/(up|down)$", 0),
    (r"tokens/embedding$", 0),
    (r"/Conv_1/kernel$", -1),
    (r"/BatchNorm_1/(scale|bias|mean|var)$", -1),
    (r"/Conv_2/kernel$", -2),
)
"""The dim of a parameter that tensor parallelism shards, by the pattern of its path."""

_SPLIT_RESULTS = re.compile(r"(qkv|up|Conv_1|BatchNorm_1)$")
"""Modules whose results are sharded in their last dim by tensor parallelism."""


@dataclass(frozen=True, slots=True)
class Annotations:
    """The use of the mesh axes; an empty name stands for no axis.

    Attributes:
        data: the axis that the batch is split over.
        tensor: the axis that columns, rows, vocabulary and experts of parameters are split over.
        fsdp: whether every parameter is also split over `data`.
    """

    data: str = ""
    tensor: str = ""
    fsdp: bool = False

    def compile(
        self, model: Model, mesh_shape: tuple[int, ...], cluster: Cluster
    ) -> autopar.TargetExecutable:
        """Compile the model's step, which donates the state and keeps its shardings.

        Args:
            model: the model.
            mesh_shape: shape of the mesh, whose axes are called x, y, ...
            cluster: the cluster whose first devices it is compiled for.
        """
        mesh = autopar.target_mesh(cluster, mesh_shape, tuple("xyz"[: len(mesh_shape)]))
        state, batch = model.abstract_args()

        def place(path: Any, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            spec = self.parameter_spec(
                jax.tree_util.keystr(path, simple=True, separator="/"), x.shape, mesh
            )
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

        rows = NamedSharding(mesh, PartitionSpec(self.data or None))
        state = jax.tree_util.tree_map_with_path(place, state)
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows), batch)

        def step(state: Any, batch: Any) -> Any:
            with nn.intercept_methods(self._constrain(mesh)):
                return model.train_step(state, batch)

        shardings = jax.tree.map(lambda x: x.sharding, state)
        whole = NamedSharding(mesh, PartitionSpec())
        jitted = jax.jit(
            step,
            donate_argnums=0,
            out_shardings=shardings if _returns_state_only(model) else (shardings, whole),
        )
        return autopar.compile_for(jitted, (state, batch), cluster)

    def parameter_spec(self, path: str, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
        """Return the spec of a parameter or its moments, by its path and shape."""
        axes: list[str | None] = [None] * len(shape)
        if self.tensor:
            for pattern, dim in _PARAMETERS:
                if re.search(pattern, path) and shape[dim] % mesh.shape[self.tensor] == 0:
                    axes[dim] = self.tensor
        if self.fsdp and prod(shape) > 1:
            free = [
                d
                for d, axis in enumerate(axes)
                if axis is None and shape[d] % mesh.shape[self.data] == 0
            ]
            if free:
                axes[max(free, key=lambda d: shape[d])] = self.data
        return PartitionSpec(*axes)

    def _constrain(self, mesh: Mesh) -> Callable[..., Any]:
        """Return a Flax interceptor that shards the results of modules.

        The batch is split over `data`, and after layers split by columns the last dim over
        `tensor`.
        """

        def pin(name: str, x: Any) -> Any:
            if not isinstance(x, jax.Array) or x.ndim < 2:
                return x
            axes: list[str | None] = [None] * x.ndim
            if self.data and x.shape[0] % mesh.shape[self.data] == 0:
                axes[0] = self.data
            if (
                self.tensor
                and _SPLIT_RESULTS.search(name)
                and x.shape[-1] % mesh.shape[self.tensor] == 0
            ):
                axes[-1] = self.tensor
            return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*axes)))

        def interceptor(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
            result = call(*args, **kwargs)
            name = context.module.name
            has_batch = context.method_name == "__call__" and name and name != "positions"
            return jax.tree.map(lambda x: pin(name, x), result) if has_batch else result

        return interceptor


def _returns_state_only(model: Model) -> bool:
    result = jax.eval_shape(model.train_step, *model.abstract_args())
    return not isinstance(result, tuple)
