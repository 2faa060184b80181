"""Seconds on a logical mesh: kernels, collectives along mesh axes, and changes of spec."""

import math
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from autopar.ir.spec import LogicalMesh, Spec, axes_of
from autopar.sharding.distinct_options import each_once
from simulator.costs.cost_model import CostModel
from simulator.spans import Link
from simulator.work import CollectiveKind, Groups, Kernel


class Seconds(NamedTuple):
    """What time goes to: kernels, completing partial results, and bringing values where they are wanted."""

    compute: float
    communication: float
    resharding: float


type Step = tuple[CollectiveKind, float, tuple[str, ...]]
"""A collective, its `num_bytes` (as in `simulator.work.Collective`) and the mesh axes it runs along."""


@dataclass(frozen=True, eq=False)
class MeshCosts:
    """A cost model seen through the axes of a logical mesh.

    Attributes:
        memo: what enumerating decisions found out for this mesh: repeated layers, and stages that are alike, ask again.
    """

    mesh: LogicalMesh
    model: CostModel
    forbidden: frozenset[CollectiveKind] = frozenset()
    memo: dict[Any, dict[Any, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Have answers remembered, for as long as there are these costs."""
        for method in (self.groups, self.collective, self.reshard, self.reshard_matrix):
            object.__setattr__(self, method.__name__, lru_cache(maxsize=1 << 18)(method))

    def groups(self, axes: tuple[str, ...]) -> Groups:
        return self.mesh.groups(axes)

    def collective(self, kind: CollectiveKind, num_bytes: float, axes: tuple[str, ...]) -> float:
        """Seconds of one collective along `axes` (nothing to do along none); infinite for a forbidden one."""
        if kind in self.forbidden and axes and num_bytes:
            return math.inf
        return (
            self.model.collective(kind, num_bytes, self.groups(axes)) if axes and num_bytes else 0.0
        )

    def reshard(self, num_bytes: float, source: Spec, target: Spec) -> float:
        """Seconds to bring an array of `num_bytes` (the whole of it) from `source` to `target`."""
        steps = sum(
            self.collective(*step) for step in reshard_steps(num_bytes, source, target, self.mesh)
        )
        return steps + self.copy(copied_bytes(num_bytes, source, target, self.mesh))

    @cached_property
    def fuses_rows(self) -> bool:
        """Whether a kernel may hold a row while it is reduced: XLA writes such kernels in Triton, for compute capability 8.0 on."""
        target = getattr(
            getattr(getattr(self.model, "cluster", None), "device", None), "xla_target", None
        )
        if target is None:
            return True
        return target["gpu_device_info"]["cuda_compute_capability"]["major"] >= 8

    @cached_property
    def combined(self) -> "MeshCosts":
        """The same, for collectives that the compiler combines."""
        return MeshCosts(self.mesh, Combined(self.model), self.forbidden)

    def copy(self, num_bytes: float) -> float:
        """Seconds to move bytes within device memory."""
        return self.model.kernel(Kernel("copy", "memory", 0.0, num_bytes)) if num_bytes else 0.0

    def reshard_matrix(
        self, num_bytes: float, sources: tuple[Spec, ...], targets: tuple[Spec, ...]
    ) -> np.ndarray | None:
        """Seconds for every pair of specs, (sources, targets); None if none takes any."""

        def row(source: Spec) -> tuple[float, ...]:
            return each_once(lambda target: self.reshard(num_bytes, source, target), targets)

        matrix = np.array(each_once(row, sources))
        return matrix if matrix.any() else None


COMBINED_BYTES = 30 * 2**20
"""XLA:GPU makes one collective of several as long as their results are no larger together (`xla_gpu_*_combine_threshold_bytes`)."""


class Combined:
    """A cost model of collectives that the compiler combines with others of their kind, as it does those of weights.

    One adds its share of the time of `COMBINED_BYTES`, a larger one runs alone. What is all_reduced with others is copied into one
    array with them, and out of it again.
    """

    def __init__(self, model: CostModel) -> None:
        self.model = model

    def kernel(self, kernel: Kernel, /, device: int = 0) -> float:
        return self.model.kernel(kernel, device)

    def collective(self, kind: CollectiveKind, num_bytes: float, groups: Groups) -> float:
        parts = len(groups[0]) if kind == "reduce_scatter" else 1
        share = num_bytes / parts / COMBINED_BYTES
        if share >= 1:
            return self.model.collective(kind, num_bytes, groups)
        seconds = share * self.model.collective(kind, parts * COMBINED_BYTES, groups)
        if kind == "all_reduce":
            seconds += self.model.kernel(Kernel("copy", "memory", 0.0, 4 * num_bytes))
        return seconds

    def contention_factor(self, groups: Groups) -> float:
        return self.model.contention_factor(groups)

    def link(self, groups: Groups) -> Link:
        return self.model.link(groups)

    def nics(self, pairs: Groups) -> Mapping[Hashable, float]:
        return self.model.nics(pairs)


def reshard_steps(
    num_bytes: float, source: Spec, target: Spec, mesh: LogicalMesh
) -> Iterator[Step]:
    """The collectives that bring an array of `num_bytes` from `source` to `target`.

    Axes that appear are local slices and cost nothing. Axes that leave a dim are an all_to_all when all of them join the
    minor end of one other dim, and otherwise an all_gather along the dim, taken last, when the array is as small as it gets;
    that is what XLA's partitioner makes of them.
    """
    local = num_bytes / mesh.ways(axes_of(source) | axes_of(target))
    gathers = []
    for dim, axes in enumerate(source):
        leaving = _leaving(axes, target[dim])
        if not leaving:
            continue
        joined = [
            e for e, others in enumerate(source) if e != dim and target[e] == others + leaving
        ]
        if joined:
            yield "all_to_all", local, leaving
        else:
            gathers.append(leaving)
    for leaving in gathers:
        local *= mesh.ways(leaving)
        yield "all_gather", local, leaving


def copied_bytes(num_bytes: float, source: Spec, target: Spec, mesh: LogicalMesh) -> float:
    """Bytes moved in device memory to change from `source` to `target`, beside what the collectives move.

    Collectives work on the leading dim: along any other, what they gave is transposed into place, a read and a write.
    """
    moved = 0.0
    local = num_bytes / mesh.ways(axes_of(source))
    for dim, axes in enumerate(source):
        if leaving := _leaving(axes, target[dim]):
            local *= mesh.ways(leaving)
            moved += 2 * local if dim > 0 else 0.0
    return moved


def _leaving(axes: tuple[str, ...], wanted: tuple[str, ...]) -> tuple[str, ...]:
    """The axes of a dim that can't stay: those from the first on which the two specs differ."""
    kept = 0
    while kept < min(len(axes), len(wanted)) and axes[kept] == wanted[kept]:
        kept += 1
    return axes[kept:]
