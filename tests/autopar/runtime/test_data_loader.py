"""Loaders in one process: their batches, placements, read-ahead, and the inputs they refuse."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.testing import assert_array_equal

import autopar
from autopar import DataLoader, DataLoaderError, MeshDriverDataLoader
from autopar.lowering.placement_specs import PlacementSpec
from autopar.runtime.batch_reading import Batches, Form, Reader
from tests.autopar.pipeline.stack_steps import WIDTH, stack_batch, stack_params, stack_step

ROWS = 16


@cache
def step(stages: int) -> Any:
    """Return `stack_step`, parallelized over the 8 devices."""
    option = autopar.UniformStageOption(stages)
    return autopar.parallelize(
        stack_step, method=autopar.PipeshardParallel(num_micro_batches=4, stage_option=option)
    )


@cache
def placements(stages: int = 2) -> Any:
    return (
        step(stages)
        .get_executable(stack_params(), stack_batch(ROWS))
        .get_input_placement_specs()[1]
    )


def examples(start: int, end: int) -> dict[str, np.ndarray]:
    """Return examples whose entries are all their number, in `y` plus 0.1."""
    x = np.repeat(np.arange(start, end, dtype=np.float32)[:, None], WIDTH, 1)
    return {"x": x, "y": x + 0.1}


class Recorded:
    """A user's reading function that records its calls and the examples it has read."""

    def __init__(self, make: Callable[[int, int], Any] = examples) -> None:
        self.make, self.calls, self.read = make, [], []

    def __call__(self, start: int, end: int, batch_size: int) -> Iterator[Any]:
        self.calls.append((start, end, batch_size))
        for first in range(start, end, batch_size):
            self.read.append(first)
            yield self.make(first, first + batch_size)


def numbers(batches: Any) -> list[list[int]]:
    """Return the numbers of the examples in each batch."""
    return [np.asarray(batch["x"])[:, 0].astype(int).tolist() for batch in batches]


def first_numbers(batches: Any) -> list[int]:
    """Return the number of the first example in each batch."""
    return [first for first, *_ in numbers(batches)]


def until(condition: Callable[[], bool]) -> bool:
    """Wait up to 10 seconds for a condition, and return whether it holds."""
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def data_loader(batches: Any, **options: Any) -> DataLoader:
    return DataLoader(batches, placements(), **options)


def mesh_loader(read: Any, num_samples: int = 3 * ROWS, **options: Any) -> MeshDriverDataLoader:
    return MeshDriverDataLoader(ROWS, num_samples, read, placements(), **options)


# DataLoader: batches that this process makes


def test_batches_have_the_placements_of_the_step():
    first, second = data_loader([stack_batch(ROWS), examples(0, ROWS)])
    wanted = step(2).get_last_executable().in_shardings[1]
    assert jax.tree.map(lambda leaf: leaf.sharding, first) == wanted
    assert_array_equal(second["y"], examples(0, ROWS)["y"])


def test_a_step_on_one_mesh_takes_batches_as_they_are():
    function = autopar.parallelize(stack_step, method=autopar.DataParallel())
    executable = function.get_executable(stack_params(), stack_batch(ROWS))
    params = executable.shard_args(stack_params(), stack_batch(ROWS))[0]
    (batch,) = MeshDriverDataLoader(
        ROWS, ROWS, Recorded(), executable.get_input_placement_specs()[1]
    )
    assert batch["x"].sharding.is_equivalent_to(executable.in_shardings[1]["x"], 2)
    executable(params, batch)


def test_training_from_a_loader_is_training_from_numpy():
    batches = [
        jax.tree.map(lambda leaf: leaf / 50, examples(16 * k, 16 * k + ROWS)) for k in range(3)
    ]

    def trained(given: Any) -> Any:
        params = stack_params()
        for batch in given:
            params, _ = step(2)(params, batch)
        return params

    def read(start: int, end: int, batch_size: int) -> Any:
        return (
            jax.tree.map(lambda leaf: leaf / 50, examples(k, k + batch_size))
            for k in range(start, end, batch_size)
        )

    expected = trained(batches)
    for loader in (data_loader(batches), mesh_loader(read)):
        jax.tree.map(assert_array_equal, trained(loader), expected)


