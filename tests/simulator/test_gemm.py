"""Matrix products take waves of tiles, and fits recover planted parameters."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.calibration.fit_products import MeasuredGemms, fit_gemms, is_held_out
from simulator.calibration.measured_samples import measured_gemms
from simulator.costs.cost_model import ClusterCosts
from simulator.costs.gemm import GemmModel
from simulator.costs.kernel_model import KernelModel
from simulator.hardware.cluster import Cluster
from simulator.hardware.description import ClusterError, validate
from simulator.hardware.device import Device, device_names, shipped_device
from simulator.hardware.kernel_profile import KernelProfile
from simulator.work import Gemm, Kernel

ONE = KernelProfile(
    launch_us=1,
    efficiency=0.8,
    tile_us=2,
    memory_efficiency=1,
    overlap=100,
    split_k_us=1e3,
)


def toy(memory_gb_per_s: float = 1000, **changes: object) -> GemmModel:
    """Return a model of ten cores of 8 TFLOP/s each, without split products."""
    device = Device(
        name="toy",
        kind="gpu",
        source="made up",
        memory_gb=16,
        cores=10,
        peak_tflop_per_s={"bf16": 100},
        vector_tflop_per_s=1,
        memory_bandwidth_gb_per_s=memory_gb_per_s,
        kernel_launch_us=3,
        kernels=ONE.model_copy(update=changes),
    )
    return GemmModel.of(device, "bf16", hot=bool(changes.get("throttling")))


dims = st.integers(1, 20_000)
devices = st.sampled_from([shipped_device(name) for name in device_names()])
dtypes = st.sampled_from(["f32", "bf16", "f16"])


def test_a_product_takes_whole_waves_of_tiles() -> None:
    # Ten 256 x 128 tiles fill the ten cores once, each at 100 * 0.8 / 10 TFLOP/s. An eleventh tile
    # costs a tenth of a wave more where kernels are persistent.
    wave = 2e-6 + 2 * 256 * 128 * 2**20 / 8e12
    assert toy().seconds(2560, 128, 2**20) == pytest.approx(1e-6 + wave, rel=1e-6)
    assert toy(wave_quantization=0.0).seconds(2560 + 256, 128, 2**20) == pytest.approx(
        1e-6 + 1.1 * wave, rel=1e-3
    )


def test_a_tile_takes_the_norm_of_arithmetic_cache_and_step_seconds() -> None:
    # One 256 x 128 tile: 8.2 ns of arithmetic an element and 2 * 384 bytes of loads. The norm joins
    # equal times as 2^(1/4).
    arithmetic = 2 * 256 * 128 / 8e12
    cache = toy(cache_gb_per_s_per_core=2 * 384 / arithmetic / 1e9, tile_us=0.0)
    assert cache.seconds(2560, 128, 2**20) == pytest.approx(
        1e-6 + 2**20 * arithmetic * 2**0.25, rel=1e-3
    )
    step = toy(step_ns=100.0, tile_us=0.0)
    assert step.seconds(16, 64, 2**10) == pytest.approx(1e-6 + 2**10 * 100e-9, rel=1e-3)


def test_a_hot_gpu_is_slower_by_its_throttling() -> None:
    cold, hot = toy(launch_us=0.0), toy(launch_us=0.0, throttling=0.25)
    assert hot.seconds(4096, 4096, 4096) == pytest.approx(
        1.25 * cold.seconds(4096, 4096, 4096), rel=0.01
    )


def test_traffic_is_given_or_that_of_operands_and_result() -> None:
    # At one byte a second only traffic counts.
    assert toy(1e-9).seconds(10, 20, 30) == pytest.approx(
        2 * (10 * 30 + 30 * 20 + 10 * 20), rel=1e-3
    )
    assert toy(1e-9).seconds(10, 20, 30, moved=5.0) == pytest.approx(5, rel=1e-3)


@pytest.mark.parametrize(("dtype", "width"), [("f8e4m3fn", 1), ("f4e2m1fn", 0.5)])
def test_products_of_few_bits_write_16_bits(dtype: str, width: float) -> None:
    model = GemmModel.of(shipped_device("b200_sxm_180gb"), dtype)
    moved = width * (4096 * 64 + 64 * 8192) + 2 * 4096 * 8192
    assert model.seconds(4096, 8192, 64) == pytest.approx(
        model.seconds(4096, 8192, 64, moved=moved), rel=1e-12
    )


@given(devices, dtypes, dims, dims, dims, st.booleans())
def test_scalar_and_vectorized_seconds_agree(
    device: Device, dtype: str, m: int, n: int, k: int, hot: bool
) -> None:
    model = GemmModel.of(device, dtype, hot)
    assert model.seconds(m, n, k) == pytest.approx(float(model.seconds_of(m, n, k)), rel=1e-9)


@given(devices, dtypes, dims, dims, dims)
def test_no_product_beats_the_roofline(device: Device, dtype: str, m: int, n: int, k: int) -> None:
    floor = max(
        2 * m * n * k / device.peak_tflop_per_s[dtype] / 1e12,
        2 * (m * k + k * n + m * n) / device.memory_bandwidth_gb_per_s / 1e9,
    )
    assert GemmModel.of(device, dtype).seconds(m, n, k) >= floor


@given(devices, dims, dims, dims, st.floats(1, 4), st.floats(1, 4))
def test_faster_hardware_is_never_slower(
    device: Device, m: int, n: int, k: int, speed: float, memory: float
) -> None:
    faster = device.model_copy(
        update={
            "peak_tflop_per_s": {"bf16": device.peak_tflop_per_s["bf16"] * speed},
            "memory_bandwidth_gb_per_s": device.memory_bandwidth_gb_per_s * memory,
        }
    )
    # Both are hot: a faster GPU has less load for the same product and might not throttle.
    slow, fast = (GemmModel.of(gpu, "bf16", hot=True) for gpu in (device, faster))
    assert fast.seconds(m, n, k) <= slow.seconds(m, n, k) * (1 + 1e-9)


@given(devices, dims, dims, dims)
def test_a_product_and_its_transpose_cost_the_same(device: Device, m: int, n: int, k: int) -> None:
    model = GemmModel.of(device, "bf16")
    assert model.seconds(m, n, k) == pytest.approx(model.seconds(n, m, k))


@pytest.mark.parametrize("gpu", ["a100", "h100", "h200"])
def test_the_error_on_held_out_shapes_is_below_8_percent(
    gpu: str,
) -> None:
    name, measured = measured_gemms(gpu)
    held_out = measured[measured.held_out()]
    assert len(held_out.m) > 700
    cluster = {"a100": "dgx_a100_80", "h100": "dgx_h100", "h200": "h200"}[gpu]
    costs = ClusterCosts(Cluster.load(cluster))
    predicted = []
    for m, n, k in zip(held_out.m.tolist(), held_out.n.tolist(), held_out.k.tolist(), strict=True):
        gemm = Gemm(m, n, k)
        predicted.append(
            costs.kernel(Kernel("", "gemm", gemm.flops, 2 * (m * k + k * n + m * n), "bf16", gemm))
        )
    error = np.abs(np.array(predicted) / held_out.seconds - 1)
    assert error.mean() < 0.08
    assert shipped_device(name).kernels.held_out_error == pytest.approx(error.mean(), rel=0.01)


def test_the_fit_recovers_planted_parameters() -> None:
    device = shipped_device("h100_sxm5_80gb")
    planted, shapes = device.kernels, measured_gemms("h100")[1]
    shapes = shapes[np.arange(0, len(shapes.m), 8)]
    exact = GemmModel.of(device, "bf16").seconds_of(shapes.m, shapes.n, shapes.k)
    fitted = fit_gemms(device, "bf16", MeasuredGemms.of(shapes.m, shapes.n, shapes.k, exact))
    assert fitted.held_out_error is not None
    assert fitted.held_out_error < 0.01
    assert fitted.efficiency == pytest.approx(planted.efficiency, rel=0.02)
    assert fitted.memory_efficiency == pytest.approx(planted.memory_efficiency, rel=0.02)
    assert fitted.launch_us is not None
    assert planted.launch_us is not None
    assert fitted.launch_us + fitted.tile_us == pytest.approx(
        planted.launch_us + planted.tile_us, rel=0.05
    )


def test_a_fifth_of_the_shapes_is_held_out() -> None:
    shares = [is_held_out(m, n, 512) for m in range(1, 60) for n in range(1, 60)]
    assert 0.18 < np.mean(shares) < 0.22


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="expected sizes of at least 1"):
        toy().seconds(0, 1, 1)


def test_invalid_measurements_are_refused() -> None:
    with pytest.raises(ValueError, match="2 products and 1 times"):
        MeasuredGemms.of([1, 2], [1, 2], [1, 2], [1.0])
    with pytest.raises(ValueError, match="expected all above 0"):
        MeasuredGemms.of([1], [1], [1], [0.0])
    with pytest.raises(ValueError, match="expected at least 11"):
        fit_gemms(shipped_device("h100_sxm5_80gb"), "bf16", MeasuredGemms.of([1], [1], [1], [1.0]))


def h100(**changes: Any) -> Device:
    device = Cluster.load("dgx_h100").device
    return validate(Device, device.fields() | changes, "device")


def test_products_at_a_power_limit_run_at_a_lower_clock() -> None:
    full, limited, half = h100(), h100(power_limit_w=500), h100(power_limit_w=350)
    assert full.throttling == full.kernels.throttling
    # of 700 W, 140 W do not depend on the clock; the others grow with its third power
    clock = ((500 - 140) / (700 - 140)) ** (1 / 3)
    assert 1 + limited.throttling == pytest.approx((1 + full.throttling) / clock)
    seconds = [
        GemmModel.of(device, "bf16", hot=True).seconds(8192, 8192, 8192)
        for device in (full, limited, half)
    ]
    assert seconds == sorted(seconds)
    assert seconds[1] / seconds[0] == pytest.approx(1 / clock, rel=0.01)
    # elementwise kernels wait for memory
    moved = [KernelModel(device, hot=True).elementwise(1e9, 1) for device in (full, limited)]
    assert moved[0] == moved[1]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"power_limit_w": -1}, "power_limit_w"),
        (
            {"power_limit_w": 100},
            "given 100, expected more than 140 and at most 700",
        ),
        ({"power_limit_w": 1000}, "given 1000, expected more than 140 and at most 700"),
        (
            {"kernels": {"efficiency": 0.8, "memory_efficiency": 0.9}},
            "given 700, but the kernel profile has none to compare it with; expected kernels.power",
        ),
    ],
)
def test_power_limits_that_cannot_be_are_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ClusterError, match=why):
        h100(**changes)
