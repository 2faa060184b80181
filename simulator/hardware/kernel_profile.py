"""Kernel profiles: how close to the peaks of a device its kernels come."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from simulator.hardware.description import Description, Fraction
from simulator.hardware.dtypes import check_dtypes

PROFILES = Path(__file__).parent / "profiles" / "kernels"


FusedAttentionKind = Literal["flash1", "flash", "flash2", "cudnn", "cudnn_f8"]


class Passes(Description):
    """A fraction for the forward pass and one for the backward pass."""

    forward: Fraction
    backward: Fraction


class FusedAttention(Description):
    """Fractions of the peak that fused attention reaches on long causal sequences.

    `cudnn`: cuDNN's fused attention, which Transformer Engine and JAX call; that of `flash2` by
    default. On H100: Shah et al., FlashAttention-3 (arXiv 2407.08608), figures 5 and 6.

    `flash2`: Dao, FlashAttention-2 (arXiv 2307.08691), figures for head size 128. `flash1`: the
    first FlashAttention, in the same figures. `flash`: the same algorithm in Triton, about 0.6 of
    `flash2`, as in the same paper; the exact values are fitted to two rows of llm-foundry's
    table with long sequences, 125m at 32768 tokens on A100 and 1b at 65536 on H100. The values of
    V100, which are the default, and of B200 are guesses in proportion.

    Attributes:
        flash1: fractions of the first FlashAttention.
        flash: fractions of the algorithm in Triton.
        flash2: fractions of FlashAttention-2.
        cudnn: fractions of cuDNN.
        cudnn_f8: fractions of cuDNN with products of 8 bits, also of the peak of 16; those of
            `cudnn` by default.
        cudnn_least_head: head size below which a score takes cuDNN as long as one of that size, as
            the softmax and not the products set the pace.
    """

    flash1: Passes = Passes(forward=0.25, backward=0.20)
    flash: Passes = Passes(forward=0.25, backward=0.20)
    flash2: Passes = Passes(forward=0.25, backward=0.20)
    cudnn: Passes | None = None
    cudnn_f8: Passes | None = None
    cudnn_least_head: PositiveInt = 1


class KernelProfile(Description):
    """Parameters of the cost models of kernels, for one kind of device.

    `simulator.costs.gemm` and `simulator.costs.kernel_model` are these models. The two efficiencies
    are enough for a rough description. `simulator.calibration.fit_products` fits the rest to
    measured products.

    Attributes:
        source: what was measured, by whom, under which licence; which shapes were fitted, and the
            errors on the others.
        launch_us: time of an empty product; the device's `kernel_launch_us` by default.
        efficiency: fraction of the peak that a core reaches inside a tile of a product while the
            device is cool.
        efficiency_by_dtype: efficiency of other types, by HLO dtype.
        conv_efficiency_by_dtype: fraction of the peak that convolutions reach, by HLO dtype; that
            of products by default.
        tile_us: prologue and epilogue of a tile.
        step_ns: lower bound on the time of one element of the inner dimension of a tile.
        cache_gb_per_s_per_core: bandwidth from the second-level cache to a core; unlimited by
            default.
        memory_efficiency: fraction of the memory bandwidth that long transfers reach.
        half_size_mb: transfer for which the ramp of the memory system costs as much as the
            transfer.
        overlap: exponent of the norm that joins arithmetic and traffic: 1 adds them, a large one
            hides the shorter.
        wave_quantization: 1 where a partial wave of tiles costs as much as a full one, 0 where it
            costs its fraction of one.
        throttling: relative slowdown of a product once the device is hot.
        power_limit_w: limit of the board's power at which `throttling` holds; unknown by default.
        throttles_in_training: whether training makes the device hot; otherwise only long products
            do.
        split_k_us: launch of the kernel that sums the partial results of split-k products.
        attention: fractions of the peak that fused attention reaches.
        held_out_error: mean absolute relative error on measured shapes outside the fit.
    """

    source: str = ""
    launch_us: NonNegativeFloat | None = None
    efficiency: Fraction
    efficiency_by_dtype: dict[str, Fraction] = Field(default_factory=dict)
    conv_efficiency_by_dtype: dict[str, Fraction] = Field(default_factory=dict)
    tile_us: NonNegativeFloat = 0.0
    step_ns: NonNegativeFloat = 0.0
    cache_gb_per_s_per_core: PositiveFloat | None = None
    memory_efficiency: Fraction
    half_size_mb: NonNegativeFloat = 0.0
    overlap: float = Field(default=2.5, ge=1)
    wave_quantization: float = Field(default=1.0, ge=0, le=1)
    throttling: NonNegativeFloat = 0.0
    power_limit_w: PositiveFloat | None = None
    throttles_in_training: bool = False
    split_k_us: NonNegativeFloat = 0.0
    attention: FusedAttention = FusedAttention()
    held_out_error: NonNegativeFloat | None = None

    @model_validator(mode="after")
    def _dtypes_are_names_of_hlo(self) -> Self:
        check_dtypes(self.efficiency_by_dtype, "efficiency_by_dtype")
        return self
