"""Timings of steps, and of starting, on the hosts of a Ray cluster.

Transfers are timed by `autopar.host_benchmarks`.
"""

import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import jax

import autopar
from experiments.local_steps import next_state
from simulator import Run, parse_instruction

type HostsShape = tuple[int, int]
"""Number of hosts, and devices of each."""


def start_hosts(shape: HostsShape) -> float:
    """Start workers on hosts, in place of any that run, and return the seconds of the start."""
    autopar.shutdown()
    start = time.perf_counter()
    autopar.init(cluster="ray", num_nodes=shape[0], num_devices_per_node=shape[1])
    return time.perf_counter() - start


def import_seconds(module: str) -> float:
    """Return the seconds in which a new Python process imports a module."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", f"import {module}"], check=True)
    return time.perf_counter() - start


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Seconds of a step.

    Attributes:
        ahead: mean over several steps, each dispatched without waiting for the one before.
        alone: one step, from the call until its results are there.
        driver: mean time until a call returns.
    """

    ahead: float
    alone: float
    driver: float


class RunningStep:
    """A step that is called on its own results, on hosts or in this process."""

    def __init__(self, executable: autopar.Executable, args: tuple[Any, Any]) -> None:
        self._executable = executable
        self._state, self._batch = executable.shard_args(*args)
        leaves = jax.tree.leaves(self._state)
        self._is_remote = any(isinstance(leaf, autopar.DistributedArray) for leaf in leaves)

    def seconds(self, count: int) -> StepSeconds:
        """Time one step by itself, then `count` steps in a row."""
        self._wait()
        start = time.perf_counter()
        self._call()
        self._wait()
        alone = time.perf_counter() - start
        start = time.perf_counter()
        called = 0.0
        for _ in range(count):
            begin = time.perf_counter()
            self._call()
            called += time.perf_counter() - begin
        self._wait()
        return StepSeconds((time.perf_counter() - start) / count, alone, called / count)

    def _call(self) -> None:
        result = self._executable(self._state, self._batch)
        self._state = next_state(result)
        if not self._is_remote:
            # Steps of virtual devices that are in flight together may block one another's threads.
            jax.block_until_ready(result)

    def _wait(self) -> None:
        if self._is_remote:
            self._executable.sync()


def medians(measured: Sequence[StepSeconds]) -> StepSeconds:
    """Return the median of each number."""
    return StepSeconds(
        *(median(getattr(seconds, name) for seconds in measured) for name in StepSeconds.__slots__)
    )


def task_seconds(executable: autopar.Executable) -> dict[str, float]:
    """Return the seconds of each task (`Run.task`) by itself, as median of microbatches."""
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    for span in executable.execution_timeline().spans:
        if span.category == "task":
            run = parse_instruction(span.name)
            assert isinstance(run, Run)
            seconds[run.task].append(span.seconds)
    return {task: median(times) for task, times in seconds.items()}
