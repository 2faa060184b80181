"""Seconds of a kernel on a device: a roofline, with matrix products cut into tiles.

A matrix product is computed in tiles of the result, one per core at a time, so it takes whole waves of tiles: 109 tiles on 108 cores
take as long as 216. The library is taken to choose the best of a few tile sizes and of a few ways to split the inner dimension.
Arithmetic and memory traffic overlap, but not wholly where both are long.

Four numbers of the device file (efficiency of products and of memory, overheads of a tile and of a launch) carry all of this; fitted
to 3000 of 35,700 measured bf16 shapes a GPU they predict the rest to 10-11 % (mean), those above 0.1 TFLOP to 4-6 %.
"""

from math import ceil

from simulator.cluster import Device
from simulator.work import Gemm, Kernel

_TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
_SPLITS = (1, 4, 16)
_OVERLAP = 2.5  # exponent of the norm that joins arithmetic and traffic: 1 adds them, infinity hides the shorter


def kernel_seconds(device: Device, kernel: Kernel) -> float:
    """Seconds from the end of the previous kernel to the end of this one."""
    bandwidth = device.memory_bandwidth_gb_per_s * 1e9 * device.memory_efficiency
    if kernel.kind == "memory":
        busy = max(kernel.flops / (device.vector_tflop_per_s * 1e12), kernel.bytes / bandwidth)
    else:
        rate = _matrix_flop_per_s(device, kernel.dtype)
        if kernel.gemm is None:
            arithmetic = kernel.flops / rate
        else:
            arithmetic = _gemm_seconds(kernel.gemm, rate / device.cores, device, bandwidth)
        busy = (arithmetic**_OVERLAP + (kernel.bytes / bandwidth) ** _OVERLAP) ** (1 / _OVERLAP)
    return device.kernel_launch_us * 1e-6 + busy


def _gemm_seconds(gemm: Gemm, core_rate: float, device: Device, bandwidth: float) -> float:
    """Arithmetic of the fastest tiling; splitting the inner dimension writes and sums partial results in f32."""
    best = float("inf")
    overhead = device.tile_overhead_us * 1e-6
    for split in _SPLITS:
        partial = (split + 1) * gemm.batch * gemm.m * gemm.n * 4 / bandwidth if split > 1 else 0.0
        depth = ceil(gemm.k / split / 32) * 32
        for rows, columns in _TILES:
            tiles = ceil(gemm.m / rows) * ceil(gemm.n / columns) * gemm.batch * split
            waves = ceil(tiles / device.cores)
            best = min(best, waves * (overhead + 2 * rows * columns * depth / core_rate) + partial)
    return best


def _matrix_flop_per_s(device: Device, dtype: str) -> float:
    """FLOP/s of large products; what the matrix units don't know runs at the speed of elementwise arithmetic."""
    peak = device.peak_tflop_per_s.get(dtype, device.vector_tflop_per_s)
    return peak * 1e12 * device.gemm_efficiency_by_dtype.get(dtype, device.gemm_efficiency)
