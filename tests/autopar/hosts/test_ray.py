"""Plans on the hosts of a Ray cluster: training, failures of workers, shutdown."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose

import autopar
from autopar import api
from autopar.hosts import session
from autopar.hosts.errors import HostLostError, HostsError, HostTimeoutError, StepFailedError
from autopar.hosts.health import silence_seconds
from tests.autopar.hosts.workers import (
    disturbed,
    is_alive,
    joined,
    joined_hosts,
    pids,
    pipeline,
    until,
)
from tests.autopar.pipeline.stack_steps import stack, stack_batch, stack_params, stack_step


def expected(count: int) -> tuple[Any, Any]:
    params, loss, step = stack_params(), None, jax.jit(stack_step)
    for _ in range(count):
        params, loss = step(params, stack_batch())
    return params, loss


def assert_trained(function: Any, count: int = 3) -> tuple[Any, Any]:
    """Assert that several steps give the results of one device."""
    params, loss = stack_params(), None
    for _ in range(count):
        params, loss = function(params, stack_batch())
    autopar.prefetch((params, loss))
    autopar.testing.assert_allclose((params, loss), expected(count), rtol=1e-5, atol=1e-6)
    return params, loss


@pytest.mark.hosts(2, 4)
def test_two_hosts_train_as_one_device_does(hosts):
    function = autopar.parallelize(stack_step, method=pipeline(2), donate_argnums=(0,))
    params, loss = assert_trained(function)
    assert repr(loss).startswith("DistributedArray(shape=(), dtype=float32")
    assert params["w0"].sharding.mesh.size == 4
    executable = function.get_last_executable()
    assert len(executable.get_stage_execution_info()) == 2
    assert jax.tree.structure(executable.get_input_placement_specs()[0]) == jax.tree.structure(
        params
    )
    assert sum(session.hosts().num_arrays()) == len(jax.tree.leaves(params)) + 1  # pyright: ignore
    assert executable.profile_with_dummy_inputs(warmup=1, number=1, repeat=2).shape == (2,)


@pytest.mark.hosts(2, 4)
def test_the_plan_of_one_process_runs_on_hosts(hosts, tmp_path):
    args = stack_params(), stack_batch()
    plan = autopar.plan_step(
        stack_step, args, method=pipeline(4), cluster="cpu-virtual", mesh_shape=(8,)
    )
    plan.save(tmp_path / "plan.json")
    function = autopar.parallelize(
        stack_step, method=autopar.PlanMethod(autopar.Plan.load(tmp_path / "plan.json"))
    )
    assert_trained(function)


@pytest.mark.hosts(2, 4)
def test_a_state_is_made_where_the_step_wants_it_and_another_step_follows(hosts):
    step = autopar.parallelize(stack_step, method=pipeline(2))
    make = autopar.parallelize(
        lambda scale: jax.tree.map(lambda leaf: leaf * scale, stack_params()),
        method=autopar.CreateStateParallel(step, (stack_batch(),)),
    )
    params = make(np.float32(1.0))
    assert all(isinstance(leaf, autopar.DistributedArray) for leaf in jax.tree.leaves(params))
    params, _ = step(params, stack_batch())
    assert_allclose(np.array(params["w3"]), expected(1)[0]["w3"], rtol=1e-5, atol=1e-6)


@pytest.mark.hosts(2, 4)
def test_a_donated_array_can_not_be_read(hosts):
    function = autopar.parallelize(stack_step, method=pipeline(2), donate_argnums=(0,))
    first, _ = function(stack_params(), stack_batch())
    function(first, stack_batch())
    with pytest.raises(RuntimeError, match="was donated"):
        np.array(first["w0"])


@pytest.mark.slow
@pytest.mark.hosts(4, 2)
def test_stages_that_span_hosts_do_not_deadlock(hosts):
    assert_trained(autopar.parallelize(stack_step, method=pipeline(2)), 60)


@pytest.mark.slow
@pytest.mark.hosts(2, 4)
def test_hosts_that_share_another_mesh_start_anew(hosts):
    assert_trained(
        autopar.parallelize(
            stack_step, method=autopar.ShardParallel(devices=(2, 4), num_micro_batches=2)
        )
    )


def compiled(hosts: Any, host: int, name: str, disturb: Any) -> tuple[Any, Any]:
    """Return a pipeline on two hosts that has run once and is now disturbed, and its parameters."""
    function = autopar.parallelize(stack_step, method=pipeline(2))
    params, loss = function(stack_params(), stack_batch())
    autopar.prefetch((params, loss))
    disturbed(hosts, host, name, disturb)
    return function, params


@pytest.mark.slow
@pytest.mark.hosts(2, 4)
def test_a_killed_worker_is_an_error_with_its_host_and_instruction(hosts):
    function, params = compiled(hosts, 1, "1B1", lambda: time.sleep(600))
    killed: list[float] = []

    def kill(pid: int) -> None:
        killed.append(time.monotonic())
        os.kill(pid, signal.SIGKILL)

    threading.Timer(4, kill, [pids()[1]]).start()
    with pytest.raises(
        HostLostError, match=r"host 1 \(.*\), mesh 1 of the step, last heard of at 1B1, is lost"
    ) as caught:
        np.array(function(params, stack_batch())[1])
    assert time.monotonic() - killed[0] < 10
    assert (caught.value.host, caught.value.meshes, caught.value.instruction) == (1, (1,), "1B1")
    with pytest.raises(HostsError, match=r"autopar\.init"):
        function(stack_params(), stack_batch())
    joined(2, 4)
    assert_trained(autopar.parallelize(stack_step, method=pipeline(2)))


@pytest.mark.hosts(2, 4)
def test_an_instruction_that_fails_is_an_error_with_its_mesh(hosts):
    def fail() -> None:
        raise MemoryError("no room")

    function, params = compiled(hosts, 1, "1F2", fail)
    start = time.monotonic()
    with pytest.raises(
        StepFailedError, match=r"host 1, mesh 1, instruction '1F2': MemoryError: no room"
    ) as caught:
        function(params, stack_batch())[0]["w0"].block_until_ready()  # on the other host
    assert time.monotonic() - start < 10
    assert (caught.value.host, caught.value.mesh, caught.value.instruction) == (1, 1, "1F2")


@pytest.mark.slow
@pytest.mark.hosts(2, 4)
def test_a_hung_worker_is_an_error_with_its_instruction_although_others_wait(hosts):
    function, params = compiled(hosts, 0, "0F1", lambda: time.sleep(600))
    hosts.timeout = 5
    said = r"host 0 .*, mesh 0 .* within 5 s: it has been at 0F1 of mesh 0 .* Meanwhile host 1 has been at recv .*larger timeout"
    with pytest.raises(HostTimeoutError, match=said) as caught:
        np.array(function(params, stack_batch())[1])  # on host 1
    error = caught.value
    assert (error.host, error.meshes, error.mesh, error.instruction) == (0, (0,), 0, "0F1")


@pytest.mark.slow
@pytest.mark.hosts(2, 4)
def test_a_stopped_worker_is_an_error_before_the_timeout(hosts):
    function, params = compiled(hosts, 0, "0F1", lambda: None)
    hosts.silence = silence_seconds({})
    os.kill(pids()[0], signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(
        HostTimeoutError, match=r"host 0 .* has not said for \d+ s what it is doing"
    ) as caught:
        np.array(function(params, stack_batch())[1])
    assert time.monotonic() - start < 15  # 8 s, and the delay of a busy machine
    assert (caught.value.host, caught.value.meshes) == (0, (0,))


@pytest.mark.usefixtures("raylets")
def test_more_hosts_than_the_cluster_has_are_refused():
    with pytest.raises(HostsError, match="9 hosts asked for, but the Ray cluster has 4"):
        autopar.init(cluster="ray", num_nodes=9)


@pytest.mark.slow
@pytest.mark.hosts(2, 4)
def test_more_devices_than_there_are_are_refused(hosts):
    with pytest.raises(
        ValueError, match=r"mesh of shape \(16,\) needs 16 devices, the hosts have 8"
    ):
        autopar.parallelize(stack_step, method=autopar.ShardParallel(devices=16))(
            stack_params(), stack_batch()
        )
    args = stack_params(), stack_batch()
    plan = autopar.plan_step(
        stack_step, args, method=pipeline(2), cluster="dgx_h100", mesh_shape=(8,)
    )
    joined(1, 4)
    with pytest.raises(ValueError, match="the plan needs 8 devices, the 1 hosts have 4"):
        autopar.parallelize(stack_step, method=autopar.PlanMethod(plan))(*args)


DRIVER = """
import sys, time, ray, autopar
from autopar.hosts import session
ray.init(address=sys.argv[1], log_to_driver=False)
autopar.init(cluster="ray", num_nodes=1, num_devices_per_node=1)
print(*(each["pid"] for each in session.hosts().ask_all("environment")), flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_workers_end_with_their_driver(raylets):
    autopar.shutdown()
    command = [sys.executable, "-W", "ignore", "-c", DRIVER, raylets.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as driver:
        assert driver.stdout is not None
        there = [int(pid) for pid in driver.stdout.readline().split()]
        assert there
        driver.kill()
    assert until(lambda: not any(map(is_alive, there)))


@pytest.mark.slow
@pytest.mark.hosts(2, 4)
def test_shutdown_leaves_nothing_behind(hosts):
    from ray.util import placement_group_table

    assert_trained(autopar.parallelize(stack_step, method=pipeline(2)), 1)
    there = pids()
    autopar.shutdown()
    assert until(lambda: not any(map(is_alive, there)))
    assert {group["state"] for group in placement_group_table().values()} <= {"REMOVED"}
    function = autopar.parallelize(stack_step, method=pipeline(2))
    assert_trained(function, 1)  # in this process again


@pytest.mark.slow
def test_a_pipeline_on_unequal_hosts_trains_as_one_device_does(raylets):
    autopar.init(cluster="ray", num_devices_per_node=(4, 2), timeout=120)
    assert list(map(len, joined_hosts().numbers)) == [4, 2]
    stages = autopar.ManualStageOption([[0, 1, 2], [3]], [(1, 4), (1, 2)], [(2, 2), (2,)])
    function = autopar.parallelize(
        stack_step, method=autopar.PipeshardParallel(num_micro_batches=4, stage_option=stages)
    )
    params, _ = assert_trained(function)
    assert [params[name].array.place.mesh.devices for name in ("w2", "w3")] == [
        (0, 1, 2, 3),
        (4, 5),
    ]


@pytest.mark.slow
@pytest.mark.hosts(2, 4)
def test_workers_forget_the_programs_that_the_driver_has_dropped(hosts, monkeypatch):
    monkeypatch.setattr(api, "MOST_PROGRAMS", 1)
    function = autopar.parallelize(stack_step, method=pipeline(2))
    function.get_executable(stack_params(), stack_batch(8))
    before = hosts.num_jobs()
    for rows in (16, 24, 32):
        function.get_executable(stack_params(), stack_batch(rows))
        gc.collect()
    for now, then in zip(hosts.num_jobs(), before, strict=True):
        assert now <= then + 1  # the last program, and the one that it replaced
    assert_trained(function, 1)


def loss_of(params: Any, batch: Any) -> jax.Array:
    return jax.numpy.mean((stack(params, batch["x"]) - batch["y"]) ** 2)


@pytest.mark.hosts(2, 4)
@pytest.mark.parametrize(
    ("method", "count"),
    [(pipeline(2), 4), (autopar.ShardParallel(devices=(4,)), None)],
    ids=["pipeline", "one mesh"],
)
def test_an_evaluation_follows_a_step_to_its_hosts(hosts, method, count):
    step = autopar.parallelize(stack_step, method=method)
    params, _ = step(stack_params(), stack_batch())
    evaluate = autopar.parallelize(
        loss_of, method=autopar.FollowParallel(step, num_micro_batches=count)
    )
    assert_allclose(
        np.array(evaluate(params, stack_batch())), loss_of(expected(1)[0], stack_batch()), rtol=1e-5
    )
    assert len(evaluate.get_last_executable().plan.stages) == (1 if count is None else 2)
    _, loss = step(params, stack_batch())  # which was not donated
    assert_allclose(np.array(loss), expected(2)[1], rtol=1e-5)
