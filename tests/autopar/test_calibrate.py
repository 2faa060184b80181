"""Calibration on this machine's devices writes a cluster file within its time budget."""

import time
from importlib.metadata import version

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

import autopar.calibrate
from autopar import microbenchmarks
from autopar.calibrate import Effort, calibrate, spread
from autopar.command_line import app
from autopar.devices import device_mesh
from autopar.microbenchmarks import Benchmark
from simulator.calibration.fit_cluster import Convolution
from simulator.hardware.cluster import Cluster

CONVOLUTIONS = (Convolution(1, 4, 4), Convolution(1, 8, 4), Convolution(1, 8, 8))
TINY = Effort(tuple(4**i for i in range(2, 9)), (8, 16), (64,), CONVOLUTIONS, ("float32",), 1e-3)
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute")


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    """Calibrate two devices by command line, with the minimum of sizes; return output and file."""
    path = tmp_path_factory.mktemp("calibrated") / "mine.yaml"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autopar.calibrate, "CPU", TINY)
        patch.setattr(autopar.calibrate, "device_mesh", lambda _: device_mesh(2))
        # the budget is exceeded on any machine
        hurried = lambda: 100 * time.perf_counter()  # noqa: E731
        patch.setattr(autopar.calibrate._BudgetClock.__init__, "__defaults__", (hurried,))
        result = CliRunner().invoke(
            app, ["calibrate", str(path), "--budget", "1"], env={"COLUMNS": "200"}
        )
    assert result.exit_code == 0, result.output
    return result, path


def test_virtual_devices_become_a_cluster_file_that_plans_are_made_for(calibrated):
    cluster = Cluster.load(calibrated[1])
    assert (cluster.hosts, cluster.devices_per_host) == (1, 2)
    assert cluster.source.startswith("measured by autopar calibrate on 2 x cpu")
    assert f"jax {jax.__version__}" in cluster.source
    plan = autopar.plan_step(
        lambda w, x: (w + x.sum(), x.mean()), (1.0, jax.numpy.ones((8, 4))), cluster=cluster
    )
    assert plan.predicted_seconds > 0


def test_every_kind_of_collective_has_a_curve_of_its_own(calibrated):
    collectives = Cluster.load(calibrated[1]).collectives
    assert collectives is not None
    assert all(getattr(collectives, kind) is not None for kind in KINDS)


def test_convolutions_and_launches_are_measured(calibrated):
    cluster = Cluster.load(calibrated[1])
    assert set(cluster.device.kernels.conv_efficiency_by_dtype) == {"f32"}
    assert 0 < cluster.host_launch_us < 1e5


def test_a_calibration_says_how_it_came_about(calibrated):
    result, path = calibrated
    provenance = Cluster.load(path).provenance
    assert provenance is not None
    assert (provenance.device_kind, provenance.devices, provenance.driver) == ("cpu", 2, None)
    assert (provenance.jax, provenance.jaxlib) == (jax.__version__, version("jaxlib"))
    assert set(provenance.rows) == {"elementwise", "products f32", "convolutions f32", *KINDS}
    assert set(provenance.fitted_error) == set(provenance.rows)
    assert set(provenance.held_out_error) <= set(provenance.rows)
    assert all(what in result.output for what in provenance.rows)


def test_sizes_beyond_the_budget_are_skipped(calibrated):
    provenance = Cluster.load(calibrated[1]).provenance
    assert provenance is not None
    assert provenance.seconds > 1  # the minimum that the fit needs takes longer than the budget
    assert provenance.rows["elementwise"] == 4
    assert provenance.rows["all_reduce"] == 6


def test_measurements_are_reported_and_one_device_has_no_collectives():
    reports = []
    cluster = calibrate(
        jax.devices()[:1], TINY, lambda what, spent: reports.append((what, spent)), budget=600
    )
    assert cluster.intra_host == Cluster.load("cpu-virtual").intra_host
    assert cluster.collectives is None
    names, spent = zip(*reports, strict=True)
    assert {what for what in names if what.startswith("elementwise")} == {
        f"elementwise, {size:,} elements" for size in TINY.elements
    }
    assert {"products, float32, 16 x 64 x 64", "convolutions, float32, 1 x 8 x 8 x 8"} <= set(names)
    assert not [what for what in names if "all_reduce" in what]
    assert list(spent) == sorted(spent)
    assert spent[-1] <= 1


