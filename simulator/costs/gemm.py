"""Seconds of a matrix product: tiles, wave quantization, split-K, memory traffic and throttling.

A product (m, k) by (k, n) is computed in tiles of the result, one per core at a time. A tile costs
a prologue and an epilogue and, for each element of the inner dimension, the slowest of its
multiplications, its loads from the second-level cache and the latency of a step. The inner
dimension may be split over several cores, which then sum partial results in f32. Tiles beyond a
whole wave cost a part of another wave: all of it on A100, little on H100, whose kernels are
persistent. Memory traffic overlaps with that, and long products run at the lower clock that the
power budget allows. The library is assumed to choose the best tiling.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from math import ceil, inf, sqrt
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simulator.hardware.device import Device

_TILES = tuple(
    (rows, columns)
    for rows, columns in (
        (256, 128),
        (128, 128),
        (128, 64),
        (64, 64),
        (256, 64),
        (32, 64),
        (16, 64),
    )
    for rows, columns in {(rows, columns): 0, (columns, rows): 0}
)
_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_STEP = 32  # elements of the inner dimension that a core multiplies in one step
_PACE = 4  # exponent of the norm that joins the times that bound a tile
_THROTTLING_SECONDS = 3e-3  # of full load, after which half of the throttling is reached
_WIDTHS = {
    "f64": 8,
    "f32": 4,
    "s32": 4,
    "u32": 4,
    "s8": 1,
    "u8": 1,
    "f8e4m3fn": 1,
    "f8e5m2": 1,
    "f4e2m1fn": 0.5,
}


@dataclass(frozen=True, slots=True)
class GemmModel:
    """A cost model of products of one dtype on one device, in SI units.

    `simulator.hardware.kernel_profile.KernelProfile` documents the fields that are not listed here.

    Attributes:
        peak: FLOP/s of the device.
        core: FLOP/s of one core inside a tile.
        bandwidth: bytes per second of long transfers.
        width: bytes of an element of the operands.
        result_width: bytes of an element of the result, which has 16 bits at least.
        hot: whether the device has been under load for long. Otherwise it was idle before each
            product.
    """

    peak: float
    core: float
    cores: int
    bandwidth: float
    width: float
    result_width: float
    launch: float
    tile: float
    step: float
    cache: float
    half_size: float
    overlap: float
    wave_quantization: float
    throttling: float
    split: float
    hot: bool
    _paces: tuple[tuple[int, int, float], ...] = field(init=False, repr=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)

    @classmethod
    def of(cls, device: Device, dtype: str, hot: bool = False) -> Self:
        """Return the model of a device's products.

        Products of a dtype that the matrix units lack run at the speed of elementwise arithmetic.
        """
        profile = device.kernels
        peak = 1e12 * device.peak_tflop_per_s.get(dtype, device.vector_tflop_per_s)
        launch = device.kernel_launch_us if profile.launch_us is None else profile.launch_us
        return cls(
            peak=peak,
            core=peak * profile.efficiency_by_dtype.get(dtype, profile.efficiency) / device.cores,
            cores=device.cores,
            bandwidth=1e9 * device.memory_bandwidth_gb_per_s * profile.memory_efficiency,
            width=width_of(dtype),
            result_width=max(2.0, width_of(dtype)),
            launch=1e-6 * launch,
            tile=1e-6 * profile.tile_us,
            step=1e-9 * profile.step_ns,
            cache=1e9 * profile.cache_gb_per_s_per_core if profile.cache_gb_per_s_per_core else inf,
            half_size=1e6 * profile.half_size_mb,
            overlap=profile.overlap,
            wave_quantization=profile.wave_quantization,
            throttling=device.throttling,
            split=1e-6 * profile.split_k_us,
            hot=hot,
        )

    def __post_init__(self) -> None:
        paces = tuple((rows, columns, self._pace(rows, columns)) for rows, columns in _TILES)
        object.__setattr__(self, "_paces", paces)
        object.__setattr__(self, "_hash", hash((self.peak, self.core, self.bandwidth, self.width)))

    def __hash__(self) -> int:
        return self._hash

    def seconds(self, m: int, n: int, k: int, batch: int = 1, moved: float | None = None) -> float:
        """Return the seconds of one product, from the end of the previous kernel.

        Args:
            m: rows of the result.
            n: columns of the result.
            k: the inner dimension.
            batch: products of these sizes.
            moved: bytes to and from memory; by default the bytes of operands and result.

        Raises:
            ValueError: a size is below 1.
        """
        return _seconds(self, m, n, k, batch, moved)

    def seconds_of(self, m: ArrayLike, n: ArrayLike, k: ArrayLike) -> NDArray[np.float64]:
        """Return the seconds of many products; the sizes broadcast against each other."""
        m, n, k = np.broadcast_arrays(*(np.asarray(size, np.float64) for size in (m, n, k)))
        result = m * n
        memory = self.transfer(self.traffic(m, n, k, 1), np.sqrt)
        throttled = self.throttling_factor(2 * result * k)
        best = np.full(m.shape, np.inf)
        for rows, columns, pace in self._paces:
            tiles = np.ceil(m / rows) * np.ceil(n / columns)
            for split in _SPLITS:
                waves = _waves(
                    tiles * split / self.cores, self.wave_quantization, np.ceil, np.maximum
                )
                depth = np.ceil(k / split / _STEP) * _STEP
                busy = overlap_norm(
                    waves * (self.tile + depth * pace) * throttled,
                    memory,
                    self.overlap,
                    np.maximum,
                    np.minimum,
                )
                if split > 1:
                    busy = busy + self.split + (split + 1) * 4 * result / self.bandwidth
                    busy = np.where(tiles < 2 * self.cores, busy, np.inf)
                best = np.minimum(best, busy)
        return self.launch + best

    def traffic(self, m, n, k, batch):
        """Return the bytes of the operands and results of products."""
        return batch * (self.width * (m * k + k * n) + self.result_width * m * n)

    def transfer(self, num_bytes, root=sqrt):
        """Return the seconds of memory traffic; short transfers reach less bandwidth."""
        return (num_bytes + root(num_bytes * self.half_size)) / self.bandwidth

    def throttling_factor(self, flops):
        """Return the factor by which throttling lengthens a product of `flops`."""
        if self.hot:
            return 1 + self.throttling
        load = flops / self.peak
        return 1 + self.throttling * load / (load + _THROTTLING_SECONDS)

    def _pace(self, rows: int, columns: int) -> float:
        """Return the seconds of a tile for one element of the inner dimension."""
        loads = self.width * (rows + columns) / self.cache
        return ((2 * rows * columns / self.core) ** _PACE + loads**_PACE + self.step**_PACE) ** (
            1 / _PACE
        )


def width_of(dtype: str) -> float:
    """Return the bytes of an element of an HLO dtype."""
    return _WIDTHS.get(dtype, 2)


def overlap_norm(one, other, power: float, maximum=max, minimum=min):
    """Return the p-norm of two times that overlap: the sum for power 1, the maximum for inf."""
    longer = maximum(one, other)
    return longer * (1 + (minimum(one, other) / longer) ** power) ** (1 / power)


def _waves(waves, whole: float, ceiling, maximum):
    return whole * ceiling(waves) + (1 - whole) * maximum(waves, 1.0)


@lru_cache(maxsize=1 << 16)
def _seconds(model: GemmModel, m: int, n: int, k: int, batch: int, moved: float | None) -> float:
    """Return `GemmModel.seconds_of` for one product, without the overhead of arrays."""
    if min(m, n, k, batch) < 1:
        raise ValueError(
            f"a product of ({m}, {k}) by ({k}, {n}), batch {batch}; expected sizes of at least 1"
        )
    cores, whole, tile, power = model.cores, model.wave_quantization, model.tile, model.overlap
    result = m * n * batch
    memory = model.transfer(model.traffic(m, n, k, batch) if moved is None else moved)
    throttled = model.throttling_factor(2.0 * result * k)
    unsplit, few = inf, []
    for rows, columns, pace in model._paces:
        tiles = -(-m // rows) * -(-n // columns) * batch
        waves = tiles / cores
        depth = ceil(k / _STEP) * _STEP
        unsplit = min(
            unsplit, (whole * ceil(waves) + (1 - whole) * max(waves, 1.0)) * (tile + depth * pace)
        )
        if tiles < 2 * cores:
            few.append((tiles, pace))
    best = overlap_norm(unsplit * throttled, memory, power)
    for split in _SPLITS[1:]:
        sums = model.split + (split + 1) * 4 * result / model.bandwidth
        if not few or sums + memory >= best:  # Larger splits take even longer to sum.
            break
        depth = ceil(k / split / _STEP) * _STEP
        fastest = inf
        for tiles, pace in few:
            waves = tiles * split / cores
            fastest = min(
                fastest,
                (whole * ceil(waves) + (1 - whole) * max(waves, 1.0)) * (tile + depth * pace),
            )
        best = min(best, sums + overlap_norm(fastest * throttled, memory, power))
    return model.launch + best
