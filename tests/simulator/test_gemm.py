import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.calibration.gemms import MeasuredGemms, errors, fit_gemms, is_held_out
from simulator.description import ClusterError
from simulator.gemm import PROFILES, GemmModel, GemmProfile
from simulator.validation.measurements import measured_gemms

NAMES = sorted(path.stem for path in PROFILES.glob("*.yaml"))
TOY = GemmProfile(
    gpu="toy",
    source="made up",
    cores=10,
    peak_tflop_per_s=100,
    memory_bandwidth_gb_per_s=1000,
    launch_us=1,
    efficiency=0.8,
    tile_us=2,
    step_ns=0,
    cache_gb_per_s_per_core=1e9,
    memory_efficiency=1,
    half_size_mb=0,
    overlap=100,
    whole_waves=1,
    droop=0,
    split_us=1e3,
)
dims = st.integers(1, 20_000)
profiles = st.sampled_from([GemmProfile.load(name) for name in NAMES])


def test_a_product_takes_whole_waves_of_tiles() -> None:
    # ten 256 x 128 tiles fill the ten cores once, each at 100 * 0.8 / 10 TFLOP/s; an eleventh needs another wave, here of 128 x 128
    wave = 2e-6 + 2 * 256 * 128 * 2**20 / 8e12
    assert GemmModel(TOY).seconds(2560, 128, 2**20) == pytest.approx(1e-6 + wave, rel=1e-6)
    half = TOY.model_copy(update={"whole_waves": 0.0})
    assert GemmModel(half).seconds(2560 + 256, 128, 2**20) == pytest.approx(1e-6 + 1.1 * wave, rel=1e-3)


def test_a_hot_gpu_is_slower_by_its_droop() -> None:
    profile = TOY.model_copy(update={"droop": 0.25, "launch_us": 0.0})
    cold, hot = GemmModel(profile), GemmModel(profile, hot=True)
    assert hot.seconds(4096, 4096, 4096) == pytest.approx(1.25 * GemmModel(TOY).seconds(4096, 4096, 4096), rel=0.01)
    assert 1.0001 * cold.seconds(64, 64, 64) < hot.seconds(64, 64, 64)


@given(profiles, dims, dims, dims, st.integers(1, 64), st.booleans())
def test_one_product_and_arrays_of_them_agree(
    profile: GemmProfile, m: int, n: int, k: int, batch: int, hot: bool
) -> None:
    model = GemmModel(profile, hot=hot)
    assert model.seconds(m, n, k, batch) == pytest.approx(float(model.seconds_of(m, n, k, batch)), rel=1e-9)


@given(profiles, dims, dims, dims)
def test_no_product_beats_the_roofline(profile: GemmProfile, m: int, n: int, k: int) -> None:
    floor = max(
        2 * m * n * k / profile.peak_tflop_per_s / 1e12,
        2 * (m * k + k * n + m * n) / profile.memory_bandwidth_gb_per_s / 1e9,
    )
    assert GemmModel(profile).seconds(m, n, k) >= floor


@given(profiles, dims, dims, dims, st.floats(1, 4), st.floats(1, 4))
def test_faster_hardware_is_never_slower(
    profile: GemmProfile, m: int, n: int, k: int, speed: float, memory: float
) -> None:
    faster = profile.model_copy(
        update={
            "peak_tflop_per_s": profile.peak_tflop_per_s * speed,
            "memory_bandwidth_gb_per_s": profile.memory_bandwidth_gb_per_s * memory,
        }
    )
    # in the same state of heat: a faster GPU sees less load in the same product
    assert GemmModel(faster, hot=True).seconds(m, n, k) <= GemmModel(profile, hot=True).seconds(m, n, k) * (1 + 1e-9)


@given(profiles, dims, dims, dims)
def test_a_product_and_its_transpose_cost_the_same(profile: GemmProfile, m: int, n: int, k: int) -> None:
    assert GemmModel(profile).seconds(m, n, k) == pytest.approx(GemmModel(profile).seconds(n, m, k))


@pytest.mark.parametrize("gpu", ["a100", "h100", "h200"])
def test_the_error_on_shapes_that_nobody_fitted_is_below_8_percent(gpu: str) -> None:
    name, measured = measured_gemms(gpu)
    held = measured[measured.held_out()]
    error = np.abs(errors(GemmModel(GemmProfile.load(name)), held))
    assert len(held.m) > 700
    assert error.mean() < 0.08


def test_planted_parameters_are_found_again() -> None:
    planted = GemmProfile.load("h100_sxm5_80gb")
    shapes = measured_gemms("h100")[1]
    shapes = shapes[np.arange(0, len(shapes.m), 8)]
    exact = GemmModel(planted).seconds_of(shapes.m, shapes.n, shapes.k)
    fitted = fit_gemms(planted, MeasuredGemms.of(shapes.m, shapes.n, shapes.k, exact))
    assert fitted.held_out_error is not None
    assert fitted.held_out_error < 0.01
    assert fitted.efficiency == pytest.approx(planted.efficiency, rel=0.02)
    assert fitted.memory_efficiency == pytest.approx(planted.memory_efficiency, rel=0.02)
    assert fitted.launch_us + fitted.tile_us == pytest.approx(planted.launch_us + planted.tile_us, rel=0.05)


def test_a_fifth_of_the_shapes_is_held_out() -> None:
    shares = [is_held_out(m, n, 512) for m in range(1, 60) for n in range(1, 60)]
    assert 0.18 < np.mean(shares) < 0.22


def test_what_can_not_be_is_refused() -> None:
    with pytest.raises(ValueError, match="expected sizes of at least 1"):
        GemmModel(TOY).seconds(0, 1, 1)
    with pytest.raises(ClusterError, match=r"no GEMM profile 'h1000'; there are .*h100_sxm5_80gb"):
        GemmProfile.load("h1000")
    with pytest.raises(ValueError, match="2 products and 1 times"):
        MeasuredGemms.of([1, 2], [1, 2], [1, 2], [1.0])
    with pytest.raises(ValueError, match="expected all above 0"):
        MeasuredGemms.of([1], [1], [1], [0.0])
    with pytest.raises(ValueError, match="expected at least 11"):
        fit_gemms(TOY, MeasuredGemms.of([1], [1], [1], [1.0]))
