"""How fast kernels run on one kind of device, as parts of the peaks in its description."""

from pathlib import Path

from pydantic import Field, NonNegativeFloat, PositiveFloat

from simulator.description import Description, Fraction

PROFILES = Path(__file__).parent / "profiles" / "kernels"


class KernelProfile(Description):
    """What `simulator.gemm` and `simulator.compute` know of a device beside its peaks.

    The two efficiencies are enough for a rough description; `simulator.calibration.gemms` fits the rest to measured products.

    Attributes:
        source: what was measured, by whom, under which licence; which shapes were fitted, and the errors on the others.
        launch_us: of an empty product; as the device's `kernel_launch_us` by default.
        efficiency: fraction of the peak that a core reaches inside a tile of a product while the device is cool.
        efficiency_by_dtype: the same where it is another one, by HLO dtype.
        conv_efficiency_by_dtype: fraction of the peak that convolutions reach, where it is not that of products.
        tile_us: prologue and epilogue of a tile.
        step_ns: least time of one element of the inner dimension, whatever the tile.
        cache_gb_per_s_per_core: from the second-level cache to a core; unlimited by default.
        memory_efficiency: fraction of the memory bandwidth that long transfers reach.
        half_size_mb: transfer for which the ramp of the memory system costs as much as the transfer.
        overlap: exponent of the norm that joins arithmetic and traffic: 1 adds them, a large one hides the shorter.
        whole_waves: 1 where a partial wave of tiles costs a whole one, 0 where only its part.
        droop: by how much a product takes longer once the device is hot.
        hot_in_training: whether the clock drops so far in training; otherwise only within long products.
        split_us: starting the sum of split products.
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
    whole_waves: float = Field(default=1.0, ge=0, le=1)
    droop: NonNegativeFloat = 0.0
    hot_in_training: bool = False
    split_us: NonNegativeFloat = 0.0
    held_out_error: NonNegativeFloat | None = None
