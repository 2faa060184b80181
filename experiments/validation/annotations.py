"""Training steps sharded by annotations, as experts do it: on parameters and module results, from where XLA propagates the rest.

Tensor parallelism follows Megatron-LM (Shoeybi et al., 2019): queries, keys, values and the first feed-forward layer by columns, the
layers after them by rows, embeddings by vocabulary; experts are spread as in GShard (Lepikhin et al., 2020). FSDP shards
what is left of each parameter, and its optimizer state, over the devices that see different data.
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
"""Which dim of a parameter tensor parallelism shards, by its path."""

_SPLIT_RESULTS = re.compile(r"(qkv|up|Conv_1|BatchNorm_1)$")
"""Modules whose results tensor parallelism leaves sharded in their last dim."""


@dataclass(frozen=True, slots=True)
class Annotations:
    """Mesh axes and what they are for; an empty name is no axis.

    Attributes:
        data: shards the batch.
        tensor: shards the parameters' columns, rows, vocabulary and experts.
        fsdp: also shard every parameter over `data`.
    """

    data: str = ""
    tensor: str = ""
    fsdp: bool = False

    def compile(
        self, model: Model, mesh_shape: tuple[int, ...], cluster: Cluster
    ) -> autopar.TargetExecutable:
        """The model's step for the first devices of `cluster`, the state donated and kept where it is. Axes are x, y, ..."""
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

        kept = jax.tree.map(lambda x: x.sharding, state)
        whole = NamedSharding(mesh, PartitionSpec())
        jitted = jax.jit(
            step,
            donate_argnums=0,
            out_shardings=kept if _returns_state_only(model) else (kept, whole),
        )
        return autopar.compile_for(jitted, (state, batch), cluster)

    def parameter_spec(self, path: str, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
        """Where a parameter, or what the optimizer keeps of it, lives."""
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
        """Pins what modules return: the batch over `data`, and the last dim over `tensor` after the layers split by columns."""

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
