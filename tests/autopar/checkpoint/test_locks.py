"""One process at a time saves to a directory, and the lock of an ended process is stale."""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import autopar
from autopar.checkpoint import locks, saved_steps
from autopar.checkpoint.locks import LOCK, STALE_SECONDS, DirectoryLock, Owner, lock

STATE = {"x": np.arange(3)}


def left_behind(directory: Path, seconds_ago: float = 0, **changes: Any) -> Path:
    """Write the lock of another owner that touched it `seconds_ago`."""
    file = directory / LOCK
    file.write_text(
        json.dumps({**json.loads(Owner.this().model_dump_json()), "token": "other", **changes})
    )
    then = time.time() - seconds_ago
    os.utime(file, (then, then))
    return file


def test_a_directory_that_another_process_uses_is_refused_with_its_name(tmp_path):
    left_behind(tmp_path)  # it claims to be of this process
    said = rf"{tmp_path} is in use by process {os.getpid()} on .* \(since 20.*\): it trains or saves there\. Wait until"
    with pytest.raises(autopar.CheckpointError, match=said):
        autopar.save_checkpoint(tmp_path, STATE, 0)
    assert not saved_steps(tmp_path)


@pytest.mark.parametrize(
    ("changes", "seconds_ago", "is_stale"),
    [
        ({"birth": 1}, 0, True),  # another process has the pid now
        ({"pid": 2**22 + 1}, 0, True),  # there is no such pid
        ({"machine": "another"}, 0, False),
        ({"machine": None}, STALE_SECONDS - 60, False),
        (
            {"machine": "another", "pid": 2**22 + 1},
            0,
            False,
        ),  # a pid of another machine means nothing on this one
        ({"machine": "another"}, STALE_SECONDS + 60, True),
        ({"machine": None}, STALE_SECONDS + 60, True),
        ({"pid": "no number"}, 0, False),
        ({"pid": "no number"}, STALE_SECONDS + 60, True),
    ],
)
def test_a_stale_lock_is_taken_over_and_no_other(tmp_path, changes, seconds_ago, is_stale):
    file = left_behind(tmp_path, seconds_ago, **changes)
    if is_stale:
        autopar.save_checkpoint(tmp_path, STATE, 0)
        assert not file.exists()
    else:
        with pytest.raises(
            autopar.CheckpointError,
            match=r"in use by .*, last seen \d+ s ago and taken for gone after",
        ):
            autopar.save_checkpoint(tmp_path, STATE, 0)
        assert file.exists()


@pytest.mark.slow
def test_a_process_that_was_killed_is_gone_and_one_that_runs_is_not(tmp_path):
    program = (
        "import sys; from pathlib import Path; from autopar.checkpoint.locks import lock;"
        " lock(Path(sys.argv[1])); print('locked', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-W", "ignore", "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"locked\n"
        with pytest.raises(autopar.CheckpointError, match=f"in use by process {other.pid} on"):
            autopar.save_checkpoint(tmp_path, STATE, 0)
        other.kill()
        while (
            Path(f"/proc/{other.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        ):  # a zombie, since its parent has not waited for it
            time.sleep(0.01)
        autopar.save_checkpoint(tmp_path, STATE, 0)


def test_one_of_many_processes_takes_over_a_stale_lock(tmp_path):
    left_behind(tmp_path, birth=1)

    def take(_: int) -> DirectoryLock | None:
        try:
            return DirectoryLock(tmp_path)
        except autopar.CheckpointError:
            return None

    with ThreadPoolExecutor(8) as threads:
        taken = [held for held in threads.map(take, range(8)) if held is not None]
    assert len(taken) == 1
    taken[0].check()
    taken[0].uses = 1
    taken[0].release()
    assert not list(tmp_path.iterdir())


def test_a_running_owner_touches_its_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "_BEAT_SECONDS", 0.01)
    held = lock(tmp_path)
    os.utime(held.file, (0, 0))
    end = time.monotonic() + 20
    while held.file.stat().st_mtime == 0:
        assert time.monotonic() < end
        time.sleep(0.01)
    held.release()


def test_a_process_that_lost_its_lock_commits_nothing(tmp_path, monkeypatch):
    from autopar.checkpoint import saving

    write = saving.write

    def taken_over(*args: Any) -> Any:
        left_behind(tmp_path, pid=1)
        return write(*args)

    monkeypatch.setattr(saving, "write", taken_over)
    with pytest.raises(
        autopar.CheckpointError, match="is no longer the lock of this process, but of process 1 on"
    ):
        autopar.save_checkpoint(tmp_path, STATE, 0)
    assert [entry.name for entry in tmp_path.iterdir()] == [LOCK]  # the other process's


def test_a_process_may_use_its_lock_more_than_once(tmp_path):
    first = lock(tmp_path, is_alone=True)
    assert lock(tmp_path) is first
    with pytest.raises(
        autopar.CheckpointError, match="in use by this process, which trains or saves there already"
    ):
        lock(tmp_path, is_alone=True)
    first.release()
    first.check()
    first.release()
    assert not list(tmp_path.iterdir())


TRAINER = """
import sys, numpy as np, autopar
saved = refused = 0
while saved + refused < 16:
    step = (autopar.latest_step(sys.argv[1]) or 0) + 1
    try:
        autopar.save_checkpoint(sys.argv[1], {"x": np.full(50_000, step)}, step, keep=2)
        saved += 1
    except autopar.CheckpointError as error:
        assert "is in use by process" in str(error) or "has a checkpoint of step" in str(error), error
        refused += 1
print(saved, refused)
"""


@pytest.mark.slow
def test_two_savers_of_one_directory_do_not_remove_each_others_files(tmp_path):
    command = [sys.executable, "-W", "ignore", "-c", TRAINER, str(tmp_path)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    two = [
        subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)
        for _ in range(2)
    ]
    saved = [int(trainer.communicate()[0].split()[0]) for trainer in two]
    assert [trainer.returncode for trainer in two] == [0, 0]
    assert sum(saved) > 0
    last = saved_steps(tmp_path)
    assert len(last) == 2
    for step in last:
        assert set(autopar.restore_checkpoint(tmp_path, step)["['x']"]) == {step}
    assert sorted(int(entry.name) for entry in tmp_path.iterdir()) == last