def test_a_budget_is_kept_by_measuring_less():
    """Each measurement takes a second by this clock, and the budget is half of 20 seconds."""
    seconds = iter(range(1000))
    clock = autopar.calibrate._BudgetClock(
        20.0, lambda what, spent: None, lambda: 0.5 * next(seconds)
    )
    assert len(list(clock.within(range(100), 0.5, 2))) == 10
    assert len(list(clock.within(range(100), 0.0, 2))) == 2


@pytest.mark.parametrize("count", range(10))
def test_sizes_are_measured_in_order_of_bisection(count):
    assert sorted(spread(range(count))) == list(range(count))
    assert spread(range(9)) == [0, 8, 4, 2, 6, 1, 3, 5, 7]


def test_an_all_reduce_is_measured_beside_products_that_take_about_as_long():
    reports = []
    clock = autopar.calibrate._BudgetClock(60.0, lambda what, spent: reports.append(what))
    overlap = autopar.calibrate._Measurements(jax.devices()[:2], TINY, 1e-3, clock)._overlap(
        "bfloat16"
    )
    assert reports == ["an all_reduce beside products, bfloat16"]
    assert 1 <= overlap.contention_factor <= 2


def test_a_longer_kernel_takes_longer():
    x = jax.numpy.ones(4**10)  # 8 MB read and written, compared with 128 bytes
    kernels = (Benchmark(lambda x: x * 0.5 + 1, x[:size]) for size in (16, 4**10))
    short, long = (microbenchmarks.kernel_seconds(kernel, 1e-3) for kernel in kernels)
    assert 0 < short < long


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_results_stay_as_large_as_they_are_however_often(dtype):
    device = jax.devices()[0]
    for benchmark in (
        microbenchmarks.matrix_product(device, dtype, 8, 64),
        microbenchmarks.convolution(device, dtype, 2, 4, 8),
    ):
        x, _ = benchmark.x
        y, _ = microbenchmarks.repeated(benchmark)(benchmark.x, 100)
        assert np.std(np.float32(y)) == pytest.approx(np.std(np.float32(x)), rel=0.5)


@pytest.mark.parametrize(("parts", "turns"), [(1, 2), (4, 2), (64, 4)])
def test_elementwise_kernels_go_over_their_parts_in_turn(parts, turns):
    benchmark = microbenchmarks.elementwise(jax.devices()[0], 16, parts)
    zeros = jax.tree.map(jax.numpy.zeros_like, benchmark.x)
    done = microbenchmarks.repeated(benchmark)(zeros, turns)
    assert turns * benchmark.count == 2 * parts
    np.testing.assert_allclose(jax.tree.leaves(done)[0], 0.001 * 0.999 + 0.001, rtol=1e-6)


def test_kernel_seconds_exclude_the_launch_and_are_per_operation(monkeypatch):
    """A program takes 5 ms to start by this clock, and a kernel of two operations 2 ms."""
    now = [0.0]

    def row(x, count):
        now[0] += 5e-3 + 2e-3 * count
        return x

    monkeypatch.setattr(microbenchmarks, "repeated", lambda benchmark: row)
    monkeypatch.setattr(microbenchmarks.time, "perf_counter", lambda: now[0])
    benchmark = Benchmark(lambda x: x, jax.numpy.zeros(()), count=2)
    assert microbenchmarks.kernel_seconds(benchmark, least=1.0) == pytest.approx(1e-3)


@pytest.mark.parametrize("name", ["mine", "mine.json"])
def test_only_cluster_files_are_written(name, tmp_path):
    result = CliRunner().invoke(app, ["calibrate", str(tmp_path / name)], env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert "expected a path that ends in .yaml" in result.output


def test_a_budget_of_nothing_is_refused():
    with pytest.raises(
        ValueError, match="a budget of 0 seconds; expected more than 0, 240 by default"
    ):
        calibrate(budget=0)
