"""Timelines in the Trace Event Format, which ui.perfetto.dev and chrome://tracing open.

Each mesh is a process. It has a thread for whole tasks, one for each stream and each class of links
that is used, and a counter of memory by role. Arrows connect a send with the task that uses the
value.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from simulator.memory import Level, Role
from simulator.spans import Arrow, Span

DETAILS = ("axis", "awaited", "phase")
"""Fields of a span that its event has if they are not empty."""

THREADS = ("tasks", "compute", "communication", "within hosts", "between hosts", "host")
"""Names of threads by number: tasks, streams, and classes of links of the communication stream."""


def chrome_trace(
    meshes: Sequence[tuple[int, ...]],
    tasks: Iterable[Span],
    spans: Sequence[Span],
    arrows: Sequence[Arrow],
    levels: Sequence[Sequence[tuple[float, Level]]],
) -> dict[str, Any]:
    """Return the events of a timeline; times are in microseconds.

    Args:
        meshes: for each mesh, the ids of its devices.
        tasks: a span for each whole task.
        spans: the spans of all streams.
        arrows: the values sent from mesh to mesh.
        levels: for each mesh, the memory of one of its devices by role, each level with the second
            at which it begins.
    """
    events: list[dict[str, Any]] = []
    for mesh, devices in enumerate(meshes):
        events.append(
            _metadata("process_name", mesh, 0, f"mesh {mesh}: devices {_ranges(devices)}")
        )
        used = {0} | {_thread(span) for span in spans if span.mesh == mesh}
        events += [
            _metadata("thread_name", mesh, thread, THREADS[thread]) for thread in sorted(used)
        ]
    events += [_event(span, 0) for span in tasks]
    events += [_event(span, _thread(span)) for span in spans]
    senders = {
        (span.mesh, span.name, span.start): _thread(span)
        for span in spans
        if span.category == "send"
    }
    for number, arrow in enumerate(arrows):
        name = {"name": arrow.value, "cat": "send", "id": number}
        thread = senders.get((arrow.source, f"send {arrow.value}>{arrow.to}", arrow.sent), 0)
        events.append(
            name | {"ph": "s", "pid": arrow.source, "tid": thread, "ts": arrow.sent * 1e6}
        )
        events.append(
            name | {"ph": "f", "bp": "e", "pid": arrow.to, "tid": 0, "ts": arrow.received * 1e6}
        )
    for mesh, mesh_levels in enumerate(levels):
        counter = {"ph": "C", "name": "memory", "pid": mesh}
        roles: list[Role] = list(dict.fromkeys(role for _, level in mesh_levels for role in level))
        for seconds, level in mesh_levels:
            sizes = {f"{role}, GB": level.get(role, 0) / 1e9 for role in roles}
            events.append(counter | {"ts": seconds * 1e6, "args": sizes})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _metadata(name: str, mesh: int, thread: int, value: str) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": mesh, "tid": thread, "args": {"name": value}}


def _thread(span: "Span") -> int:
    return THREADS.index(span.link or span.stream)


def _event(span: "Span", thread: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.category,
        "pid": span.mesh,
        "tid": thread,
        "ts": span.start * 1e6,
        "dur": (span.end - span.start) * 1e6,
        "args": {"task": span.task, "busy_us": span.seconds * 1e6}
        | {name: text for name in DETAILS if (text := getattr(span, name))},
    }


def _ranges(devices: tuple[int, ...]) -> str:
    """Return `0-7` for consecutive ids, else all of them."""
    first, last = min(devices), max(devices)
    return (
        f"{first}-{last}"
        if list(devices) == list(range(first, last + 1))
        else ",".join(map(str, devices))
    )
