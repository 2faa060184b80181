"""Loaders on hosts: each worker reads its own rows ahead; batches do not depend on the hosts."""

import ast
import itertools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import autopar
from autopar import DataLoader, DataLoaderError, MeshDriverDataLoader
from autopar.hosts.driver import RayHosts
from autopar.hosts.errors import HostsError
from tests.autopar.hosts.workers import is_alive, join_hosts, pids, pipeline, until
from tests.autopar.pipeline.stack_steps import WIDTH, stack_params, stack_step

ROWS = 16


def data_parallel_pipeline(stages: int) -> autopar.PipeshardParallel:
    """Return a pipeline with data-parallel stages, which split batches by rows."""
    return pipeline(
        stages, default_auto_sharding_option=autopar.ShardingOptions(data_parallel=True)
    )


def step_and_specs(method: Any, step: Any = stack_step) -> tuple[Any, Any]:
    """Return a step and the placement specs of its batches."""
    function = autopar.parallelize(step, method=method)
    return function, function.get_executable(
        stack_params(), batch(0, ROWS)
    ).get_input_placement_specs()[1]


def batch(start: int, end: int) -> dict[str, np.ndarray]:
    angles = np.arange(start, end)[:, None] * np.arange(1, WIDTH + 1) / 48
    return {"x": np.sin(angles).astype(np.float32), "y": np.cos(angles).astype(np.float32)}


def recording_reader(
    folder: Path, fails: int | None = None
) -> Callable[[int, int, int], Iterator[Any]]:
    """Return a reading function that logs its calls by process and raises at example `fails`."""
    width = WIDTH

    def read(start: int, end: int, batch_size: int) -> Iterator[Any]:
        import numpy as np

        for first in range(start, end, batch_size):
            with open(folder / str(os.getpid()), "a") as file:
                file.write(f"{(first, batch_size)}\n")
            if first == fails:
                raise OSError("disk on fire")
            angles = np.arange(first, first + batch_size)[:, None] * np.arange(1, width + 1) / 48
            yield {"x": np.sin(angles), "y": np.cos(angles)}  # float64

    return read


def reads_by_host(folder: Path, hosts: RayHosts) -> dict[int, list[tuple[int, int]]]:
    """Return for each host the (first example, number of examples) of its reads, in order."""
    host_of_pid = {
        str(environment["pid"]): host
        for host, environment in enumerate(hosts.ask_all("environment"))
    }
    return {
        host_of_pid[file.name]: list(map(ast.literal_eval, file.read_text().splitlines()))
        for file in folder.iterdir()
    }


def assert_batches(batches: Any, first: int = 0, count: int = 3) -> None:
    """Assert that these are the batches `first`, `first` + 1, ... of the examples."""
    batches = list(batches)
    assert len(batches) == count
    for k, actual in enumerate(batches, first):
        autopar.prefetch(actual)
        autopar.testing.assert_allclose(actual, batch(16 * k, 16 * k + 16), rtol=0, atol=0)


def loader(specs: Any, read: Any, **options: Any) -> MeshDriverDataLoader:
    return MeshDriverDataLoader(ROWS, 3 * ROWS + 5, read, specs, **options)


def scaled_step(params: Any, batch: Any, scale: Any) -> Any:
    """Run `stack_step` with layers that all read `scale` and a part of the batch."""

    @autopar.manual_layer_construction
    def loss(params: Any) -> jax.Array:
        x = batch["x"]
        for i, name in enumerate(sorted(params)):
            if i:
                autopar.mark_pipeline_boundary()
            x = jax.numpy.tanh(x @ params[name]) * scale + batch["y"]
        return jax.numpy.mean(x**2)

    value, gradients = autopar.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.5 * g, params, gradients), value


