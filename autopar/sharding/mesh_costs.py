"""Seconds on a logical mesh: kernels, collectives along mesh axes, and resharding."""

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
    """Seconds of kernels, of completing partial results, and of resharding."""

    compute: float
    communication: float
    resharding: float


type Step = tuple[CollectiveKind, float, tuple[str, ...]]
"""A collective: kind, `num_bytes` as in `simulator.work.Collective`, and mesh axes."""


@dataclass(frozen=True, eq=False)
class MeshCosts:
    """A cost model in terms of the axes of a logical mesh.

    Attributes:
        mesh: the logical mesh.
        model: the cost model of its devices.
        forbidden: collectives of infinite cost.
        memo: results memoized for this mesh, as layers and stages repeat.
    """

    mesh: LogicalMesh
    model: CostModel
    forbidden: frozenset[CollectiveKind] = frozenset()
    memo: dict[Any, dict[Any, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Memoize the methods for the lifetime of the object."""
        for method in (self.groups, self.collective, self.reshard, self.reshard_matrix):
            object.__setattr__(self, method.__name__, lru_cache(maxsize=1 << 18)(method))

    def groups(self, axes: tuple[str, ...]) -> Groups:
        """Return the groups of devices along `axes`."""
        return self.mesh.groups(axes)

    def collective(self, kind: CollectiveKind, num_bytes: float, axes: tuple[str, ...]) -> float:
        """Return the seconds of a collective along `axes`; 0 along none, infinity if forbidden."""
        if kind in self.forbidden and axes and num_bytes:
            return math.inf
        return (
            self.model.collective(kind, num_bytes, self.groups(axes)) if axes and num_bytes else 0.0
        )

    def reshard(self, num_bytes: float, source: Spec, target: Spec) -> float:
        """Return the seconds to reshard an array of `num_bytes` from `source` to `target`."""
        steps = sum(
            self.collective(*step) for step in reshard_steps(num_bytes, source, target, self.mesh)
        )
        return steps + self.copy(copied_bytes(num_bytes, source, target, self.mesh))

    @cached_property
    def row_padding(self) -> float:
        """How much rows may be padded so that a kernel keeps them for both reductions of a softmax.

        XLA generates kernels that keep rows while they reduce them with Triton, which pads rows to
        a power of two, for compute capability 8.0 and later. It compares estimates of the time with
        and without: the more bandwidth a GPU has, the less padding pays. The largest factor is
        fitted to attention in training steps on H100 (1.42 to 1.51) and H200 (1.10 to 1.14). A100
        and GH200 (1.23 to 1.30) agree, and so does Blackwell, which does not keep them even without
        padding (jaxlib 0.11.2). XLA keeps fewer rows if all scores of a layer fit in about 64 MiB.

        Returns:
            The largest ratio of the padded length to the length; below 1, only one reduction is
            part of the kernel, and if 0, none.
        """
        target = self._target
        if target is None:
            return math.inf
        bandwidth = target["gpu_device_info"]["memory_bandwidth"] / 1e9
        return 3789 / bandwidth + 0.334 if _major(target) >= 8 else 0.0

    @cached_property
    def hides_latency(self) -> bool:
        """Whether XLA:GPU schedules for latency by default: from compute capability 9.0 on.

        It runs collectives beside kernels, and keeps what they complete for that.
        """
        target = self._target
        return target is not None and _major(target) >= 9

    @property
    def completes_behind_loops(self) -> bool:
        """Whether XLA moves an all_reduce of what a loop only adds up behind the loop.

        XLA:GPU does (`WhileLoopAllReduceCodeMotion`), XLA:CPU does not.
        """
        return self._target is not None

    @property
    def workspace(self) -> int:
        """The bytes that a matrix product needs while it runs: XLA:GPU gives cuBLAS 4 MiB."""
        return 0 if self._target is None else 2**22

    @property
    def _target(self) -> Mapping[str, Any] | None:
        """What XLA:GPU knows of the device; None for other devices."""
        device = getattr(getattr(self.model, "cluster", None), "device", None)
        return getattr(device, "xla_target", None)

    @cached_property
    def combined(self) -> "MeshCosts":
        """The costs of collectives that the compiler combines."""
        return MeshCosts(self.mesh, Combined(self.model), self.forbidden)

    def copy(self, num_bytes: float) -> float:
        """Return the seconds to move bytes within device memory."""
        return self.model.kernel(Kernel("copy", "memory", 0.0, num_bytes)) if num_bytes else 0.0

    def reshard_matrix(
        self, num_bytes: float, sources: tuple[Spec, ...], targets: tuple[Spec, ...]
    ) -> np.ndarray | None:
        """Return the seconds of every resharding, shape (sources, targets); None if all are 0."""

        def row(source: Spec) -> tuple[float, ...]:
            return each_once(lambda target: self.reshard(num_bytes, source, target), targets)

        matrix = np.array(each_once(row, sources))
        return matrix if matrix.any() else None


def _major(target: Mapping[str, Any]) -> int:
    """Return the major number of the compute capability of a GPU that XLA compiles for."""
    return target["gpu_device_info"]["cuda_compute_capability"]["major"]


COMBINED_BYTES = 30 * 2**20
"""XLA:GPU combines collectives up to this size (`xla_gpu_*_combine_threshold_bytes`)."""


class Combined:
    """A cost model of collectives that the compiler combines, such as collectives on weights.

    A collective takes its share of the time of `COMBINED_BYTES`; a larger one runs by itself.
    Operands of an all_reduce are copied into one array, and the results out of it.
    """

    def __init__(self, model: CostModel) -> None:
        self.model = model

    def kernel(self, kernel: Kernel, /, device: int = 0) -> float:
        """Return the seconds of a kernel."""
        return self.model.kernel(kernel, device)

    def collective(self, kind: CollectiveKind, num_bytes: float, groups: Groups) -> float:
        """Return the share of the seconds of a combined collective."""
        parts = len(groups[0]) if kind == "reduce_scatter" else 1
        share = num_bytes / parts / COMBINED_BYTES
        if share >= 1:
            return self.model.collective(kind, num_bytes, groups)
        seconds = share * self.model.collective(kind, parts * COMBINED_BYTES, groups)
        if kind == "all_reduce":
            seconds += self.model.kernel(Kernel("copy", "memory", 0.0, 4 * num_bytes))
        return seconds

    def contention_factor(self, groups: Groups) -> float:
        """Return the factor by which the collective slows kernels down."""
        return self.model.contention_factor(groups)

    def link(self, groups: Groups) -> Link:
        """Return the class of links that the groups use."""
        return self.model.link(groups)

    def nics(self, pairs: Groups) -> Mapping[Hashable, float]:
        """Return the share of each NIC that transfers between the pairs take."""
        return self.model.nics(pairs)


def reshard_steps(
    num_bytes: float, source: Spec, target: Spec, mesh: LogicalMesh
) -> Iterator[Step]:
    """Yield the collectives that reshard an array of `num_bytes` from `source` to `target`.

    These are the collectives of XLA's partitioner. Axes that are added to a dim are local slices,
    which take no collective. Axes that leave a dim are an all_to_all if all of them move to the
    minor end of one other dim. Otherwise they are an all_gather along the dim, which comes last,
    when the array is smallest.
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
    """Return the bytes that resharding moves within device memory.

    Collectives work on the leading dim. Along another dim their result is transposed, which reads
    and writes it.
    """
    moved = 0.0
    local = num_bytes / mesh.ways(axes_of(source))
    for dim, axes in enumerate(source):
        if leaving := _leaving(axes, target[dim]):
            local *= mesh.ways(leaving)
            moved += 2 * local if dim > 0 else 0.0
    return moved


def is_local(source: Spec, target: Spec) -> bool:
    """Return whether resharding takes no collective: each device has its new part already."""
    return not any(_leaving(axes, target[dim]) for dim, axes in enumerate(source))


def _leaving(axes: tuple[str, ...], wanted: tuple[str, ...]) -> tuple[str, ...]:
    """Return the axes that leave a dim: from the first on in which the two specs differ."""
    kept = 0
    while kept < min(len(axes), len(wanted)) and axes[kept] == wanted[kept]:
        kept += 1
    return axes[kept:]
