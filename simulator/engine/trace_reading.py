"""Timelines from files in the Trace Event Format."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from simulator.engine.perfetto import DETAILS, THREADS
from simulator.engine.timeline import Timeline
from simulator.files import FileError, parse_json, read_text
from simulator.memory import Level, MemoryUse
from simulator.spans import LINKS, Arrow, Span


def load_timeline(path: str | Path) -> Timeline:
    """Return the timeline in a file that `Timeline.save_chrome_trace` wrote.

    Times are in microseconds in the file, so they differ from the original by rounding.

    Raises:
        FileError: the file can't be read, or has another content.
    """
    expected = "a timeline that Timeline.save_chrome_trace wrote"
    trace = parse_json(read_text(path, expected), path)
    try:
        return _timeline(trace["traceEvents"], trace["otherData"])
    except (LookupError, TypeError, ValueError, AttributeError):
        raise FileError(f"{path}: is no timeline; expected {expected}") from None


def _timeline(events: list[Mapping[str, Any]], other: Mapping[str, Any]) -> Timeline:
    return Timeline(
        spans=tuple(_span(event) for event in events if event["ph"] == "X" and event["tid"]),
        meshes=tuple(map(tuple, other["meshes"])),
        memory=tuple(MemoryUse(**use) for use in other["memory"]),
        arrows=tuple(_arrows(events)),
        levels=_levels(events, len(other["meshes"])),
        flops=other["flops"],
        unmodelled_kernels=other["unmodelled_kernels"],
        model_flops=other["model_flops"],
        examples=other["examples"],
    )


def _span(event: Mapping[str, Any]) -> Span:
    thread = THREADS[event["tid"]]
    arguments = event["args"]
    busy = arguments["busy_us"]
    return Span(
        event["name"],
        event["pid"],
        "communication" if thread in LINKS else thread,
        event["ts"] / 1e6,
        (event["ts"] + event["dur"]) / 1e6,
        event["cat"],
        arguments["task"],
        None if busy == event["dur"] else busy / 1e6,
        link=thread if thread in LINKS else None,
        **{name: arguments[name] for name in DETAILS if name in arguments},
    )


def _arrows(events: Iterable[Mapping[str, Any]]) -> Iterator[Arrow]:
    starts: dict[int, Mapping[str, Any]] = {}
    for event in events:
        if event["ph"] == "s":
            starts[event["id"]] = event
        elif event["ph"] == "f":
            start = starts[event["id"]]
            yield Arrow(
                event["name"], start["pid"], start["ts"] / 1e6, event["pid"], event["ts"] / 1e6
            )


def _levels(
    events: Iterable[Mapping[str, Any]], num_meshes: int
) -> tuple[tuple[tuple[float, Level], ...], ...]:
    """Return the levels of memory by mesh, without roles of no bytes; empty if there are none."""
    levels: defaultdict[int, list[tuple[float, Level]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "C":
            sizes = {name.removesuffix(", GB"): gb for name, gb in event["args"].items() if gb}
            level: Any = {role: round(gb * 1e9) for role, gb in sizes.items()}
            levels[event["pid"]].append((event["ts"] / 1e6, level))
    return tuple(tuple(levels[mesh]) for mesh in range(num_meshes)) if levels else ()
