"""Seconds of a kernel on a device: a roofline, with matrix products cut into tiles.

A kernel takes the longer of its arithmetic and its memory traffic, after the gap that every launch costs.
"""

from simulator.cluster import Device
from simulator.work import Kernel


def kernel_seconds(device: Device, kernel: Kernel) -> float:
    """Seconds from the end of the previous kernel to the end of this one."""
    traffic = kernel.bytes / (device.memory_bandwidth_gb_per_s * 1e9 * device.memory_efficiency)
    peak = device.vector_tflop_per_s if kernel.kind == "memory" else _matrix_peak(device, kernel.dtype)
    return device.kernel_launch_us * 1e-6 + max(kernel.flops / (peak * 1e12), traffic)


def _matrix_peak(device: Device, dtype: str) -> float:
    efficiency = device.gemms.efficiency
    peak = device.peak_tflop_per_s.get(dtype, device.vector_tflop_per_s)
    return peak * efficiency.get(dtype, efficiency["other"])
