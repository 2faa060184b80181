"""Handles of arrays on other hosts: when arrays are freed, formatting, and calls for each step."""

import time
from typing import Any

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose

import autopar
from autopar.hosts.driver import RayHosts
from autopar.hosts.worker import Worker
from autopar.ir.host_memory import HOST_KIND
from tests.autopar.hosts.workers import call_before_instruction, join_hosts, pipeline
from tests.autopar.pipeline.stack_steps import serial_stack, stack_batch, stack_params, stack_step
from tests.autopar.recompute import test_offloading as offloading


def stored_keys(hosts: RayHosts) -> list[frozenset[int]]:
    """Return the keys of each worker's arrays after its pending calls, without freeing any."""
    return [hosts.on_worker(host, Worker.array_keys) for host in range(len(hosts.numbers))]


@pytest.mark.slow
@pytest.mark.hosts(2, 4)
def test_an_array_without_a_handle_is_freed_with_the_next_call(hosts, tmp_path):
    function = autopar.parallelize(stack_step, method=pipeline(2))
    executable = function.get_executable(stack_params(), stack_batch())
    array_place = executable.places[0]  # pyright: ignore[reportAttributeAccessIssue]
    placements = executable.get_input_placement_specs()[0]
    autopar.save_checkpoint(tmp_path, stack_params(), 0)
    requests = {
        "wait": lambda: hosts.wait(),
        "put": lambda: hosts.put(np.zeros(array_place.shape, array_place.dtype), array_place),
        "zeros": lambda: hosts.zeros(array_place),
        "restore": lambda: autopar.restore_checkpoint(tmp_path, 0, placements),
        "load": lambda: autopar.parallelize(
            stack_step, method=pipeline(2, pipeline_schedule="gpipe")
        ).get_executable(stack_params(), stack_batch()),
    }
    for name, request in requests.items():
        array = hosts.zeros(array_place)
        key = array.key
        assert key in stored_keys(hosts)[0]
        del array
        assert key in stored_keys(hosts)[0]
        request()
        assert key not in stored_keys(hosts)[0], name


@pytest.mark.hosts(2, 4)
def test_a_deleted_array_is_freed_immediately(hosts):
    function = autopar.parallelize(stack_step, method=pipeline(2))
    params, loss = function(stack_params(), stack_batch())
    autopar.prefetch((params, loss))
    assert f"{loss:.3f}" == f"{float(loss):.3f}"
    assert f"{loss}" == repr(loss)
    with pytest.raises(TypeError, match="format"):
        f"{params['w0']:.3f}"
    key = params["w0"].key
    assert key in stored_keys(hosts)[0]
    params["w0"].delete()
    assert key not in stored_keys(hosts)[0]
    assert params["w0"].is_deleted()
    assert not loss.is_deleted()
    for use in (np.array, lambda array: function({**params, "w0": array}, stack_batch())):
        with pytest.raises(RuntimeError, match="was deleted"):
            use(params["w0"])


@pytest.mark.slow
@pytest.mark.hosts(2, 4)
def test_every_use_of_an_array_of_ended_workers_is_refused(hosts, tmp_path):
    function = autopar.parallelize(stack_step, method=pipeline(2))
    params, _ = function(stack_params(), stack_batch())
    fetched, _ = function(stack_params(), stack_batch())
    autopar.prefetch(fetched)
    executable = function.get_last_executable()
    autopar.shutdown()
    local_function = autopar.parallelize(stack_step, method=autopar.ShardParallel(8))
    uses = {
        "another function in this process": lambda: local_function(params, stack_batch()),
        "the executable that has ended": lambda: executable(params, stack_batch()),
        "numpy": lambda: np.array(params["w0"]),
        "saving": lambda: autopar.save_checkpoint(tmp_path, params, 0),
    }
    for name, use in uses.items():
        with pytest.raises(
            autopar.HostsError, match=r"was lost: the workers that stored it were ended"
        ) as error:
            use()
        assert "\n" not in str(error.value), name
    join_hosts(2, 4)
    uses["the same function on new workers"] = lambda: function(params, stack_batch())
    uses["one array of many"] = lambda: function(
        {**stack_params(), "w0": params["w0"]}, stack_batch()
    )
    del uses["another function in this process"]
    for use in uses.values():
        with pytest.raises(
            autopar.HostsError, match=r"was lost: the workers that stored it were ended"
        ):
            use()
    updated, _ = function(fetched, stack_batch())  # fetched before the workers ended
    assert_allclose(np.array(updated["w0"]), serial_stack(2)[0]["w0"], rtol=1e-5, atol=1e-6)


@pytest.mark.hosts(2, 4)
def test_placed_arguments_are_not_sent_again(hosts, monkeypatch):
    import ray

    function = autopar.parallelize(stack_step, method=pipeline(2))
    args = function.preshard_dynamic_args(stack_params(), stack_batch())
    assert all(isinstance(leaf, autopar.DistributedArray) for leaf in jax.tree.leaves(args))
    monkeypatch.setattr(ray, "put", None)
    params, loss = function(*args)
    expected, value = serial_stack(1)
    assert_allclose(np.array(loss), value, rtol=1e-5)
    assert_allclose(np.array(params["w3"]), expected["w3"], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.hosts(2, 4)
def test_state_that_is_offloaded_on_hosts_has_the_numbers_of_one_device(hosts):
    method = autopar.ShardParallel(offload="optimizer")
    state, batch = offloading.arguments()
    function = autopar.parallelize(offloading.train_step, method=method)
    updated, _ = function(state, batch)
    moment = jax.tree.leaves(updated[1])[1]
    assert isinstance(moment, autopar.DistributedArray)
    assert moment.sharding.memory_kind == HOST_KIND
    expected, _ = jax.jit(offloading.train_step)(state, batch)
    for result, value in zip(
        jax.tree.leaves(updated[:2]), jax.tree.leaves(expected[:2]), strict=True
    ):
        assert_allclose(np.array(result), value, rtol=2e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.hosts(2, 4)
def test_a_step_is_one_call_per_worker_and_the_driver_does_not_wait(hosts, monkeypatch):
    function = autopar.parallelize(stack_step, method=pipeline(2))
    params, loss = function(stack_params(), stack_batch())
    autopar.prefetch((params, loss))
    call_before_instruction(hosts, 0, "0F0", lambda: time.sleep(4))
    calls, call = [], hosts.call

    def spy(host: int, method: str, *args: Any) -> Any:
        calls.append((host, method))
        return call(host, method, *args)

    monkeypatch.setattr(hosts, "call", spy)
    start = time.monotonic()
    for _ in range(2):
        params, loss = function(params, stack_batch())
    dispatch_seconds = time.monotonic() - start
    assert calls == [(0, "run"), (1, "run")] * 2
    hosts.wait()
    assert dispatch_seconds < 4 < 8 < time.monotonic() - start
