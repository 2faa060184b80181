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
    call_before_instruction,
    is_alive,
    join_hosts,
    joined_hosts,
    pids,
    pipeline,
    until,
)
from tests.autopar.microbatch.steps_of_all_examples import BATCH, PARAMS, STEPS
from tests.autopar.pipeline.stack_steps import (
    serial_stack,
    stack_batch,
    stack_loss,
    stack_params,
    stack_step,
)


def assert_trained(function: Any, count: int = 3) -> tuple[Any, Any]:
    """Assert that several steps give the results of one device."""
    params, loss = stack_params(), None
    for _ in range(count):
        params, loss = function(params, stack_batch())
    autopar.prefetch((params, loss))
    autopar.testing.assert_allclose((params, loss), serial_stack(count), rtol=1e-5, atol=1e-6)
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
    assert sum(map(len, session.hosts().ask_all("array_keys"))) == len(jax.tree.leaves(params)) + 1  # pyright: ignore
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
def test_two_hosts_make_two_passes_as_one_device_does(hosts):
    step = STEPS["clip"]
    method = autopar.PipeshardParallel(
        num_micro_batches=4, layer_option=autopar.AutoLayerOption(2), stage_option="uniform"
    )
    function = autopar.parallelize(step, method=method, donate_argnums=(0,))
    params, expected = PARAMS, PARAMS
    for _ in range(2):
        params, loss = function(params, BATCH)
        expected, wanted = jax.jit(step)(expected, BATCH)
    autopar.prefetch((params, loss))
    autopar.testing.assert_allclose((params, loss), (expected, wanted), rtol=1e-4, atol=1e-5)
    executable = function.get_last_executable()
    assert executable.first_pass is not None
    ran = {span.name for span in executable.execution_timeline().spans if span.category == "task"}
    assert {"2F0", "3F3", "0F0", "1B3"} <= ran


@pytest.mark.hosts(2, 4)
def test_a_created_state_has_the_placement_of_its_step(hosts):
    step = autopar.parallelize(stack_step, method=pipeline(2))
    make = autopar.parallelize(
        lambda scale: jax.tree.map(lambda leaf: leaf * scale, stack_params()),
        method=autopar.CreateStateParallel(step, (stack_batch(),)),
    )
    params = make(np.float32(1.0))
    assert all(isinstance(leaf, autopar.DistributedArray) for leaf in jax.tree.leaves(params))
    params, _ = step(params, stack_batch())
    assert_allclose(np.array(params["w3"]), serial_stack(1)[0]["w3"], rtol=1e-5, atol=1e-6)


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
def test_hosts_that_share_a_mesh_train_as_one_device_does(hosts):
    assert_trained(
        autopar.parallelize(
            stack_step, method=autopar.ShardParallel(devices=(2, 4), num_micro_batches=2)
        )
    )


def delayed_pipeline(hosts: Any, host: int, name: str, action: Any) -> tuple[Any, Any]:
    """Return a pipeline that has run once and now calls `action`, and its parameters."""
    function = autopar.parallelize(stack_step, method=pipeline(2))
    params, loss = function(stack_params(), stack_batch())
    autopar.prefetch((params, loss))
    call_before_instruction(hosts, host, name, action)
    return function, params


@pytest.mark.slow
@pytest.mark.hosts(2, 4)
def test_the_error_of_a_killed_worker_names_its_host_and_instruction(hosts):
    function, params = delayed_pipeline(hosts, 1, "1B1", lambda: time.sleep(600))
    killed: list[float] = []

    def kill(pid: int) -> None:
        killed.append(time.monotonic())
        os.kill(pid, signal.SIGKILL)

    threading.Timer(4, kill, [pids()[1]]).start()
    with pytest.raises(
        HostLostError, match=r"host 1 \(.*\), mesh 1 of the step, last heard of at 1B1, is lost"
    ) as error:
        np.array(function(params, stack_batch())[1])
    assert time.monotonic() - killed[0] < 10
    assert (error.value.host, error.value.meshes, error.value.instruction) == (1, (1,), "1B1")
    with pytest.raises(HostsError, match=r"autopar\.init"):
        function(stack_params(), stack_batch())
    join_hosts(2, 4)
    assert_trained(autopar.parallelize(stack_step, method=pipeline(2)))


@pytest.mark.hosts(2, 4)
def test_the_error_of_a_failed_instruction_names_its_mesh(hosts):
    def fail() -> None:
        raise MemoryError("no room")

    function, params = delayed_pipeline(hosts, 1, "1F2", fail)
    start = time.monotonic()
    with pytest.raises(
        StepFailedError, match=r"host 1, mesh 1, instruction '1F2': MemoryError: no room"
    ) as error:
        function(params, stack_batch())[0]["w0"].block_until_ready()  # on the other host
    assert time.monotonic() - start < 10
    assert (error.value.host, error.value.mesh, error.value.instruction) == (1, 1, "1F2")


