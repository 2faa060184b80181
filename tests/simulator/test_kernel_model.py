"""Kernels take waves of tiles, traffic or arithmetic, and no less than the roofline."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.costs.kernel_model import KernelModel
from simulator.hardware.cluster import Cluster
from simulator.hardware.cluster_paths import cluster_names
from simulator.hardware.device import Device
from simulator.hardware.kernel_profile import FusedAttention, KernelProfile, Passes
from simulator.work import Gemm, Kernel

TOY = Device(
    name="toy",
    kind="gpu",
    source="made up",
    memory_gb=16,
    cores=10,
    peak_tflop_per_s={"f32": 10, "bf16": 100},
    vector_tflop_per_s=1,
    memory_bandwidth_gb_per_s=1000,
    kernel_launch_us=3,
    kernels=KernelProfile(
        efficiency=0.8, efficiency_by_dtype={"bf16": 0.5}, tile_us=2, memory_efficiency=0.5
    ),
)


def kernel_seconds(device: Device, kernel: Kernel) -> float:
    return KernelModel(device).seconds(kernel)


DEVICES = [Cluster.load(name).device for name in cluster_names()]


def gemm(m: int, n: int, k: int, dtype: str = "f32", width: int = 4, batch: int = 1) -> Kernel:
    sizes = Gemm(m, n, k, batch)
    return Kernel(
        "gemm", "gemm", sizes.flops, batch * width * (m * k + k * n + m * n), dtype, sizes
    )


def test_convolutions_have_their_own_measured_efficiency() -> None:
    kernels = TOY.kernels.model_copy(update={"conv_efficiency_by_dtype": {"bf16": 0.2}})
    device = TOY.model_copy(update={"kernels": kernels})
    assert kernel_seconds(device, Kernel("c", "conv", 20e12, 0, "bf16")) == pytest.approx(1 + 3e-6)
    # the efficiency of products stands in for one that is not measured
    assert kernel_seconds(device, Kernel("c", "conv", 8e12, 0, "f32")) == pytest.approx(1 + 3e-6)


def test_a_memory_kernel_takes_its_traffic_or_its_arithmetic() -> None:
    assert kernel_seconds(TOY, Kernel("copy", "memory", 0, 1e9)) == pytest.approx(
        3e-6 + 1e9 / 500e9
    )
    assert kernel_seconds(TOY, Kernel("exp", "memory", 1e12, 1e9)) == pytest.approx(
        3e-6 + 1e12 / 1e12
    )


def test_fused_attention_reaches_its_part_of_the_peak_in_one_kernel_or_three() -> None:
    attention = FusedAttention(flash2=Passes(forward=0.5, backward=0.25))
    device = TOY.model_copy(
        update={"kernels": TOY.kernels.model_copy(update={"attention": attention})}
    )
    assert kernel_seconds(device, Kernel("a", "attention", 50e12, 1e9, "bf16")) == pytest.approx(
        3e-6 + 1
    )
    assert kernel_seconds(
        device, Kernel("a", "attention backward", 50e12, 1e9, "bf16")
    ) == pytest.approx(9e-6 + 2)
    assert kernel_seconds(device, Kernel("a", "attention", 1e6, 500e9, "bf16")) == pytest.approx(
        3e-6 + 1
    )


def test_an_empty_kernel_costs_its_launch() -> None:
    assert kernel_seconds(TOY, Kernel("nothing", "memory", 0, 0)) == pytest.approx(3e-6)


def test_a_product_takes_whole_waves_of_tiles() -> None:
    # Ten 256 x 128 tiles fill the ten cores once; a core has 0.8 TFLOP/s; traffic is free.
    wave = 2e-6 + 2 * 256 * 128 * 2**20 / 0.8e12
    tiles = Gemm(2560, 128, 2**20)
    assert kernel_seconds(TOY, Kernel("g", "gemm", tiles.flops, 0, gemm=tiles)) == pytest.approx(
        3e-6 + wave
    )
    # One more row needs one more tile; the best tiling has a few smaller tiles in its last wave.
    more = kernel_seconds(TOY, Kernel("g", "gemm", 0, 0, gemm=Gemm(2561, 128, 2**20)))
    assert 1.02 * wave < more < 1.3 * wave


def test_a_small_result_with_a_long_inner_dimension_is_split_over_the_cores() -> None:
    # One 64 x 64 tile would keep one of ten cores busy; its 4 parts keep 4.
    whole = 2e-6 + 2 * 64 * 64 * 2**20 / 0.8e12
    split = kernel_seconds(TOY, Kernel("g", "gemm", 0, 0, gemm=Gemm(64, 64, 2**20)))
    assert whole / 16 < split < whole / 3


def test_arithmetic_and_traffic_overlap_in_part() -> None:
    # A kernel of unknown sizes with 1 s of arithmetic (8 TFLOP/s) and 1 s of traffic (500 GB/s).
    seconds = kernel_seconds(TOY, Kernel("g", "conv", 8e12, 500e9)) - 3e-6
    assert seconds == pytest.approx(2 ** (1 / 2.5))


def test_each_dtype_has_its_own_peak_and_efficiency() -> None:
    assert kernel_seconds(TOY, Kernel("g", "conv", 8e12, 0, "f32")) == pytest.approx(1 + 3e-6)
    assert kernel_seconds(TOY, Kernel("g", "conv", 50e12, 0, "bf16")) == pytest.approx(1 + 3e-6)
    # an unknown dtype has the elementwise peak
    assert kernel_seconds(TOY, Kernel("g", "conv", 0.8e12, 0, "s32")) == pytest.approx(1 + 3e-6)


@pytest.mark.parametrize("size", [2048, 4096, 8192])
def test_a_v100_runs_large_f32_products_at_90_percent_of_its_peak(size: int) -> None:
    seconds = kernel_seconds(Cluster.load("p3.16xlarge").device, gemm(size, size, size))
    assert 0.87 < 2 * size**3 / seconds / 15.7e12 < 0.93


def test_large_products_take_the_measured_time_on_an_h100() -> None:
    # XLA's table of H100 products (OpenXLA, Apache-2.0): 4096 x 4096 x 4096 at 403 TFLOP/s in f32,
    # which is TF32, and two of them at 804 TFLOP/s in bf16.
    device = Cluster.load("dgx_h100").device
    assert kernel_seconds(device, gemm(4096, 4096, 4096)) == pytest.approx(
        2 * 4096**3 / 403e12, rel=0.1
    )
    assert kernel_seconds(device, gemm(4096, 4096, 4096, "bf16", 2, batch=2)) == pytest.approx(
        4 * 4096**3 / 804e12, rel=0.1
    )


dims = st.integers(1, 20_000)


@given(st.sampled_from(DEVICES), dims, dims, dims, st.sampled_from(["f32", "f16", "bf16"]))
def test_no_product_beats_the_roofline(device: Device, m: int, n: int, k: int, dtype: str) -> None:
    kernel = gemm(m, n, k, dtype, 2)
    peak = device.peak_tflop_per_s[dtype] * 1e12
    floor = max(kernel.flops / peak, kernel.bytes / device.memory_bandwidth_gb_per_s / 1e9)
    assert kernel_seconds(device, kernel) >= floor


@given(st.sampled_from(DEVICES), dims, dims, dims)
def test_a_product_and_its_transpose_cost_the_same(device: Device, m: int, n: int, k: int) -> None:
    assert kernel_seconds(device, gemm(m, n, k)) == pytest.approx(
        kernel_seconds(device, gemm(n, m, k))
    )


@given(st.sampled_from(DEVICES), dims, dims, dims, dims)
def test_a_longer_inner_dimension_takes_at_least_as_long(
    device: Device, m: int, n: int, one: int, other: int
) -> None:
    short, long = sorted((one, other))
    assert kernel_seconds(device, gemm(m, n, short)) <= kernel_seconds(device, gemm(m, n, long))