@pytest.mark.parametrize("prefetch_size", [0, 1, 3])
def test_the_loader_prefetches_the_given_number_of_batches(prefetch_size):
    done = []

    def batches() -> Iterator[Any]:
        for k in range(8):
            done.append(k)
            yield examples(k, k + ROWS)

    loader = iter(data_loader(batches(), prefetch_size=prefetch_size))
    assert done == []
    for k in range(8):
        next(loader)
        assert done == list(range(min(8, k + 1 + prefetch_size)))


def test_a_list_can_be_read_repeatedly_and_from_any_batch():
    loader = data_loader([examples(k, k + ROWS) for k in range(4)])
    assert len(loader) == 4
    assert first_numbers(loader) == first_numbers(loader) == [0, 1, 2, 3]
    assert first_numbers(loader.from_step(2)) == [2, 3]


def test_a_function_is_called_with_the_first_batch_that_is_read():
    starts = []

    def batches(step: int) -> Iterator[Any]:
        starts.append(step)
        return (examples(k, k + ROWS) for k in itertools.count(step))

    assert next(data_loader(batches).from_step(1000))["x"][0, 0] == 1000
    assert starts == [1000]


def test_an_iterator_is_not_gone_through_twice():
    loader = data_loader(iter([examples(0, ROWS), examples(1, ROWS + 1)]))
    assert len(list(loader)) == 2
    with pytest.raises(ValueError, match="can't be read again"):
        iter(loader)


def test_errors_of_the_user_s_iterator_are_raised():
    def batches() -> Iterator[Any]:
        yield examples(0, ROWS)
        raise OSError("disk on fire")

    with pytest.raises(OSError, match="disk on fire"):
        list(data_loader(batches()))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (examples(0, 8), r"batch 0 has float32\[8, 16\] at \['x'\], expected float32\[16, 16\]"),
        (
            {"x": examples(0, 16)["x"]},
            r"batch 0 has arrays at \['x'\], expected them at \['x'\], \['y'\]",
        ),
        (
            {k: v.astype(np.int32) for k, v in examples(0, 16).items()},
            r"batch 0 has int32.* expected float32",
        ),
        (
            {"x": np.array("a"), "y": np.array("b")},
            r"batch 0 has <U1\[\] at \['x'\], expected float32",
        ),
    ],
)
def test_batches_that_the_step_does_not_take_are_refused(batch, message):
    with pytest.raises(DataLoaderError, match=message):
        next(iter(data_loader([batch])))


@pytest.mark.parametrize("prefetch_size", [0, 1, 5])
def test_an_error_comes_after_the_batches_before_it(prefetch_size: int) -> None:
    def failing() -> Iterator[Any]:
        yield examples(0, ROWS)
        yield examples(ROWS, 2 * ROWS)
        raise OSError("no more files")

    cases = [
        (failing(), OSError, "no more files"),
        ([*itertools.islice(failing(), 2), examples(0, 3)], DataLoaderError, "batch 2 has"),
    ]
    for batches, error, message in cases:
        loaded = iter(DataLoader(batches, placements(), prefetch_size))
        assert first_numbers(itertools.islice(loaded, 2)) == [0, ROWS]
        with pytest.raises(error, match=message):
            next(loaded)


def test_numpy_s_numbers_become_jax_s():
    (batch,) = data_loader(
        [{name: leaf.astype(np.float64) for name, leaf in examples(0, ROWS).items()}]
    )
    assert batch["x"].dtype == np.float32


# MeshDriverDataLoader: batches that a function reads


