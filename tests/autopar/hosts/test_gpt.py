"""A GPT with a stage over two hosts, and the tutorials, on the hosts of a Ray cluster."""

import os
import runpy
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest
from flax.training.train_state import TrainState

import autopar
from autopar.hosts import session
from autopar.hosts.driver import RayHosts
from autopar.testing import assert_allclose
from experiments.models import GPT
from simulator.hardware.cluster import Cluster
from tests.autopar.hosts.workers import join_hosts
from tests.steps import SGD, model_step, sgd_args

pytestmark = [pytest.mark.usefixtures("raylets"), pytest.mark.slow]

MODEL = GPT(
    num_layers=2, hidden_size=16, num_heads=2, sequence_length=8, vocab_size=32, batch_size=8
)
HOSTS, DEVICES = 3, 2


step = model_step(MODEL)


def train_three_steps(function: Any, args: Any) -> Any:
    """Return the parameters after three steps."""
    state, batch = args
    for _ in range(3):
        state, _ = function(state, batch)
    autopar.prefetch(state.params)
    return jax.tree.map(np.array, state.params)


def test_the_plan_of_a_gpt_equals_one_device_in_one_process_and_on_hosts_that_share_a_stage(
    tmp_path,
):
    args = sgd_args(MODEL)
    stages = autopar.ManualStageOption([[0], [1]], [(1, 2), (2, 2)], [(2,), (2, 2)])
    method = autopar.PipeshardParallel(
        num_micro_batches=2, layer_option=autopar.AutoLayerOption(2), stage_option=stages
    )
    cluster = Cluster.load("cpu-hosts").with_size(HOSTS, DEVICES)
    autopar.plan_step(step, args, method=method, cluster=cluster).save(tmp_path / "plan.json")
    plan = autopar.Plan.load(tmp_path / "plan.json")
    assert [stage.devices for stage in plan.stages] == [(0, 1), (2, 3, 4, 5)]
    function = autopar.parallelize(step, method=autopar.PlanMethod(plan), donate_argnums=())
    autopar.shutdown()
    results = [train_three_steps(function, args)]
    join_hosts(HOSTS, DEVICES)
    results.append(train_three_steps(function, args))
    autopar.shutdown()
    expected = train_three_steps(jax.jit(step), args)
    for params in results:
        assert_allclose(params, expected, rtol=1e-5, atol=1e-6)


SMALL = ["--dim", "32", "--batch-size", "32", "--cluster", "ray"]


def test_the_pipeline_tutorial_runs_as_a_program_on_two_hosts(raylets):
    nodes = ["--num-nodes", "2", "--num-devices-per-node", "4"]
    command = [sys.executable, "-m", "experiments.tutorials.pipeshard", *SMALL, *nodes]
    # Both raylets are on this machine: they would unpack an uploaded project into one folder, which
    # the workers of the first read while the second writes it.
    own = {"RAY_ADDRESS": raylets.address, "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
    environment = {**os.environ, **own}
    run = subprocess.run(command, text=True, capture_output=True, timeout=240, env=environment)
    assert run.returncode == 0, run.stderr
    assert "Manual assignment: equal to the single device" in run.stdout
    assert "Automatic assignment: equal to the single device" in run.stdout


def run_tutorial(
    name: str, hosts: RayHosts, monkeypatch: pytest.MonkeyPatch, *flags: str
) -> dict[str, Any]:
    """Run a tutorial in this process on the running workers, and return its globals."""
    import ray

    init = autopar.init
    shape = {"num_nodes": len(hosts.numbers), "num_devices_per_node": len(hosts.numbers[0])}

    def join(**_: Any) -> None:
        if session.hosts() is None:
            init(cluster="ray", **shape)

    monkeypatch.setattr(sys, "argv", [name, *SMALL, *flags])
    monkeypatch.setattr(ray, "init", lambda: None)
    monkeypatch.setattr(autopar, "init", join)
    return runpy.run_module(f"experiments.tutorials.{name}", run_name="__main__")


@pytest.mark.hosts(4, 2)
def test_the_pipeline_tutorial_runs_on_four_hosts(hosts, monkeypatch, capsys):
    run_tutorial("pipeshard", hosts, monkeypatch)
    printed = capsys.readouterr().out
    assert "Manual assignment: equal to the single device" in printed
    assert "Automatic assignment: equal to the single device" in printed


@pytest.mark.parametrize(
    "count", [pytest.param(n, marks=pytest.mark.hosts(n, 8 // n), id=f"{n} hosts") for n in (2, 4)]
)
def test_the_quickstart_trains_as_one_device_does(hosts, count, monkeypatch, capsys):
    def run_once(run: Any, sync: Any, **_: Any) -> np.ndarray:
        run()
        sync()
        return np.ones(1)

    monkeypatch.setattr(autopar.util, "benchmark_func", run_once)
    tutorial = run_tutorial("quickstart", hosts, monkeypatch, "--num-layers", "2")
    printed = capsys.readouterr().out
    assert "Output parameter type: <class 'autopar.hosts.arrays.DistributedArray'>" in printed
    assert "Alpa execution per GPU memory usage" in printed
    batch = {"x": tutorial["x"], "y": tutorial["y"]}
    states = [
        TrainState.create(apply_fn=tutorial["model"].apply, params=tutorial["params"], tx=SGD)
        for _ in range(2)
    ]
    steps = [jax.jit(tutorial["train_step"]), tutorial["alpa_train_step"]]
    for _ in range(3):
        states = [step(state, batch) for step, state in zip(steps, states, strict=True)]
    autopar.prefetch(states[1].params)
    assert_allclose(states[1].params, states[0].params, rtol=1e-4, atol=1e-6)
    tutorial.clear()  # JAX caches traced functions, which refer to all globals of the tutorial
