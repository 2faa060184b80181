"""Seconds of a kernel on a device: products by tiles (`simulator.costs.gemm`), everything else by its arithmetic and its traffic."""

from collections.abc import Callable
from functools import cache, partial

from simulator.costs.gemm import GemmModel, joined
from simulator.hardware.cluster import Device
from simulator.work import Kernel


class KernelModel:
    """What kernels cost on one device.

    Attributes:
        hot: whether the device has been under load for so long that its clock has dropped; otherwise it does so within long products.
        products: the model of matrix products of an HLO dtype.
    """

    products: Callable[[str], GemmModel]

    def __init__(self, device: Device, hot: bool = False) -> None:
        self.device, self.hot = device, hot
        self.products = cache(partial(GemmModel.of, device, hot=hot))

    def seconds(self, kernel: Kernel) -> float:
        """Seconds from the end of the previous kernel to the end of this one.

        Arithmetic and traffic of a product overlap, but not wholly where both are long; those of an elementwise kernel do, and those of fused
        attention, which is three kernels in the backward pass and taken to be of the second generation (`FusedAttention`).
        """
        model, launch = self.products(kernel.dtype), self.device.kernel_launch_us * 1e-6
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
        arithmetic = model.heat(kernel.flops) * kernel.flops / rate
        return launch + (
            joined(arithmetic, traffic, model.overlap) if arithmetic or traffic else 0.0
        )

    def elementwise(self, num_bytes: float, kernels: int) -> float:
        """Seconds of elementwise kernels that move so many bytes altogether, in equal parts."""
        launch = self.device.kernel_launch_us * 1e-6
        return kernels * (launch + self.products("f32").transfer(num_bytes / kernels))
