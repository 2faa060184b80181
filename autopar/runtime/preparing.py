"""Compute prepared inputs (`autopar.ir.preparation`) on the devices of this process."""

from collections.abc import Sequence

import jax
from jax.sharding import NamedSharding, PartitionSpec

from autopar.ir.preparation import Preparation


class Preparer:
    """Computes inputs of a step from its arguments (`autopar.microbatch.prepared_inputs`)."""

    def __init__(self, preparation: Preparation, homes: Sequence[NamedSharding]) -> None:
        """Compile nothing yet.

        Args:
            preparation: what to compute.
            homes: where the step wants the inputs.
        """
        self._reads = preparation.reads
        self._homes = list(homes)
        self._compute = jax.jit(preparation.compute)
        # Several programs with collectives in flight could block all threads of virtual devices.
        self._waits = any(device.platform == "cpu" for device in homes[0].device_set)

    def __call__(self, leaves: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the inputs, from the leaves of the step's arguments.

        Arguments of several meshes are brought together on the first one.
        """
        operands = [leaves[i] for i in self._reads]
        if len({frozenset(operand.sharding.device_set) for operand in operands}) > 1:
            mesh = self._homes[0].mesh
            operands = jax.device_put(operands, NamedSharding(mesh, PartitionSpec()))
        results = jax.device_put(self._compute(*operands), self._homes)
        return jax.block_until_ready(results) if self._waits else results
