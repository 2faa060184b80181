"""A pool of worker processes: a cell that crashes or hangs becomes a row, and the others run on."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from threading import Timer

from experiments.isolate import reason_of
from experiments.reach.reach_cells import ReachCell, brief_text
from experiments.reach.reach_worker import MARK

type Command = Callable[[str, Sequence[str]], list[str]]
"""(model, methods) -> the command of a worker process."""


def worker_command(model: str, methods: Sequence[str]) -> list[str]:
    """Return the command of a worker that runs `methods` of `model`."""
    return [sys.executable, "-m", "experiments.reach.reach_worker", model, *methods]


def run_cells(
    cells: Mapping[str, Sequence[str]],
    processes: int,
    timeout: float,
    command: Command = worker_command,
) -> Iterator[ReachCell]:
    """Run cells in several processes, and yield each as it is done.

    Args:
        cells: the methods of each model.
        processes: number of worker processes at a time. A process runs all methods of a model.
        timeout: seconds after which a cell is given up, and its process killed.
        command: the command of a worker process.
    """
    done: SimpleQueue[ReachCell] = SimpleQueue()
    with ThreadPoolExecutor(processes) as pool:
        models = [
            pool.submit(_run_model, model, methods, timeout, command, done)
            for model, methods in cells.items()
        ]
        for _ in range(sum(map(len, cells.values()))):
            yield done.get()
        for model in models:
            model.result()


def _run_model(
    model: str, methods: Sequence[str], timeout: float, command: Command, done: SimpleQueue
) -> None:
    """Run the methods of a model; start another worker after each one that ends early."""
    left = list(methods)
    while left:
        finished, reason = _run_worker(command(model, left), timeout, done)
        left = left[finished:]
        if left:
            done.put(ReachCell(model, left.pop(0), "failed", brief_text(reason)))


def _run_worker(command: list[str], timeout: float, done: SimpleQueue) -> tuple[int, str]:
    """Run a worker; return how many cells it finished, and why it did not go on."""
    finished, expired = 0, False

    def expire() -> None:
        nonlocal expired
        expired = True
        process.kill()

    with (
        tempfile.TemporaryFile("w+", errors="replace") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=worker_environment()
        ) as process,
    ):
        assert process.stdout is not None
        timer = Timer(timeout, expire)
        timer.start()
        for line in process.stdout:
            if line.startswith(MARK):
                timer.cancel()
                done.put(ReachCell(**json.loads(line.removeprefix(MARK))))
                finished += 1
                timer = Timer(timeout, expire)
                timer.start()
        process.wait()
        timer.cancel()
        if expired:
            return finished, f"no result after {timeout:g} s"
        errors.seek(0)
        return finished, reason_of(process.returncode, errors.read())


def worker_environment() -> dict[str, str]:
    """Return the environment of a worker: eight CPU devices, cheap compilation, no downloads."""
    cache = Path(tempfile.gettempdir()) / "autopar-reach-xla"
    return {
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "HF_HUB_OFFLINE": "1",
        "XLA_FLAGS": " ".join([
            "--xla_force_host_platform_device_count=8",
            "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
            "--xla_cpu_collective_call_terminate_timeout_seconds=600",
        ]),
    }  # fmt: skip