@pytest.mark.parametrize(
    "num_hosts",
    [
        pytest.param(2, marks=pytest.mark.hosts(2, 4), id="a stage per host"),
        pytest.param(
            4, marks=[pytest.mark.hosts(4, 2), pytest.mark.slow], id="a stage over two hosts"
        ),
    ],
)
def test_stages_send_shared_inputs_to_other_stages(hosts, num_hosts):
    assert len(hosts.numbers) == num_hosts
    args = stack_params(), batch(0, 16), np.float32(0.5)
    step = autopar.parallelize(scaled_step, method=data_parallel_pipeline(2))
    specs = step.get_executable(*args).get_input_placement_specs()[1]
    params, reference = args[0], args[0]
    for loaded_batch in DataLoader([batch(16 * k, 16 * k + 16) for k in range(2)], specs):
        params, _ = step(params, loaded_batch, args[2])
    for k in range(2):
        reference, _ = jax.jit(scaled_step)(reference, batch(16 * k, 16 * k + 16), args[2])
    autopar.testing.assert_allclose(params, reference, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.hosts(4, 2)
def test_each_host_of_a_stage_reads_its_own_rows(hosts, tmp_path):
    step, specs = step_and_specs(data_parallel_pipeline(2))
    loaded = loader(specs, recording_reader(tmp_path), repeat=True)
    assert_batches(itertools.islice(loaded.from_step(3), 3))
    reads = reads_by_host(tmp_path, hosts)
    assert sorted(reads) == [0, 1, 2, 3]
    rows = {
        host: sorted({(first % 16, count) for first, count in host_reads})
        for host, host_reads in reads.items()
    }
    assert rows == {0: [(0, 8)], 1: [(8, 8)], 2: [(0, 8)], 3: [(8, 8)]}
    params, _ = step(stack_params(), next(iter(loaded)))
    expected, _ = jax.jit(stack_step)(stack_params(), batch(0, 16))
    assert_allclose(np.array(params["w0"]), expected["w0"], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.hosts(1, 8)
def test_one_host_reads_each_batch_once_for_all_stages(hosts, tmp_path):
    _, specs = step_and_specs(data_parallel_pipeline(2))
    assert_batches(loader(specs, recording_reader(tmp_path)).from_step(1), 1, 2)
    assert reads_by_host(tmp_path, hosts) == {0: [(16, 16), (32, 16)]}


@pytest.mark.hosts(2, 4)
def test_training_from_loaders_equals_training_from_numpy(hosts, tmp_path):
    step, specs = step_and_specs(data_parallel_pipeline(2))
    expected = stack_params()
    for k in range(3):
        expected, _ = jax.jit(stack_step)(expected, batch(16 * k, 16 * k + 16))
    batches = [batch(16 * k, 16 * k + 16) for k in range(3)]
    for source in (
        loader(specs, recording_reader(tmp_path), prefetch_size=2),
        DataLoader(batches, specs),
        batches,
    ):
        params = stack_params()
        for loaded_batch in source:
            params, _ = step(params, loaded_batch)
        autopar.testing.assert_allclose(params, expected, rtol=1e-5, atol=1e-6)


def only_x(read: Any) -> Any:
    return lambda *args: ((batch["x"],) for batch in read(*args))


@pytest.mark.hosts(2, 4)
def test_a_worker_reads_only_the_inputs_of_its_stages(hosts, tmp_path):
    (tmp_path / "both").mkdir()
    (tmp_path / "inputs").mkdir()
    _, specs = step_and_specs(data_parallel_pipeline(2))
    assert [leaf.mesh_ids for leaf in jax.tree.leaves(specs)] == [(0,), (1,)]
    assert_batches(loader(specs, recording_reader(tmp_path / "both")))
    whole = [(0, 16), (16, 16), (32, 16)]
    # the first host reads x, the second one y
    assert reads_by_host(tmp_path / "both", hosts) == {0: whole, 1: whole}
    assert len(list(loader((specs["x"],), only_x(recording_reader(tmp_path / "inputs"))))) == 3
    assert reads_by_host(tmp_path / "inputs", hosts) == {0: whole}


@pytest.mark.hosts(2, 4)
def test_prefetch_size_batches_are_read_ahead_and_unclaimed_ones_are_freed(hosts, tmp_path):
    _, specs = step_and_specs(data_parallel_pipeline(2))
    before = hosts.ask_all("array_keys")
    batches = iter(
        MeshDriverDataLoader(ROWS, 20 * ROWS, recording_reader(tmp_path), specs, prefetch_size=2)
    )
    first = next(batches)
    expected_reads = {0: [(0, 16), (16, 16), (32, 16)], 1: [(0, 16), (16, 16), (32, 16)]}
    assert until(lambda: reads_by_host(tmp_path, hosts) == expected_reads)
    time.sleep(0.1)
    assert reads_by_host(tmp_path, hosts) == expected_reads
    del batches
    assert_array_equal(np.array(first["x"]), batch(0, 16)["x"])
    del first
    assert until(lambda: hosts.ask_all("array_keys") == before)


@pytest.mark.hosts(2, 4)
def test_the_error_of_a_failed_read_names_its_host_and_workers_continue(hosts, tmp_path):
    step, specs = step_and_specs(data_parallel_pipeline(2))
    params, batches = stack_params(), iter(loader(specs, recording_reader(tmp_path, fails=16)))
    params, _ = step(params, next(batches))
    with pytest.raises(
        DataLoaderError,
        match=r"host 0 \(.*\): batch 1, examples 16 to 31, could not be read: OSError: disk on",
    ) as error:
        next(batches)
    assert error.value.host == 0
    assert "in read" in error.value.__notes__[0]  # the traceback of the user's function
    params, _ = step(params, batch(16, 32))
    assert np.isfinite(np.array(params["w0"])).all()
    with pytest.raises(DataLoaderError, match=r"host 0 .*: batch 0, .* is missing"):
        next(iter(loader(specs, lambda *_: iter(()))))
    with pytest.raises(
        DataLoaderError, match=r"host 0 .*: batch 0, .* has arrays at \['x'\], expected them at"
    ):
        next(iter(loader(specs, lambda *_: [{"x": 0}])))


class NotUnpicklable:
    def __call__(self, *_: int) -> Any: ...

    def __reduce__(self) -> Any:
        def fails() -> Any:
            raise ImportError("no such module here")

        return fails, ()


@pytest.mark.hosts(2, 4)
def test_functions_that_can_not_be_pickled_or_unpickled_are_refused(hosts):
    import threading

    _, specs = step_and_specs(data_parallel_pipeline(2))
    lock = threading.Lock()
    with pytest.raises(TypeError, match=r"input_iter_func can't be sent to the workers: .*lock"):
        next(iter(loader(specs, lambda *_: [lock])))

    with pytest.raises(
        DataLoaderError,
        match=r"host 0 .*: input_iter_func can't be loaded here: .*no such module here",
    ):
        next(iter(loader(specs, NotUnpicklable())))


@pytest.mark.hosts(2, 4)
def test_placements_on_devices_that_the_hosts_do_not_have_are_refused(hosts):
    _, specs = step_and_specs(data_parallel_pipeline(2))
    missing_devices = jax.tree.map(lambda spec: replace(spec, devices=((6, 7, 8, 9),)), specs)
    with pytest.raises(ValueError, match="the plan needs 10 devices, the 2 hosts have 8"):
        next(iter(loader(missing_devices, lambda *_: [])))


@pytest.mark.slow
@pytest.mark.hosts(2, 4)
def test_a_loader_continues_on_new_workers_and_an_iteration_does_not(hosts, tmp_path):
    data_loader = loader(
        step_and_specs(data_parallel_pipeline(2))[1], recording_reader(tmp_path), prefetch_size=0
    )
    batches = iter(data_loader)
    next(batches)
    worker_pids = pids()
    autopar.shutdown()
    with pytest.raises(HostsError, match="from_step"):
        next(batches)
    assert until(lambda: not any(map(is_alive, worker_pids)))
    join_hosts(2, 4)
    with pytest.raises(
        ValueError,
        match=r"of hosts \[\d\], but no step that has them as a mesh has been compiled",
    ):
        next(data_loader.from_step(1))
    specs = step_and_specs(data_parallel_pipeline(2))[1]  # each stage is on one host
    across = jax.tree.map(lambda spec: replace(spec, devices=((2, 3, 4, 5),)), specs)
    with pytest.raises(
        ValueError,
        match=r"of hosts \[0, 1\], but no step that has them as a mesh has been compiled",
    ):
        next(iter(loader(across, lambda *_: [])))


@pytest.mark.slow
@pytest.mark.hosts(2, 4)
def test_workers_that_share_a_mesh_read_their_rows_of_each_batch(hosts, tmp_path):
    _, specs = step_and_specs(autopar.DataParallel(num_micro_batches=2))
    data_loader = loader(specs, recording_reader(tmp_path))
    assert_batches(data_loader)
    assert reads_by_host(tmp_path, hosts) == {
        0: [(0, 8), (16, 8), (32, 8)],
        1: [(8, 8), (24, 8), (40, 8)],
    }
    assert_batches(data_loader.from_step(2), 2, 1)
    assert reads_by_host(tmp_path, hosts)[1][3:] == [(40, 8)]
