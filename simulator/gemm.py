"""Seconds of a matrix product on a GPU: tiles, waves of tiles, the latency of an inner step, memory, and the clock under load.

A product (m, k) by (k, n) is computed in tiles of the result, one per core at a time. A tile costs a prologue and epilogue, and for each
element of the inner dimension the slowest of its multiplications, its loads from the second-level cache and the latency of a step. The
inner dimension may be split over several cores, which then sum partial results in f32. Tiles beyond a whole wave cost a part of another
wave (all of one on A100, little on H100, whose kernels are persistent). Traffic to memory goes on meanwhile, and long products run at the
lower clock that the power budget leaves. The library is taken to choose the best tiling.

This is the finer of the two models of this package: `simulator.compute` has four parameters and prices what the planner compares;
here are eleven, fitted per GPU by `simulator.calibration.gemms`, and it serves `simulator.formula`.
"""

from dataclasses import dataclass, field
from functools import cache, lru_cache
from math import ceil, sqrt
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from simulator.description import ClusterError, Description, Fraction, read, validate

PROFILES = Path(__file__).parent / "profiles" / "gemm"

_TILES = tuple(
    (rows, columns)
    for rows, columns in ((256, 128), (128, 128), (128, 64), (64, 64), (256, 64), (32, 64), (16, 64))
    for rows, columns in {(rows, columns): 0, (columns, rows): 0}
)
_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_STEP = 32  # elements of the inner dimension that a core multiplies at once
_PACE = 4  # exponent of the norm that joins what paces a tile
_DROOP_SECONDS = 3e-3  # of full load after which half of the clock's droop is seen


class GemmProfile(Description):
    """What products cost on one GPU: its peaks, and eleven numbers fitted to measured shapes.

    Attributes:
        gpu: the device's name.
        source: what was measured, by whom, under which licence; which shapes were fitted, and the errors on the others.
        cores: streaming multiprocessors.
        peak_tflop_per_s: of the dtype that was measured, `dtype`.
        memory_bandwidth_gb_per_s: peak of the device memory.
        launch_us: of an empty product.
        efficiency: fraction of the peak that a core reaches inside a tile while the GPU is cool.
        tile_us: prologue and epilogue of a tile.
        step_ns: least time of one element of the inner dimension, whatever the tile.
        cache_gb_per_s_per_core: from the second-level cache to a core.
        memory_efficiency: fraction of the memory bandwidth that long transfers reach.
        half_size_mb: transfer for which the ramp of the memory system costs as much as the transfer.
        overlap: exponent of the norm that joins arithmetic and traffic.
        whole_waves: 1 where a partial wave of tiles costs a whole one, 0 where only its part.
        droop: by how much more a product takes once the GPU is hot.
        split_us: starting the sum of split products.
        held_out_error: mean absolute relative error on measured shapes outside the fit.
    """

    gpu: str
    source: str
    dtype: str = "bf16"
    cores: PositiveInt
    peak_tflop_per_s: PositiveFloat
    memory_bandwidth_gb_per_s: PositiveFloat
    launch_us: NonNegativeFloat
    efficiency: Fraction
    tile_us: NonNegativeFloat
    step_ns: NonNegativeFloat
    cache_gb_per_s_per_core: PositiveFloat
    memory_efficiency: Fraction
    half_size_mb: NonNegativeFloat
    overlap: float = Field(ge=1)
    whole_waves: float = Field(ge=0, le=1)
    droop: NonNegativeFloat
    split_us: NonNegativeFloat
    held_out_error: NonNegativeFloat | None = None

    @classmethod
    def load(cls, name: str) -> Self:
        """A shipped profile by the name of its file, which is that of the device's, or another file by its path."""
        path = Path(name) if name.endswith((".yaml", ".yml")) else PROFILES / f"{name}.yaml"
        if not path.exists() and path.parent == PROFILES:
            names = ", ".join(sorted(known.stem for known in PROFILES.glob("*.yaml")))
            raise ClusterError(f"no GEMM profile {name!r}; there are {names}, or give the path of a .yaml file")
        return validate(cls, read(path), path)

    @classmethod
    def of(cls, gpu: str) -> "GemmProfile":
        """The shipped profile of the device of that name."""
        known = _shipped()
        if gpu not in known:
            raise ClusterError(f"no GEMM profile of {gpu!r}; there are some of {', '.join(sorted(known))}")
        return known[gpu]


