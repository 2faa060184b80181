"""Seconds on a logical mesh: kernels, collectives along mesh axes, and changes of spec."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from autopar.sharding.spec import LogicalMesh, Spec
from simulator.costs import CostModel
from simulator.work import CollectiveKind, Groups, Kernel

type Step = tuple[CollectiveKind, float, tuple[str, ...]]
"""A collective, its `num_bytes` (as in `simulator.work.Collective`) and the mesh axes it runs along."""


@dataclass(frozen=True, eq=False)
class MeshCosts:
    """A cost model seen through the axes of a logical mesh."""

    mesh: LogicalMesh
    model: CostModel

    @lru_cache  # noqa: B019 (one per planning run)
    def groups(self, axes: tuple[str, ...]) -> Groups:
        return self.mesh.groups(axes)

    @lru_cache  # noqa: B019
    def collective(self, kind: CollectiveKind, num_bytes: float, axes: tuple[str, ...]) -> float:
        """Seconds of one collective along `axes` (nothing to do along none)."""
        return self.model.collective(kind, num_bytes, self.groups(axes)) if axes and num_bytes else 0.0

    @lru_cache  # noqa: B019
    def reshard(self, num_bytes: float, source: Spec, target: Spec) -> float:
        """Seconds to bring an array of `num_bytes` (the whole of it) from `source` to `target`."""
        return sum(self.collective(*step) for step in reshard_steps(num_bytes, source, target, self.mesh))

    @lru_cache  # noqa: B019
    def reshard_matrix(self, num_bytes: float, sources: tuple[Spec, ...], targets: tuple[Spec, ...]) -> np.ndarray:
        """Seconds for every pair of specs, (sources, targets)."""
        return np.array([[self.reshard(num_bytes, source, target) for target in targets] for source in sources])


class Combined:
    """A cost model of collectives that the compiler combines with others of their kind, as it does those of weights.

    One adds its share of a large collective's time, and no latency.
    """

    _REST = 64e6  # bytes of the others; any amount at which bandwidth decides

    def __init__(self, model: CostModel) -> None:
        self.model = model

    def kernel(self, kernel: Kernel) -> float:
        return self.model.kernel(kernel)

    def collective(self, kind: CollectiveKind, num_bytes: float, groups: Groups) -> float:
        others = self.model.collective(kind, self._REST, groups)
        return self.model.collective(kind, num_bytes + self._REST, groups) - others


def reshard_steps(num_bytes: float, source: Spec, target: Spec, mesh: LogicalMesh) -> Iterator[Step]:
    """The collectives that bring an array of `num_bytes` from `source` to `target`.

    Axes that appear are local slices and cost nothing; axes that move to another dim are an all_to_all; axes that vanish
    are an all_gather for each dim they shard, taken last, when the array is as small as it gets.
    """
    if source == target:
        return
    before = {axis: (dim, position) for dim, axes in enumerate(source) for position, axis in enumerate(axes)}
    after = {axis: (dim, position) for dim, axes in enumerate(target) for position, axis in enumerate(axes)}
    moved = tuple(axis for axis in before if axis in after and before[axis] != after[axis])
    local = num_bytes / mesh.ways(before.keys() | after.keys())
    if moved:
        yield "all_to_all", local, moved
    for axes in source:
        if gone := tuple(axis for axis in axes if axis not in after):
            local *= mesh.ways(gone)
            yield "all_gather", local, gone
