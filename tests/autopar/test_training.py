"""The training loop continues from the last checkpoint, with the same batches."""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import autopar
from autopar.checkpoint import saved_steps, saving
from autopar.hosts import session
from autopar.testing import assert_allclose
from tests.autopar.pipeline.stack_steps import stack_batch, stack_params, stack_step


def batches(first: int) -> Iterator[Any]:
    """Yield a different batch for every step."""
    while True:
        yield jax.tree.map(lambda leaf, k=first: leaf * np.float32(1 + k / 8), stack_batch())
        first += 1


def expected(steps: int) -> Any:
    params = stack_params()
    step = jax.jit(stack_step)
    for _, batch in zip(range(steps), batches(0), strict=False):
        params, _ = step(params, batch)
    return params


def assert_close(state: Any, other: Any) -> None:
    assert_allclose(state, other, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def function():
    return autopar.parallelize(stack_step, method=autopar.ShardParallel((8,)), donate_argnums=(0,))


def test_a_loop_that_is_run_again_goes_on(function, tmp_path):
    steps: list[int] = []

    def stop_at_six(step: int, results: Any) -> None:
        steps.append(step)
        if step == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        autopar.train(
            function, stack_params(), batches, 9, tmp_path, save_every=4, on_step=stop_at_six
        )
    state = autopar.train(
        function,
        stack_params(),
        batches,
        9,
        tmp_path,
        save_every=4,
        on_step=lambda step, _: steps.append(step),
    )
    assert steps == [1, 2, 3, 4, 5, 6, 5, 6, 7, 8, 9]
    assert_close(state, expected(9))
    assert saved_steps(tmp_path) == [8, 9]
    # all steps are done
    again = autopar.train(function, stack_params(), batches, 9, tmp_path)
    assert_close(again, expected(9))


def test_an_error_of_a_loop_waits_for_the_checkpoint_that_is_written(
    function: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python can't start the threads that write it after the error has ended the program."""
    write = saving.write

    def slow(*args: Any) -> dict[str, int]:
        time.sleep(0.5)
        return write(*args)

    def fail_at_three(step: int, results: Any) -> None:
        if step == 3:
            raise OSError("no more batches")

    monkeypatch.setattr(saving, "write", slow)
    with pytest.raises(OSError, match="no more batches"):
        autopar.train(
            function, stack_params(), batches, 9, tmp_path, save_every=2, on_step=fail_at_three
        )
    assert saved_steps(tmp_path) == [0, 2]
    assert not (tmp_path / "autopar.lock").exists()


def test_a_loader_places_batches_for_the_current_plan(function, tmp_path):
    executable = function.get_executable(stack_params(), stack_batch())
    loader = autopar.DataLoader(batches, executable.get_input_placement_specs()[1])
    assert_close(autopar.train(function, stack_params(), loader, 3, tmp_path), expected(3))
    wanted: list[Any] = []

    def step(params: Any, batch: Any) -> Any:
        wanted.append(batch["x"].sharding)
        return other(params, batch)

    other = autopar.parallelize(stack_step, method=autopar.ShardParallel((2,)))
    step.get_executable = other.get_executable
    replanned: Any = step
    assert_close(autopar.train(replanned, stack_params(), loader, 5, tmp_path), expected(5))
    assert wanted == [other.get_executable(stack_params(), stack_batch()).in_shardings[1]["x"]] * 2


def test_an_iterator_cannot_be_read_again_after_a_failure(function, tmp_path, monkeypatch):
    monkeypatch.setattr(session.Session, "rejoin", lambda _: None)
    placements = function.get_executable(stack_params(), stack_batch()).get_input_placement_specs()[
        1
    ]
    loader = autopar.DataLoader(batches(0), placements)
    step: Any = Failing(function, {2})
    with pytest.raises(ValueError, match="batches of an iterator can't be read again"):
        autopar.train(step, stack_params(), loader, 5, tmp_path)


def test_errors_of_a_loop_say_what_it_needs(function, tmp_path):
    with pytest.raises(ValueError, match="batches end after step 2, expected 5"):
        autopar.train(
            function, stack_params(), lambda first: [stack_batch()] * (2 - first), 5, tmp_path
        )
    autopar.save_checkpoint(tmp_path, stack_params(), 7)
    with pytest.raises(
        autopar.CheckpointError, match="checkpoint of step 7, which is after num_steps=5"
    ):
        autopar.train(function, stack_params(), batches, 5, tmp_path)
    with pytest.raises(ValueError, match="expected a whole number of at least"):
        autopar.train(function, stack_params(), batches, 5, tmp_path / "other", save_every=0)
    loss_only = autopar.parallelize(
        lambda params, batch: stack_step(params, batch)[1], method=autopar.ShardParallel((8,))
    )
    with pytest.raises(ValueError, match="expected a state like the one it is given"):
        autopar.train(loss_only, stack_params(), batches, 5, tmp_path / "other")


@pytest.mark.parametrize("is_loader", [True, False])
def test_a_loop_goes_on_from_the_last_checkpoint_that_can_be_read(function, tmp_path, is_loader):
    placements = function.get_executable(stack_params(), stack_batch()).get_input_placement_specs()[
        1
    ]
    given = autopar.DataLoader(batches, placements) if is_loader else batches
    autopar.train(function, stack_params(), given, 6, tmp_path, save_every=2, keep=3)
    (tmp_path / "6" / "manifest.json").write_text("{")
    shutil.rmtree(tmp_path / "4" / "driver")
    steps: list[int] = []
    with pytest.warns(
        UserWarning, match=r"set aside as .*\.damaged, and step 2 is restored"
    ) as warned:
        state = autopar.train(
            function,
            stack_params(),
            given,
            7,
            tmp_path,
            save_every=2,
            keep=3,
            on_step=lambda step, _: steps.append(step),
        )
    assert len(warned) == 2
    assert steps == [3, 4, 5, 6, 7]
    assert_close(state, expected(7))
    assert saved_steps(tmp_path) == [4, 6, 7]
    for step in (4, 6, 7):
        (tmp_path / str(step) / "manifest.json").unlink()
    with pytest.raises(autopar.CheckpointError, match="no checkpoint that can be read"):
        autopar.train(function, stack_params(), given, 9, tmp_path)


def test_a_directory_has_one_loop_at_a_time(function, tmp_path):
    def begin_another(step: int, results: Any) -> None:
        autopar.train(function, stack_params(), batches, 5, tmp_path)

    with pytest.raises(
        autopar.CheckpointError, match="in use by this process, which trains or saves there already"
    ):
        autopar.train(function, stack_params(), batches, 5, tmp_path, on_step=begin_another)
    assert_close(autopar.train(function, stack_params(), batches, 5, tmp_path), expected(5))
    assert {entry.name for entry in tmp_path.iterdir()} == {"0", "5"}


@pytest.mark.parametrize(
    "changes",
    [
        {"num_steps": 1.5},
        {"num_steps": "3"},
        {"num_steps": True},
        {"num_steps": None},
        {"save_every": 1.5},
        {"max_failures": None},
        {"keep": 0},
        {"keep": 1.0},
        {"ckpt_dir": 3},
        {"ckpt_dir": None},
        {"batches": None},
        {"batches": [1]},
        {"state": None},
        {"state": {}},
    ],
    ids=str,
)
def test_invalid_arguments_of_a_loop_are_refused_before_it_starts(function, tmp_path, changes):
    given = {
        "state": stack_params(),
        "batches": batches,
        "num_steps": 3,
        "ckpt_dir": tmp_path / "run",
        **changes,
    }
    with pytest.raises(
        (ValueError, TypeError), match=f"{next(iter(changes))}.*(expected|has no arrays)"
    ) as error:
        autopar.train(function, **given)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").iterdir())


class Failing:
    """A parallelized step during which hosts fail at certain calls."""

    def __init__(self, function: Any, calls: set[int]) -> None:
        self._function, self._calls, self.count = function, calls, 0

    def get_executable(self, *args: Any) -> Any:
        return self._function.get_executable(*args)

    def __call__(self, *args: Any) -> Any:
        self.count += 1
        if self.count in self._calls:
            raise autopar.HostsError(f"call {self.count} fails")
        return self._function(*args)


def test_failures_count_only_without_a_checkpoint_in_between(function, tmp_path, monkeypatch):
    rejoined: list[int] = []
    monkeypatch.setattr(session.Session, "rejoin", lambda _: rejoined.append(1))
    step: Any = Failing(function, {2, 3, 6, 7})
    state = autopar.train(
        step, stack_params(), batches, 5, tmp_path / "a", save_every=2, max_failures=2
    )
    assert_close(state, expected(5))
    assert len(rejoined) == 4
    step = Failing(function, {2, 3, 4})
    with pytest.raises(autopar.HostsError, match="call 4 fails"):
        autopar.train(
            step, stack_params(), batches, 5, tmp_path / "b", save_every=2, max_failures=2
        )
    assert saved_steps(tmp_path / "b") == [0]
