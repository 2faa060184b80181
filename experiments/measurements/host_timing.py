"""Seconds of starting, of transfers and of steps on the hosts of a Ray cluster, here processes of this machine."""

import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import jax
import numpy as np

import autopar
from autopar.hosts import session
from autopar.hosts.driver import RayHosts
from autopar.hosts.job_export import export_job
from autopar.hosts.remote_executable import RemoteExecutable
from autopar.lowering.cross_mesh_resharding import reshard
from autopar.lowering.job import Array, Delivery, Input, Job, Place, StageMesh
from autopar.lowering.planned import PlannedStep
from autopar.runtime.local_executable import LocalExecutable
from autopar.runtime.timing import dummy_inputs, executed_timeline
from experiments.scripts.measure_cells import next_state
from simulator.program import Instruction, Recv, Run, Send, parse_instruction

type HostsShape = tuple[int, int]
"""Hosts, and devices of each."""


def start_hosts(shape: HostsShape) -> tuple[RayHosts, float]:
    """Hosts of this shape in place of those that there were, and the seconds that took."""
    autopar.shutdown()
    start = time.perf_counter()
    autopar.init(cluster="ray", num_nodes=shape[0], num_devices_per_node=shape[1])
    seconds = time.perf_counter() - start
    hosts = session.hosts()
    assert hosts is not None
    return hosts, seconds


def import_seconds(module: str) -> float:
    """Seconds in which a new process of Python imports a module."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", f"import {module}"], check=True)
    return time.perf_counter() - start


# -- transfers


def transfer_seconds(
    hosts: RayHosts, devices: tuple[int, int], num_bytes: int, count: int, repeat: int
) -> float:
    """Seconds that a value takes from a device to another.

    Args:
        count: a chain of one transfer there and back and a chain of so many are compared, so that what a step costs doesn't count.
        repeat: the fastest of so many counts: whatever disturbs a transfer only adds to it.
    """
    chains = [transfer_chain(hosts, devices, num_bytes, length) for length in (1, count)]
    seconds: list[list[float]] = [[], []]
    for _ in range(repeat + 1):
        for chain, found in zip(chains, seconds, strict=True):
            start = time.perf_counter()
            chain()
            found.append(time.perf_counter() - start)
    short, long = map(min, seconds)
    return max(1e-6, (long - short) / (2 * (count - 1)))


def transfer_chain(
    hosts: RayHosts, devices: tuple[int, int], num_bytes: int, length: int
) -> Callable[[], None]:
    """What sends a value from a device to another and back, so often, and waits for it."""
    here, there = (StageMesh((device,), (1,), ("x",)) for device in devices)
    value = np.ones(max(1, num_bytes // 4), np.float32)
    home = Array("in0", value.shape, value.dtype, Place(here, ((),)))
    number, handle = hosts.load(_chain(home, there, length)), hosts.put(value, home)
    hosts.wait()

    def run() -> None:
        hosts.run(number, [handle] * length, {})
        hosts.wait()

    return run


def _chain(home: Array, there: StageMesh, length: int) -> Job:
    """A job that sends a value to a mesh and back, so often, each time under another name."""
    here = home.place.mesh
    plans = [
        reshard(home.shape, (a.logical, ((),)), (b.logical, ((),)))
        for a, b in ((here, there), (there, here))
    ]
    order: list[tuple[int, Instruction]] = []
    deliveries: dict[tuple[str, int], Delivery] = {}
    inputs = []
    for k in range(length):
        name = f"x{k}"
        order += [(0, Send(name, 1)), (1, Recv(name, 0)), (1, Send(name, 0)), (0, Recv(name, 1))]
        deliveries[name, 1] = Delivery(2 * k, plans[0], home.dtype, here, there)
        deliveries[name, 0] = Delivery(2 * k + 1, plans[1], home.dtype, there, here)
        inputs.append(Input(k, 0, home, (Array(name, home.shape, home.dtype, home.place),)))
    return Job(
        {}, (here.devices, there.devices), tuple(order), {}, deliveries, tuple(inputs), (), ((), ())
    )


# -- steps


@dataclass(frozen=True, slots=True)
class Seconds:
    """What a step took: on average with the driver running ahead; waited for each time; a call until it returned."""

    ahead: float
    alone: float
    driver: float


class Running:
    """A step that goes on from its own results."""

    def __init__(self, executable: Any, args: tuple[Any, Any]) -> None:
        self.executable = executable
        self._state, self._batch = executable.shard_args(*args)

    def seconds(self, count: int) -> Seconds:
        """Of so many steps one after the other, and one by itself."""
        self._wait()
        start = time.perf_counter()
        self._call()
        self._wait()
        alone, start, called = time.perf_counter() - start, time.perf_counter(), 0.0
        for _ in range(count):
            begin = time.perf_counter()
            self._call()
            called += time.perf_counter() - begin
        self._wait()
        return Seconds((time.perf_counter() - start) / count, alone, called / count)

    def _call(self) -> None:
        result = self.executable(self._state, self._batch)
        self._state = next_state(result)
        if not isinstance(self.executable, RemoteExecutable):
            # steps of virtual devices in flight together may wait for each other's threads
            jax.block_until_ready(result)

    def _wait(self) -> None:
        if isinstance(self.executable, RemoteExecutable):
            self.executable.sync()


def middle(found: Sequence[Seconds]) -> Seconds:
    """The medians."""
    return Seconds(*(median(getattr(each, name) for each in found) for name in Seconds.__slots__))


def task_seconds(executable: LocalExecutable) -> dict[str, float]:
    """Seconds of each task (`Run.task`) of a step in this process, run by itself: the median over microbatches."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    inputs = jax.block_until_ready(dummy_inputs(executable))
    for span in executed_timeline(executable, inputs).spans:
        if span.category == "task":
            run = parse_instruction(span.name)
            assert isinstance(run, Run)
            found[run.task].append(span.seconds)
    return {task: median(each) for task, each in found.items()}


# -- starting


@dataclass(frozen=True, slots=True)
class LoadSeconds:
    """What is done once for a step: its tasks exported by the driver, and compiled on the workers."""

    export: float
    compile: float


def load(hosts: RayHosts, planned: PlannedStep) -> tuple[RemoteExecutable, LoadSeconds]:
    """A step on hosts; it is exported once more, to see how long that takes."""
    start = time.perf_counter()
    export_job(planned, hosts.platform, frozenset())
    export = time.perf_counter() - start
    return RemoteExecutable(planned, hosts), LoadSeconds(export, max(hosts.load_seconds))
