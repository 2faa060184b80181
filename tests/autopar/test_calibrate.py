import jax
import pytest
from typer.testing import CliRunner

import autopar.calibrate
from autopar.calibrate import Effort, calibrate
from autopar.cli import app
from autopar.devices import device_mesh
from simulator.cluster import Cluster

TINY = Effort(tuple(4**i for i in range(2, 9)), (8, 16), (64,), ("float32",), 1e-3)


def test_virtual_devices_become_a_cluster_file_that_plans_are_made_for(tmp_path, monkeypatch):
    monkeypatch.setattr(autopar.calibrate, "CPU", TINY)
    monkeypatch.setattr(autopar.calibrate, "device_mesh", lambda _: device_mesh(2))
    path = tmp_path / "mine.yaml"
    result = CliRunner().invoke(app, ["calibrate", str(path)])
    assert result.exit_code == 0, result.output
    cluster = Cluster.load(path)
    assert (cluster.hosts, cluster.devices_per_host) == (1, 2)
    assert cluster.source.startswith("measured by autopar calibrate on 2 x cpu")
    assert f"jax {jax.__version__}" in cluster.source
    plan = autopar.plan_step(lambda w, x: (w + x.sum(), x.mean()), (1.0, jax.numpy.ones((8, 4))), cluster=cluster)
    assert plan.predicted_seconds > 0


def test_what_is_measured_is_told_and_one_device_has_no_collectives():
    told = []
    cluster = calibrate(jax.devices()[:1], TINY, told.append)
    assert cluster.intra_host == Cluster.load("cpu-virtual").intra_host
    assert [what for what in told if what.startswith("elementwise")] == [
        f"elementwise, {size:,} elements" for size in TINY.elements
    ]
    assert "products, float32, 16 x 64 x 64" in told
    assert not [what for what in told if "all_reduce" in what]


def test_an_all_reduce_is_measured_beside_products_that_take_about_as_long():
    told = []
    overlap = autopar.calibrate._overlap(jax.devices()[:2], TINY, told.append)
    assert told == ["an all_reduce beside products"]
    assert 1 <= overlap.slowdown <= 2


def test_a_longer_kernel_takes_longer():
    x = jax.numpy.ones(4**10)  # 8 MB through memory, against nothing
    short, long = (autopar.calibrate._seconds(lambda x: x * 0.5 + 1, x[:size], TINY) for size in (16, 4**10))
    assert 0 < short < long


@pytest.mark.parametrize("name", ["mine", "mine.json"])
def test_only_cluster_files_are_written(name, tmp_path):
    result = CliRunner().invoke(app, ["calibrate", str(tmp_path / name)], env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert "expected a path that ends in .yaml" in result.output