@dataclass(frozen=True, slots=True)
class GemmModel:
    """The times that a profile predicts, for one dtype.

    Attributes:
        profile: the GPU.
        speed: peak of this dtype over the peak of the profile's.
        width: bytes of an element of operands and result.
        hot: whether the GPU has been under load for long, as it is in training; otherwise a product is measured alone.
    """

    profile: GemmProfile
    speed: float = 1.0
    width: int = 2
    hot: bool = False
    _paces: tuple[tuple[int, int, float], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        p = self.profile
        core = p.peak_tflop_per_s * 1e12 * p.efficiency * self.speed / p.cores
        cache = p.cache_gb_per_s_per_core * 1e9
        step = p.step_ns * 1e-9
        paces = [
            (
                rows,
                columns,
                ((2 * rows * columns / core) ** _PACE + (self.width * (rows + columns) / cache) ** _PACE + step**_PACE)
                ** (1 / _PACE),
            )
            for rows, columns in _TILES
        ]
        object.__setattr__(self, "_paces", tuple(paces))

    def seconds(self, m: int, n: int, k: int, batch: int = 1) -> float:
        """Seconds of one product, from the end of the previous kernel; sizes below 1: `ValueError`."""
        if min(m, n, k, batch) < 1:
            raise ValueError(f"a product of ({m}, {k}) by ({k}, {n}), batch {batch}; expected sizes of at least 1")
        return _seconds(self, m, n, k, batch)

    def seconds_of(self, m: ArrayLike, n: ArrayLike, k: ArrayLike, batch: ArrayLike = 1) -> NDArray[np.float64]:
        """Seconds of many products at once; the sizes broadcast against each other."""
        p = self.profile
        m, n, k, batch = np.broadcast_arrays(*(np.asarray(size, np.float64) for size in (m, n, k, batch)))
        result, bandwidth = m * n * batch, p.memory_bandwidth_gb_per_s * 1e9 * p.memory_efficiency
        memory = self._memory(batch * (m * k + k * n) + result, np.sqrt)
        heat = self._heat(2 * result * k)
        best = np.full(m.shape, np.inf)
        for rows, columns, pace in self._paces:
            tiles = np.ceil(m / rows) * np.ceil(n / columns) * batch
            for split in _SPLITS:
                waves = _waves(tiles * split / p.cores, p.whole_waves, np.ceil, np.maximum)
                depth = np.ceil(k / split / _STEP) * _STEP
                arithmetic = waves * (p.tile_us * 1e-6 + depth * pace) * heat
                busy = _joined(arithmetic, memory, p.overlap, np.maximum, np.minimum)
                if split > 1:
                    busy = busy + p.split_us * 1e-6 + (split + 1) * 4 * result / bandwidth
                    busy = np.where(tiles < 2 * p.cores, busy, np.inf)
                best = np.minimum(best, busy)
        return p.launch_us * 1e-6 + best

    def _memory(self, elements, root):
        p = self.profile
        moved = elements * self.width
        return (moved + root(moved * p.half_size_mb * 1e6)) / (p.memory_bandwidth_gb_per_s * 1e9 * p.memory_efficiency)

    def _heat(self, flops):
        p = self.profile
        if self.hot:
            return 1 + p.droop
        load = flops / (p.peak_tflop_per_s * 1e12 * self.speed)
        return 1 + p.droop * load / (load + _DROOP_SECONDS)


def _waves(waves, whole: float, ceiling, maximum):
    return whole * ceiling(waves) + (1 - whole) * maximum(waves, 1.0)


def _joined(one, other, power: float, maximum, minimum):
    """The norm of two times that overlap: their sum for a power of 1, the longer for an infinite one."""
    longer = maximum(one, other)
    return longer * (1 + (minimum(one, other) / longer) ** power) ** (1 / power)


@lru_cache(maxsize=1 << 16)
def _seconds(model: GemmModel, m: int, n: int, k: int, batch: int) -> float:
    """`GemmModel.seconds_of` for one product, without the overhead of arrays."""
    p = model.profile
    cores, whole, result = p.cores, p.whole_waves, m * n * batch
    bandwidth = p.memory_bandwidth_gb_per_s * 1e9 * p.memory_efficiency
    memory = model._memory(batch * (m * k + k * n) + result, sqrt)
    tile, depth = p.tile_us * 1e-6, ceil(k / _STEP) * _STEP
    heat, power = model._heat(2.0 * result * k), p.overlap
    few, best = 2 * cores, float("inf")
    split_best = float("inf")
    for rows, columns, pace in model._paces:
        tiles = -(-m // rows) * -(-n // columns) * batch
        waves = tiles / cores
        arithmetic = (whole * ceil(waves) + (1 - whole) * max(waves, 1.0)) * (tile + depth * pace)
        best = min(best, arithmetic)
        if tiles < few:
            for split in _SPLITS[1:]:
                waves = tiles * split / cores
                waves = whole * ceil(waves) + (1 - whole) * max(waves, 1.0)
                arithmetic = waves * (tile + ceil(k / split / _STEP) * _STEP * pace) * heat
                busy = _joined(arithmetic, memory, power, max, min)
                split_best = min(split_best, busy + p.split_us * 1e-6 + (split + 1) * 4 * result / bandwidth)
    whole_best = _joined(best * heat, memory, power, max, min)
    return p.launch_us * 1e-6 + min(whole_best, split_best)


@cache
def _shipped() -> dict[str, GemmProfile]:
    profiles = [GemmProfile.load(path.stem) for path in sorted(PROFILES.glob("*.yaml"))]
    return {profile.gpu: profile for profile in profiles}
