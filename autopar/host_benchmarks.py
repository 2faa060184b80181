"""Benchmarks of transfers between Ray hosts, and of loading a step on them.

They use the hosts of `autopar.init("ray")`.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from autopar.hosts import session
from autopar.hosts.errors import HostsError
from autopar.lowering.cross_mesh_resharding import reshard
from autopar.lowering.job import Array, Delivery, Input, Job, Place, StageMesh
from autopar.runtime.executable import Executable
from simulator.program import Instruction, Recv, Send

__all__ = ["LoadSeconds", "load_seconds", "transfer_chain", "transfer_seconds"]


def transfer_seconds(devices: tuple[int, int], num_bytes: int, count: int, repeat: int) -> float:
    """Return the seconds that a value takes from one device to another.

    Args:
        devices: numbers of the two devices in the cluster.
        num_bytes: bytes of the value.
        count: number of round trips in the long chain. The time of a chain of one round trip is
            subtracted, so that the overhead of a step cancels.
        repeat: number of runs of each chain, after a first one that warms up. The fastest run
            counts, because disturbances only add time.

    Raises:
        HostsError: no hosts are joined.
    """
    chains = [transfer_chain(devices, num_bytes, length) for length in (1, count)]
    seconds: list[list[float]] = [[], []]
    for _ in range(repeat + 1):
        for chain, times in zip(chains, seconds, strict=True):
            start = time.perf_counter()
            chain()
            times.append(time.perf_counter() - start)
    short, long = map(min, seconds)
    return max(1e-6, (long - short) / (2 * (count - 1)))


def transfer_chain(devices: tuple[int, int], num_bytes: int, length: int) -> Callable[[], None]:
    """Return a function that sends a value between two devices and back `length` times, and blocks.

    Args:
        devices: numbers of the two devices in the cluster.
        num_bytes: bytes of the value.
        length: number of round trips.

    Raises:
        HostsError: no hosts are joined.
    """
    hosts = session.hosts()
    if hosts is None:
        raise HostsError("no hosts are joined; call autopar.init(cluster='ray') first")
    source, target = (StageMesh((device,), (1,), ("x",)) for device in devices)
    value = np.ones(max(1, num_bytes // 4), np.float32)
    array = Array("in0", value.shape, value.dtype, Place(source, ((),)))
    number = hosts.load(_round_trips(array, target, length))
    handle = hosts.put(value, array)
    hosts.wait()

    def run() -> None:
        hosts.run(number, [handle] * length, {})
        hosts.wait()

    return run


def _round_trips(array: Array, target: StageMesh, length: int) -> Job:
    """Return a job that sends an array to a mesh and back `length` times, each under a new name."""
    source = array.place.mesh
    there = reshard(array.shape, (source.logical, ((),)), (target.logical, ((),)))
    back = reshard(array.shape, (target.logical, ((),)), (source.logical, ((),)))
    order: list[tuple[int, Instruction]] = []
    deliveries: dict[tuple[str, int], Delivery] = {}
    inputs = []
    for k in range(length):
        name = f"x{k}"
        order += [(0, Send(name, 1)), (1, Recv(name, 0)), (1, Send(name, 0)), (0, Recv(name, 1))]
        deliveries[name, 1] = Delivery(2 * k, there, array.dtype, source, target)
        deliveries[name, 0] = Delivery(2 * k + 1, back, array.dtype, target, source)
        inputs.append(Input(k, 0, array, (Array(name, array.shape, array.dtype, array.place),)))
    meshes = source.devices, target.devices
    return Job({}, meshes, tuple(order), {}, deliveries, tuple(inputs), (), ((), ()))


@dataclass(frozen=True, slots=True)
class LoadSeconds:
    """Seconds of the work that is done once for a step on hosts.

    Attributes:
        export: seconds in which the driver exports the tasks.
        compile: seconds in which the slowest worker compiles its tasks.
    """

    export: float
    compile: float


def load_seconds(executable: Executable) -> LoadSeconds:
    """Return the seconds of loading a step on the hosts of a Ray cluster.

    The step is exported again, to time its export. The hosts measured the seconds of compilation
    when they last loaded a step.

    Args:
        executable: the executable that was loaded last.

    Raises:
        ValueError: the step runs in this process.
    """
    from autopar.hosts.job_export import export_job

    if executable.hosts is None:
        raise ValueError(
            "the step runs in this process, expected one on the hosts that autopar.init joins"
        )
    start = time.perf_counter()
    export_job(executable.planned, executable.hosts.platform, frozenset())
    export = time.perf_counter() - start
    return LoadSeconds(export, max(executable.hosts.load_seconds))