def test_batch_k_has_the_examples_from_k_batches_on_and_the_rest_is_left_out():
    read = Recorded()
    loader = mesh_loader(read, 3 * ROWS + 5)
    assert len(loader) == 3
    assert numbers(loader) == [list(range(16 * k, 16 * k + 16)) for k in range(3)]
    assert read.calls == [(0, 48, 16)]  # one call for all batches
    assert numbers(loader) == numbers(loader)


def test_reading_starts_at_the_step_and_repeats():
    read = Recorded()
    assert first_numbers(mesh_loader(read).from_step(2)) == [32]
    assert read.calls == [(32, 48, 16)]
    endless = mesh_loader(read, repeat=True).from_step(5)
    assert first_numbers(itertools.islice(endless, 5)) == [32, 0, 16, 32, 0]
    assert read.calls[1:4] == [(32, 48, 16), (0, 48, 16), (0, 48, 16)]


def test_reading_is_ahead_by_the_prefetch_size():
    read = Recorded()
    loader = iter(mesh_loader(read, 8 * ROWS, prefetch_size=2))
    next(loader)
    assert until(lambda: read.read == [0, 16, 32])
    time.sleep(0.05)
    assert read.read == [0, 16, 32]


def test_the_thread_ends_with_the_loader():
    before = set(threading.enumerate())
    batches = iter(mesh_loader(Recorded(), 8 * ROWS))
    next(batches)
    (reader,) = set(threading.enumerate()) - before
    del batches
    assert until(lambda: not reader.is_alive())


def test_functions_may_give_flat_tuples():
    def read(start: int, end: int, batch_size: int) -> Iterator[Any]:
        for first in range(start, end, batch_size):
            yield tuple(examples(first, first + batch_size).values())

    assert numbers(mesh_loader(read, ROWS)) == [list(range(16))]


def test_the_error_of_a_failing_function_names_its_batch_and_reading_can_continue():
    broken = True

    def make(start: int, end: int) -> Any:
        if start == 16 and broken:
            raise OSError("disk on fire")
        return examples(start, end)

    loader = mesh_loader(Recorded(make))
    batches = iter(loader)
    next(batches)
    with pytest.raises(
        DataLoaderError,
        match=r"batch 1, examples 16 to 31, could not be read: OSError: disk on fire",
    ) as caught:
        next(batches)
    assert isinstance(caught.value.__cause__, OSError)
    broken = False
    assert first_numbers(loader.from_step(1)) == [16, 32]


def test_a_function_that_ends_early_is_refused():
    with pytest.raises(
        DataLoaderError, match=r"batch 2, examples 32 to 47, is missing: .* ended before"
    ):
        list(
            mesh_loader(lambda start, end, size: itertools.islice(Recorded()(start, end, size), 2))
        )


def test_batches_of_other_shapes_or_structure_are_refused():
    with pytest.raises(DataLoaderError, match=r"TypeError: 'NoneType' object is not iterable"):
        list(mesh_loader(lambda start, end, size: None))
    with pytest.raises(
        DataLoaderError,
        match=r"batch 0, examples 0 to 15, has float32\[15, 16\] at \['x'\], expected",
    ):
        list(mesh_loader(Recorded(lambda start, end: examples(start, end - 1))))


def test_arguments_are_checked():
    with pytest.raises(ValueError, match=r"batch_size=16, expected 1 to num_samples=8"):
        mesh_loader(Recorded(), 8)
    with pytest.raises(
        ValueError,
        match=r"the step takes an array of shape \(16, 16\) at \['x'\], expected batch_size=8",
    ):
        MeshDriverDataLoader(8, 80, Recorded(), placements())
    key = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 8))
    keys = jax.tree.map(lambda spec: replace(spec, aval=key), placements())
    with pytest.raises(
        ValueError,
        match=r"the step takes random keys at \['x'\], which \w+ can't make; use DataLoader",
    ):
        MeshDriverDataLoader(8, 80, Recorded(), keys)
    with pytest.raises(TypeError, match="expected PlacementSpecs"):
        DataLoader([], {"x": np.zeros(3)})
    with pytest.raises(TypeError, match="input_iter is 3"):
        data_loader(3)
    with pytest.raises(TypeError, match="input_iter_func is"):
        mesh_loader([examples(0, 16)])
    with pytest.raises(ValueError, match="prefetch_size is -1, expected a whole number"):
        data_loader([], prefetch_size=-1)
    with pytest.raises(ValueError, match="step=4, but there are 3 batches"):
        mesh_loader(Recorded()).from_step(4)
    with pytest.raises(TypeError):
        len(data_loader(iter([])))


