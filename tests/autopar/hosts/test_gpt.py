"""A GPT of which one stage spans two hosts, and the tutorials, on the hosts of a Ray cluster."""

import os
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest

import autopar
from experiments.models import GPT
from simulator.cluster import Cluster
from tests.autopar.hosts.workers import joined
from tests.autopar.pipeline.steps import sgd_args

pytestmark = pytest.mark.usefixtures("raylets")

MODEL = GPT(num_layers=2, hidden_size=16, num_heads=2, sequence_length=8, vocab_size=32, batch_size=8)
HOSTS, DEVICES = 3, 2


def step(state: Any, batch: Any) -> Any:
    return MODEL.train_step(state, batch, autopar.value_and_grad)


def trained(function: Any, args: Any) -> Any:
    """The parameters after three steps."""
    state, batch = args
    for _ in range(3):
        state, _ = function(state, batch)
    autopar.prefetch(state.params)
    return jax.tree.map(np.array, state.params)


def test_the_plan_of_a_gpt_runs_in_one_process_and_where_a_stage_spans_two_hosts(tmp_path):
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
    found = [trained(function, args)]
    joined(HOSTS, DEVICES)
    found.append(trained(function, args))
    autopar.shutdown()
    expected = trained(jax.jit(step), args)
    for each in found:
        for (path, one), other in zip(jax.tree.leaves_with_path(expected), jax.tree.leaves(each), strict=True):
            np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize(("name", "hosts", "devices"), [("pipeshard", 2, 4), ("quickstart", 4, 2)])
def test_a_tutorial_runs_on_hosts(raylets, name, hosts, devices):
    flags = ["--dim", "32", "--batch-size", "32", "--cluster", "ray"]
    flags += ["--num-nodes", str(hosts), "--num-devices-per-node", str(devices)]
    command = [sys.executable, "-m", f"experiments.tutorials.{name}", *flags]
    environment = {**os.environ, "RAY_ADDRESS": raylets.address}
    run = subprocess.run(command, text=True, capture_output=True, timeout=240, env=environment)
    assert run.returncode == 0, run.stderr
    if name == "pipeshard":
        assert "Manual assignment: equal to the single device" in run.stdout
        assert "Automatic assignment: equal to the single device" in run.stdout
    else:
        assert "Output parameter type: <class 'autopar.hosts.arrays.DistributedArray'>" in run.stdout
        assert "Alpa execution per GPU memory usage" in run.stdout
