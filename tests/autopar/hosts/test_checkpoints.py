"""Checkpoints of hosts are restored elsewhere; training continues when workers end."""

import os
import signal
import threading
import time
from typing import Any

import jax
import numpy as np
import pytest

import autopar
from autopar.checkpoint import DamagedCheckpointError, saved_steps
from autopar.checkpoint.manifest import Manifest
from autopar.hosts.errors import HostsError, HostTimeoutError
from tests.autopar.hosts.workers import is_alive, join_hosts, joined_hosts, pids, pipeline, until
from tests.autopar.pipeline.stack_steps import serial_stack, stack_batch, stack_params, stack_step
from tests.autopar.test_training import assert_close, batches, expected


@pytest.mark.slow
@pytest.mark.hosts(2, 4)
def test_a_state_is_restored_under_another_plan_on_another_number_of_hosts(hosts, tmp_path):
    params, _ = autopar.parallelize(stack_step, method=pipeline(2))(stack_params(), stack_batch())
    saving = autopar.save_checkpoint(tmp_path, params, 0, wait=False)
    autopar.prefetch(params)
    values = jax.tree.map(np.array, params)
    assert saving.wait() == tmp_path / "0"
    assert {entry.name for entry in (tmp_path / "0").iterdir()} == {
        "manifest.json",
        "host-0",
        "host-1",
    }
    del params
    restores = [
        (4, autopar.ShardParallel((1, 8))),
        (4, pipeline(4)),
        (1, pipeline(2)),
        (0, autopar.ShardParallel(8)),
    ]
    current_count = 2
    for step, (count, method) in enumerate(restores):
        if count == 0:
            autopar.shutdown()
        elif count != current_count:
            join_hosts(count, 8 // count)
        current_count = count
        executable = autopar.parallelize(stack_step, method=method).get_executable(
            stack_params(), stack_batch()
        )
        restored = autopar.restore_checkpoint(
            tmp_path, step, executable.get_input_placement_specs()[0]
        )
        assert jax.tree.structure(restored) == jax.tree.structure(values)
        autopar.save_checkpoint(tmp_path, restored, step + 1)
        written = autopar.restore_checkpoint(tmp_path, step + 1)
        for value, written_value in zip(jax.tree.leaves(values), written.values(), strict=True):
            np.testing.assert_array_equal(value, written_value)
        if count == 1:
            updated, _ = executable(restored, executable.shard_args(restored, stack_batch())[1])
            autopar.prefetch(updated)
            assert_close(updated, jax.jit(stack_step)(values, stack_batch())[0])


@pytest.mark.slow
@pytest.mark.hosts(2, 4)
def test_a_damaged_checkpoint_of_hosts_is_set_aside_for_the_one_before(hosts, tmp_path):
    function = autopar.parallelize(stack_step, method=pipeline(2))
    params, _ = function(stack_params(), stack_batch())
    for step in (0, 1):
        autopar.save_checkpoint(tmp_path, params, step)
    manifest = Manifest.load(tmp_path, 1)
    assert {piece.part for array in manifest.arrays for piece in array.pieces} == {
        "host-0",
        "host-1",
    }
    damaged_pieces = [
        piece.model_copy(update={"checksum": 1}) for piece in manifest.arrays[-1].pieces
    ]
    arrays = (
        *manifest.arrays[:-1],
        manifest.arrays[-1].model_copy(update={"pieces": tuple(damaged_pieces)}),
    )
    (tmp_path / "1" / "manifest.json").write_text(
        manifest.model_copy(update={"arrays": arrays}).to_json()
    )
    placements = function.get_last_executable().get_input_placement_specs()[0]
    with pytest.raises(
        DamagedCheckpointError, match=r"1/host-1 is damaged: tile .* its checksum is another"
    ):
        autopar.restore_checkpoint(tmp_path, 1, placements)
    with pytest.warns(UserWarning, match="of step 1 is set aside as .*, and step 0 is restored"):
        restored = autopar.restore_checkpoint(tmp_path, placement_specs=placements)
    assert_close(function(restored, stack_batch())[0], serial_stack(2)[0])


@pytest.mark.slow
@pytest.mark.hosts(2, 4)
def test_a_worker_that_is_killed_while_it_writes_leaves_earlier_checkpoints_intact(hosts, tmp_path):
    params, _ = autopar.parallelize(stack_step, method=pipeline(2))(stack_params(), stack_batch())
    autopar.save_checkpoint(tmp_path, params, 0)
    saving = autopar.save_checkpoint(tmp_path, params, 1, wait=False)
    os.kill(pids()[1], signal.SIGKILL)
    try:
        saving.wait()
    except HostsError as error:
        assert "host 1" in str(error)  # noqa: PT017 (no error if the write was faster)
    autopar.shutdown()
    last = autopar.latest_step(tmp_path)
    assert last in (0, 1)
    assert len(autopar.restore_checkpoint(tmp_path)) == len(jax.tree.leaves(params))


@pytest.mark.slow
@pytest.mark.hosts(2, 4)
def test_a_worker_that_does_not_finish_writing_is_a_timeout(hosts, tmp_path):
    def stall(worker: Any) -> None:
        from autopar.hosts import worker as module

        module.write = lambda *_: time.sleep(600)

    params, _ = autopar.parallelize(stack_step, method=pipeline(2))(stack_params(), stack_batch())
    autopar.save_checkpoint(tmp_path, params, 0)
    worker_pids = pids()
    hosts.on_worker(1, stall)
    hosts.timeout = 3
    autopar.save_checkpoint(tmp_path, params, 1, wait=False)
    start = time.monotonic()
    with pytest.raises(
        HostTimeoutError, match=r"host 1 \(.*\) has been writing a checkpoint for 3 s"
    ):
        autopar.shutdown()
    assert time.monotonic() - start < 20
    assert until(lambda: not any(map(is_alive, worker_pids)))
    assert autopar.latest_step(tmp_path) == 0


@pytest.mark.slow
@pytest.mark.hosts(2, 4)
def test_placements_on_more_devices_than_the_hosts_have_are_refused(hosts, tmp_path):
    function = autopar.parallelize(stack_step, method=pipeline(2))
    placements = function.get_executable(stack_params(), stack_batch()).get_input_placement_specs()[
        0
    ]
    join_hosts(1, 4)
    autopar.save_checkpoint(tmp_path, stack_params(), 0)
    with pytest.raises(ValueError, match="needs 8 devices, the 1 hosts have 4"):
        autopar.restore_checkpoint(tmp_path, 0, placements)


@pytest.mark.slow
@pytest.mark.hosts(2, 4)
def test_numpy_values_are_restored_with_the_dtypes_of_jax(hosts, tmp_path):
    state = {"count": np.int64(7), "x": np.arange(8.0)}
    function = autopar.parallelize(
        lambda state: state["x"] * state["count"], method=autopar.ShardParallel(4)
    )
    placements = function.get_executable(state).get_input_placement_specs()[0]
    autopar.save_checkpoint(tmp_path, state, 0)
    restored = autopar.restore_checkpoint(tmp_path, 0, placements)
    assert (restored["count"].dtype, restored["x"].dtype) == (np.int32, np.float32)
    np.testing.assert_array_equal(restored["x"], state["x"])
    np.testing.assert_array_equal(function(restored), 7 * state["x"])


@pytest.mark.slow
@pytest.mark.hosts(2, 4)
def test_a_training_loop_continues_after_workers_are_killed(hosts, tmp_path):
    function = autopar.parallelize(stack_step, method=pipeline(2), donate_argnums=(0,))
    steps_run: list[int] = []

    def kill_some(step: int, results: Any) -> None:
        autopar.prefetch(results[1])
        steps_run.append(step)
        if steps_run.count(step) == 1 and step in (5, 11):
            threading.Timer(0.05, os.kill, [pids()[step % 2], signal.SIGKILL]).start()

    state = autopar.train(
        function, stack_params(), batches, 14, tmp_path, save_every=4, on_step=kill_some
    )
    autopar.prefetch(state)
    assert_close(state, expected(14))
    assert sorted(set(steps_run)) == list(range(1, 15))
    assert len(steps_run) > 14
    assert saved_steps(tmp_path) == [12, 14]


@pytest.mark.slow
def test_a_step_is_replanned_for_the_remaining_hosts(raylets, tmp_path):
    join_hosts(4, 2)
    function = autopar.parallelize(stack_step, method=pipeline(2), donate_argnums=(0,))
    placements = function.get_executable(stack_params(), stack_batch()).get_input_placement_specs()[
        1
    ]
    loader = autopar.DataLoader(batches, placements)

    def lose_two(step: int, results: Any) -> None:
        autopar.prefetch(results[1])
        if step == 5 and len(raylets.worker_nodes) == 3:
            for node in list(raylets.worker_nodes)[:2]:
                raylets.remove_node(node, allow_graceful=False)

    try:
        state = autopar.train(
            function, stack_params(), loader, 8, tmp_path, save_every=4, on_step=lose_two
        )
        autopar.prefetch(state)
        assert len(joined_hosts().numbers) == 2
        executable = function.get_last_executable()
        assert executable is not None
        assert [stage.devices for stage in executable.plan.stages] == [(0, 1), (2, 3)]  # pyright: ignore[reportAttributeAccessIssue]
    finally:
        autopar.shutdown()
        while len(raylets.worker_nodes) < 3:
            raylets.add_node(num_cpus=2)
    assert_close(state, expected(8))