# MeshDriverDataLoader: the rows that a process reads


@given(st.sampled_from([(8,), (2, 4), (4, 2), (2, 2, 2)]), st.data())
def test_each_array_has_its_rows_and_only_those_are_read(shape, data):
    mesh = Mesh(np.array(jax.devices()).reshape(shape), ("a", "b", "c")[: len(shape)])

    def sharding() -> NamedSharding:
        dims = data.draw(st.lists(st.integers(-1, 1), min_size=len(shape), max_size=len(shape)))
        axes = [
            tuple(name for name, dim in zip(mesh.axis_names, dims, strict=True) if dim == d)
            for d in (0, 1)
        ]
        return NamedSharding(mesh, PartitionSpec(*(dim_axes or None for dim_axes in axes)))

    form = Form((jax.ShapeDtypeStruct((ROWS, WIDTH), np.float32),) * 2, ("['x']", "['y']"))
    read = Recorded()
    wanted = {i: sharding() for i in range(2)}
    found = Reader(Batches(read, ROWS, 3, form), wanted).read(1)
    for i, name in enumerate(("x", "y")):
        assert found[i].sharding == wanted[i]
        assert_array_equal(found[i], examples(16, 32)[name])
    assert read.calls == [(16, 48, 16)]


def test_a_process_reads_the_rows_that_its_devices_store():
    """Devices 0 to 2 store rows 0-3 and 8-11 of `x`; the process stores nothing of `y`."""

    class Somewhere(NamedSharding):
        def addressable_devices_indices_map(self, global_shape: Any) -> Any:
            return {
                0: (slice(0, 4), slice(None)),
                1: (slice(8, 12), slice(None)),
                2: (slice(8, 12), slice(None)),
            }

    form = Form((jax.ShapeDtypeStruct((ROWS, WIDTH), np.float32),) * 2, ("['x']", "['y']"))
    read = Recorded()
    mesh = Mesh(np.array(jax.devices()[:1]), ("a",))
    reader = Reader(Batches(read, ROWS, 3, form), {0: Somewhere(mesh, PartitionSpec())})
    assert reader.rows == ((0, 4), (8, 12))
    parts = {rows: reader._part(2, rows)[0][:, 0].tolist() for rows in reader.rows}
    assert parts == {(0, 4): [32, 33, 34, 35], (8, 12): [40, 41, 42, 43]}
    assert read.calls == [(32, 36, 4), (40, 44, 4)]


def test_placements_elsewhere_are_refused():
    (spec, _) = jax.tree.leaves(placements())
    far = PlacementSpec(spec.aval, spec.mesh_ids, spec.sharding_specs, (tuple(range(100, 104)),))
    with pytest.raises(ValueError, match="has no devices"):
        next(iter(DataLoader([(examples(0, ROWS)["x"],)], (far,))))


def test_batches_can_be_placed_for_another_plan():
    loader = data_loader([examples(k, k + ROWS) for k in range(2)])
    other = placements(4)
    found = list(loader.placed(other).from_step(1))
    assert (
        jax.tree.map(lambda leaf: leaf.sharding, found[0])
        == step(4).get_last_executable().in_shardings[1]
    )
    assert numbers(found) == numbers(loader.from_step(1))
    with pytest.raises(
        ValueError, match=r"placement specs of Shape.*, expected them of .*'y': Shape"
    ):
        loader.placed(other["x"])
