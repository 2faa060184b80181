"""Seconds of a kernel on a device.

Products are computed by tiles (`simulator.costs.gemm`), everything else by arithmetic and traffic.
"""

from collections.abc import Callable
from functools import cache, partial

from simulator.costs.gemm import GemmModel, overlap_norm
from simulator.hardware.device import Device
from simulator.work import Kernel


class KernelModel:
    """A cost model of the kernels on one device.

    Attributes:
        device: the device.
        hot: whether the device has been under load long enough to throttle its clock. Otherwise
            long products throttle it.
        products: the model of matrix products of an HLO dtype.
        launch: seconds from the end of a kernel to the start of the next.
    """

    products: Callable[[str], GemmModel]

    def __init__(self, device: Device, hot: bool = False) -> None:
        self.device, self.hot = device, hot
        self.products = cache(partial(GemmModel.of, device, hot=hot))
        self.launch = device.kernel_launch_us * 1e-6
        self._memory = self.products("f32")

    def seconds(self, kernel: Kernel) -> float:
        """Return the seconds from the end of the previous kernel to the end of this one.

        Arithmetic and traffic of a product overlap, but not fully where both are long. In
        elementwise kernels and in fused attention they overlap fully. Fused attention is three
        kernels in the backward pass, and assumed to be of the second generation (`FusedAttention`).
        """
        model, launch = self.products(kernel.dtype), self.launch
        if kernel.kind == "host copy":
            return launch + kernel.bytes / (self.device.host_bandwidth_gb_per_s * 1e9)
        traffic = model.transfer(kernel.bytes)
        if kernel.kind == "memory":
            return launch + max(kernel.flops / (self.device.vector_tflop_per_s * 1e12), traffic)
        if kernel.kind in ("attention", "attention backward"):
            reached = self.device.kernels.attention.flash2
            fraction, kernels = (
                (reached.forward, 1) if kernel.kind == "attention" else (reached.backward, 3)
            )
            return kernels * launch + max(kernel.flops / (model.peak * fraction), traffic)
        if (gemm := kernel.gemm) is not None and gemm.flops:
            return model.seconds(gemm.m, gemm.n, gemm.k, gemm.batch, kernel.bytes)
        rate = model.core * model.cores
        if kernel.kind == "conv":
            efficiency = self.device.kernels.conv_efficiency_by_dtype.get(kernel.dtype)
            rate = rate if efficiency is None else efficiency * model.peak
        arithmetic = model.throttling_factor(kernel.flops) * kernel.flops / rate
        return launch + (
            overlap_norm(arithmetic, traffic, model.overlap) if arithmetic or traffic else 0.0
        )

    def elementwise(self, num_bytes: float, kernels: int) -> float:
        """Return the seconds of elementwise kernels that together move `num_bytes` bytes."""
        return kernels * (self.launch + self._memory.transfer(num_bytes / kernels))