@pytest.mark.slow
@pytest.mark.hosts(2, 4)
def test_the_error_of_a_hung_worker_names_its_instruction_and_not_the_waiting_host(hosts):
    function, params = delayed_pipeline(hosts, 0, "0F1", lambda: time.sleep(600))
    hosts.timeout = 5
    message = (
        r"host 0 .*, mesh 0 .* within 5 s: it has been at 0F1 of mesh 0 .* "
        r"Meanwhile host 1 has been at recv .*larger timeout"
    )
    with pytest.raises(HostTimeoutError, match=message) as raised:
        np.array(function(params, stack_batch())[1])  # on host 1
    error = raised.value
    assert (error.host, error.meshes, error.mesh, error.instruction) == (0, (0,), 0, "0F1")


@pytest.mark.slow
@pytest.mark.hosts(2, 4)
def test_a_stopped_worker_is_an_error_before_the_timeout(hosts):
    function, params = delayed_pipeline(hosts, 0, "0F1", lambda: None)
    hosts.silence = silence_seconds({})
    os.kill(pids()[0], signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(
        HostTimeoutError, match=r"host 0 .* has not reported its activity for \d+ s"
    ) as error:
        np.array(function(params, stack_batch())[1])
    assert time.monotonic() - start < 15  # 8 s, and the delay of a busy machine
    assert (error.value.host, error.value.meshes) == (0, (0,))


@pytest.mark.usefixtures("raylets")
def test_more_hosts_than_the_cluster_has_are_refused():
    with pytest.raises(HostsError, match="9 hosts asked for, but the Ray cluster has 4"):
        autopar.init(cluster="ray", num_nodes=9)


@pytest.mark.slow
@pytest.mark.hosts(2, 4)
def test_more_devices_than_the_hosts_have_are_refused(hosts):
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
    join_hosts(1, 4)
    with pytest.raises(ValueError, match="the plan needs 8 devices, the 1 hosts have 4"):
        autopar.parallelize(stack_step, method=autopar.PlanMethod(plan))(*args)


DRIVER = """
import sys, time, ray, autopar
from autopar.hosts import session
ray.init(address=sys.argv[1], log_to_driver=False)
autopar.init(cluster="ray", num_nodes=1, num_devices_per_node=1)
print(*(worker["pid"] for worker in session.hosts().ask_all("environment")), flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_workers_end_with_their_driver(raylets):
    autopar.shutdown()
    command = [sys.executable, "-W", "ignore", "-c", DRIVER, raylets.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as driver:
        assert driver.stdout is not None
        worker_pids = [int(pid) for pid in driver.stdout.readline().split()]
        assert worker_pids
        driver.kill()
    assert until(lambda: not any(map(is_alive, worker_pids)))


@pytest.mark.slow
@pytest.mark.hosts(2, 4)
def test_shutdown_ends_workers_and_placement_groups(hosts):
    from ray.util import placement_group_table

    assert_trained(autopar.parallelize(stack_step, method=pipeline(2)), 1)
    worker_pids = pids()
    autopar.shutdown()
    assert until(lambda: not any(map(is_alive, worker_pids)))
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
def test_workers_free_the_programs_that_the_driver_has_dropped(hosts, monkeypatch):
    monkeypatch.setattr(api, "MOST_PROGRAMS", 1)
    function = autopar.parallelize(stack_step, method=pipeline(2))
    function.get_executable(stack_params(), stack_batch(8))
    before = [hosts.on_worker(host, lambda worker: len(worker.jobs)) for host in range(2)]
    for rows in (16, 24, 32):
        function.get_executable(stack_params(), stack_batch(rows))
        gc.collect()
    for host in range(2):
        count = hosts.on_worker(host, lambda worker: len(worker.jobs))
        assert count <= before[host] + 1  # the last program, and the one that it replaced
    assert_trained(function, 1)


@pytest.mark.hosts(2, 4)
@pytest.mark.parametrize(
    ("method", "count"),
    [(pipeline(2), 4), (autopar.ShardParallel(devices=(4,)), None)],
    ids=["pipeline", "one mesh"],
)
def test_an_evaluation_runs_on_the_hosts_of_its_step(hosts, method, count):
    step = autopar.parallelize(stack_step, method=method)
    params, _ = step(stack_params(), stack_batch())
    evaluate = autopar.parallelize(
        stack_loss, method=autopar.FollowParallel(step, num_micro_batches=count)
    )
    assert_allclose(
        np.array(evaluate(params, stack_batch())),
        stack_loss(serial_stack(1)[0], stack_batch()),
        rtol=1e-5,
    )
    assert len(evaluate.get_last_executable().plan.stages) == (1 if count is None else 2)
    _, loss = step(params, stack_batch())  # the parameters were not donated
    assert_allclose(np.array(loss), serial_stack(2)[1], rtol=1e-5)
