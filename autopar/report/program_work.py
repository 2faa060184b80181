"""The kernels and collectives of a program, as rows for a report page."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, assert_never

from simulator.costs.cost_model import costs_of, kernel_seconds
from simulator.engine.timeline import Timeline
from simulator.hardware.heterogeneous import AnyCluster
from simulator.program import Program, Recv, Run, Send
from simulator.work import Collective, Done, Kernel, Loop, OpList, Start

MAX_KERNELS = 2_000
"""Most kernels on a page; the kernels of least time are left out."""


def _operations(body: OpList, times: int = 1) -> Iterator[tuple[Kernel | Collective, int]]:
    """Yield the kernels and collectives of a body, each with how often it is launched."""
    for op in body:
        match op:
            case Kernel():
                yield op, times
            case Start(collective):
                yield collective, times
            case Loop(count, inner):
                yield from _operations(inner, times * count)
            case Done():
                pass
            case _:
                assert_never(op)


@dataclass(frozen=True, slots=True)
class _KernelKey:
    """What kernels share that are one point of a roofline."""

    kind: str
    dtype: str
    phase: str
    flops: float
    bytes: float
    seconds: float


def kernel_rows(program: Program, cluster: AnyCluster) -> dict[str, Any]:
    """Return the kernels of a step on one device of each mesh, with the limits of the devices.

    Args:
        program: the program, with bodies.
        cluster: the cluster that it runs on.

    Returns:
        `kernels`, rows of equal kernels: name of the first, kind, dtype, phase, FLOP, bytes and
        seconds of one launch, and launches; `total`, the number of rows before the limit;
        `devices`, the bandwidth in bytes/s and the peaks in FLOP/s of each kind of device.
    """
    costs = costs_of(cluster)
    names: dict[_KernelKey, str] = {}
    launches: Counter[_KernelKey] = Counter()
    for devices, row in zip(program.meshes, program.instructions, strict=True):
        runs = Counter(op.task for op in row if isinstance(op, Run))
        for task, count in runs.items():
            for op, times in _operations(program.bodies.get(task, ())):
                if isinstance(op, Kernel):
                    seconds = kernel_seconds(costs, op, devices[0])
                    key = _KernelKey(op.kind, op.dtype, op.phase, op.flops, op.bytes, seconds)
                    names.setdefault(key, op.name)
                    launches[key] += count * times
    keys = sorted(launches, key=lambda key: -key.seconds * launches[key])
    return {
        "total": len(keys),
        "kernels": [
            {
                "name": names[key],
                "kind": key.kind,
                "dtype": key.dtype,
                "phase": key.phase,
                "flops": key.flops,
                "bytes": key.bytes,
                "seconds": key.seconds,
                "launches": launches[key],
            }
            for key in keys[:MAX_KERNELS]
        ],
        "devices": _devices(program, cluster),
    }


def _devices(program: Program, cluster: AnyCluster) -> list[dict[str, Any]]:
    pools = {cluster.pool_of(devices) for devices in program.meshes}
    devices = [cluster.pools[pool].device for pool in sorted(pools)]
    return [
        {
            "name": device.name,
            "bytes_per_s": device.memory_bandwidth_gb_per_s * 1e9,
            "flop_per_s": {dtype: 1e12 * tflop for dtype, tflop in device.peak_tflop_per_s.items()},
        }
        for device in devices
    ]


def collective_rows(program: Program | None, timeline: Timeline) -> list[dict[str, Any]]:
    """Return the communication of one device of each mesh, by kind and mesh axis.

    Args:
        program: the program that was simulated; without it counts and bytes are None.
        timeline: its timeline, which has the seconds.

    Returns:
        Rows of mesh, kind, axis, count, bytes and seconds. Bytes count as in
        `simulator.Collective`.
    """
    seconds: defaultdict[tuple[int, str, str], float] = defaultdict(float)
    for span in timeline.spans:
        if span.stream == "communication":
            axis = "pipeline" if span.category == "send" else span.axis
            seconds[span.mesh, span.category, axis] += span.seconds
    counts: Counter[tuple[int, str, str]] = Counter()
    num_bytes: Counter[tuple[int, str, str]] = Counter()
    for key, size, count in _communication(program) if program else ():
        counts[key] += count
        num_bytes[key] += size * count  # pyright: ignore[reportArgumentType]
    return [
        {
            "mesh": mesh,
            "kind": kind,
            "axis": axis,
            "count": counts[key] or None,
            "bytes": num_bytes[key] or None,
            "seconds": seconds[key],
        }
        for key in sorted(seconds.keys() | counts.keys())
        for mesh, kind, axis in (key,)
    ]


def _communication(program: Program) -> Iterator[tuple[tuple[int, str, str], float, int]]:
    """Yield mesh, kind and axis, the bytes, and the count of each collective and send."""
    for mesh, row in enumerate(program.instructions):
        for op in row:
            match op:
                case Run():
                    for part, times in _operations(program.bodies.get(op.task, ())):
                        if isinstance(part, Collective):
                            yield (mesh, part.kind, part.axis), part.num_bytes, times
                case Send(num_bytes=num_bytes):
                    pairs = program.pairs(mesh, op.to)
                    yield (mesh, "send", "pipeline"), num_bytes / len(pairs), 1
                case Recv(gather=Collective() as gather):
                    yield (mesh, gather.kind, gather.axis), gather.num_bytes, 1
                case _:
                    pass
