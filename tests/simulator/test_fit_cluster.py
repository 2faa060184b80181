"""Fits of a cluster file recover planted parameters from measurements."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.calibration.fit_cluster import (
    Convolution,
    MeasuredDevice,
    Overlap,
    fit_cluster,
    fit_device,
)
from simulator.calibration.fit_collectives import MeasuredCollectives
from simulator.calibration.shipped_profiles import write_profile
from simulator.costs.kernel_model import KernelModel
from simulator.hardware.cluster import Cluster, Provenance
from simulator.hardware.collective_profile import SizeCurve
from simulator.hardware.device import Device
from simulator.work import Gemm, Kernel

H100, CPU = Cluster.load("dgx_h100"), Cluster.load("cpu-virtual")
SHAPES = [Gemm(m, n, n) for m in (64, 256, 1024, 4096) for n in (128, 512, 2048)]


def measured_on(cluster: Cluster, dtypes: tuple[str, ...] = ("f32", "bf16")) -> MeasuredDevice:
    """Return the measurements that the cost model predicts for `cluster`."""
    model = KernelModel(cluster.device)
    transfers = [
        (8.0 * 4**i, model.seconds(Kernel("", "memory", 0, 8.0 * 4**i))) for i in range(5, 13)
    ]

    def seconds(gemm: Gemm, dtype: str) -> float:
        width = 4 if dtype == "f32" else 2
        moved = width * (gemm.m * gemm.k + gemm.k * gemm.n + gemm.m * gemm.n)
        return model.seconds(Kernel("", "gemm", gemm.flops, moved, dtype, gemm))

    products = {dtype: tuple((gemm, seconds(gemm, dtype)) for gemm in SHAPES) for dtype in dtypes}
    return MeasuredDevice(tuple(transfers), products)


@settings(max_examples=10)
@given(
    st.floats(0.3, 0.95),
    st.floats(0.3, 0.95),
    st.floats(0.3, 0.95),
    st.floats(0.5, 20),
    st.floats(0, 5),
    st.floats(0, 5),
)
def test_the_fit_of_a_gpu_recovers_planted_parameters(
    memory: float, f32: float, bf16: float, launch: float, tile: float, half_size: float
) -> None:
    planted = H100.device.model_copy(
        update={
            "kernel_launch_us": launch,
            "kernels": H100.device.kernels.model_copy(
                update={
                    "launch_us": None,
                    "memory_efficiency": memory,
                    "half_size_mb": half_size,
                    "efficiency_by_dtype": {"f32": f32, "bf16": bf16},
                    "tile_us": tile,
                }
            ),
        }
    )
    measured = measured_on(H100.model_copy(update={"device": planted}))
    fitted = fit_device(H100.device, measured, planted.name, planted.source)
    assert fitted.peak_tflop_per_s == planted.peak_tflop_per_s
    assert fitted.kernels.memory_efficiency == pytest.approx(memory, rel=1e-3)
    assert fitted.kernels.half_size_mb == pytest.approx(half_size, rel=1e-2, abs=1e-3)
    assert fitted.kernel_launch_us == pytest.approx(launch, rel=1e-2)
    assert np.abs(measured.product_errors(fitted)).max() < 0.02
    assert fitted.kernels.efficiency_by_dtype == pytest.approx({"f32": f32, "bf16": bf16}, rel=0.02)


def test_the_peaks_of_a_cpu_are_the_largest_measured_rates() -> None:
    fast = CPU.device.model_copy(
        update={"peak_tflop_per_s": {"f32": 3.0, "f64": 1.0}, "memory_bandwidth_gb_per_s": 50.0}
    )
    fitted = fit_device(
        CPU.device,
        measured_on(CPU.model_copy(update={"device": fast}), ("f32",)),
        "mine",
        "measured",
    )
    assert fitted.memory_bandwidth_gb_per_s == pytest.approx(
        50 * fast.kernels.memory_efficiency, rel=1e-3
    )
    # Large products nearly reach the planted efficiency.
    assert (
        0.9 * 3 * fast.kernels.efficiency
        < fitted.peak_tflop_per_s["f32"]
        <= 3 * fast.kernels.efficiency
    )
    assert fitted.peak_tflop_per_s["f64"] == CPU.device.peak_tflop_per_s["f64"]
    assert fitted.source.startswith("measured; mean error over 12 products 0.")


def test_a_calibrated_cluster_is_one_host_with_the_measured_links(tmp_path) -> None:
    curve = SizeCurve(launch_us=20, hop_us=2, half_size_mb=3, bandwidth_gb_per_s=80)
    rows = [(n, 4.0 * 4**i) for n in (2, 4, 8) for i in range(4, 14)]
    seconds = [curve.seconds("all_reduce", num_bytes, n) for n, num_bytes in rows]
    all_reduces = MeasuredCollectives.of("all_reduce", *zip(*rows, strict=True), seconds)
    overlap = Overlap(computed=2.0, moved=3.0, both=4.0)
    measured = MeasuredDevice((), {}, {}, {"all_reduce": all_reduces}, (overlap,))
    cluster = fit_cluster(H100.with_size(4), H100.device, measured, 8)
    assert (cluster.hosts, cluster.devices_per_host, cluster.inter_host) == (1, 8, None)
    assert cluster.collective_launch_us == pytest.approx(20, rel=0.05)
    assert cluster.intra_host.latency_us == pytest.approx(2, rel=0.05)
    assert cluster.intra_host.half_size_mb == pytest.approx(3, rel=0.1)
    assert cluster.intra_host.bandwidth_gb_per_s == pytest.approx(80, rel=0.05)
    assert cluster.intra_host.contention_factor == 1.5  # 2 s of each take 3 s together
    write_profile(tmp_path / "mine.yaml", cluster)
    loaded = Cluster.load(tmp_path / "mine.yaml")
    assert loaded.intra_host.bandwidth_gb_per_s == pytest.approx(
        cluster.intra_host.bandwidth_gb_per_s, rel=1e-3
    )
    assert loaded.device.xla_target == cluster.device.xla_target


def convolutions_on(
    device: Device, dtypes: tuple[str, ...]
) -> dict[str, tuple[tuple[Convolution, float], ...]]:
    sizes = [Convolution(32, side, channels) for side in (14, 28, 56) for channels in (64, 256)]
    model = KernelModel(device)
    return {
        dtype: tuple(
            (convolution, model.seconds(convolution.kernel(dtype))) for convolution in sizes
        )
        for dtype in dtypes
    }


def test_the_fit_recovers_the_planted_speed_of_convolutions() -> None:
    speeds = {"f32": 0.3, "bf16": 0.55}
    kernels = H100.device.kernels.model_copy(
        update={"launch_us": None, "conv_efficiency_by_dtype": speeds}
    )
    planted = H100.device.model_copy(update={"kernels": kernels})
    without_convolutions = measured_on(H100.model_copy(update={"device": planted}))
    measured = MeasuredDevice(
        without_convolutions.transfers,
        without_convolutions.products,
        convolutions_on(planted, ("f32", "bf16")),
    )
    fitted = fit_device(H100.device, measured, "mine", "measured")
    assert fitted.kernels.conv_efficiency_by_dtype == pytest.approx(speeds, rel=0.05)
    fitted_to_products = fit_device(H100.device, without_convolutions, "mine", "measured")
    assert fitted_to_products.kernels == fitted.kernels.model_copy(
        update={"conv_efficiency_by_dtype": {}}
    )


def test_the_work_of_a_convolution_follows_from_its_sizes() -> None:
    kernel = Convolution(batch=2, side=8, channels=16).kernel("bf16")
    images, window = 2 * 8 * 8 * 16, 3 * 3 * 16 * 16
    assert kernel.flops == 2 * images * 3 * 3 * 16  # a multiply-add per result and window element
    assert kernel.bytes == 2 * (2 * images + window)  # images in and out, and the window


def test_the_provenance_has_the_rows_and_their_errors() -> None:
    curve = SizeCurve(launch_us=20, hop_us=2, half_size_mb=3, bandwidth_gb_per_s=80)
    rows = [(n, 4.0 * 4**i) for n in (2, 4, 8) for i in range(4, 14)]
    seconds = [curve.seconds("collective_permute", num_bytes, n) for n, num_bytes in rows]
    reduces = [curve.seconds("all_reduce", num_bytes, n) for n, num_bytes in rows]
    device = measured_on(H100)
    measured = MeasuredDevice(
        device.transfers,
        device.products,
        convolutions_on(H100.device, ("bf16",)),
        {
            "all_reduce": MeasuredCollectives.of("all_reduce", *zip(*rows, strict=True), reduces),
            "collective_permute": MeasuredCollectives.of(
                "collective_permute", *zip(*rows, strict=True), seconds
            ),
        },
        launch=25e-6,
    )
    provenance = Provenance(
        date="2026-01-01", device_kind="toy", devices=8, jax="1", jaxlib="1", seconds=9.0, rows={}
    )
    cluster = fit_cluster(H100.with_size(4), H100.device, measured, 8, provenance)
    assert cluster.host_launch_us == pytest.approx(25)
    assert cluster.provenance is not None
    assert cluster.provenance.rows == {
        "elementwise": 8,
        "products f32": 12,
        "products bf16": 12,
        "convolutions bf16": 6,
        "all_reduce": 30,
        "collective_permute": 30,
    }
    assert cluster.provenance.held_out_error["collective_permute"] < 0.02
    assert set(cluster.provenance.fitted_error) == set(cluster.provenance.rows)
    assert cluster.curves.curve("collective_permute").seconds(
        "collective_permute", 1e6, 2
    ) == pytest.approx(curve.seconds("collective_permute", 1e6, 2), rel=0.05)


@pytest.mark.parametrize(
    ("both", "contention_factor"), [(2.9, 1.0), (3.0, 1.0), (4.0, 1.5), (5.0, 2.0), (9.0, 2.0)]
)
def test_the_contention_factor_is_between_those_of_parallel_and_of_serial_work(
    both: float, contention_factor: float
) -> None:
    assert (
        Overlap(2.0, 3.0, both).contention_factor
        == Overlap(3.0, 2.0, both).contention_factor
        == contention_factor
    )


def test_a_single_device_keeps_the_links_of_the_base_cluster() -> None:
    cluster = fit_cluster(H100, H100.device, MeasuredDevice((), {}), 1)
    assert cluster.intra_host == H100.intra_host


def test_a_fit_without_enough_measurements_is_refused() -> None:
    with pytest.raises(ValueError, match="two transfers and a product of each dtype"):
        fit_device(CPU.device, MeasuredDevice(((1.0, 1.0),), {"f32": ()}), "mine", "")
