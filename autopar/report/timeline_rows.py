"""Timelines and memory levels as compact rows for a report page.

The rows equal the rows of the Perfetto file (`Timeline.chrome_trace`): the same lanes, names and
microseconds.
"""

from collections.abc import Iterable, Mapping
from heapq import nlargest
from typing import Any, get_args

from simulator.engine.perfetto import chrome_trace
from simulator.engine.timeline import Timeline
from simulator.hardware.heterogeneous import AnyCluster
from simulator.memory import Role

MAX_SPANS = 20_000
"""Number of spans on a page, beyond which the shortest are left out; and of arrows."""


class _Texts:
    """Numbers of distinct texts, in the order in which they first appear."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        return self.numbers.setdefault(text, len(self.numbers))

    @property
    def texts(self) -> list[str]:
        return list(self.numbers)


def timeline_rows(timeline: Timeline) -> dict[str, Any]:
    """Return the lanes, spans and arrows of a timeline; of its spans the `MAX_SPANS` longest.

    Args:
        timeline: the timeline.

    Returns:
        `lanes` with mesh and name; `spans` as rows of lane, start and length in microseconds, the
        numbers of name, category, task and axis in `texts`, and the busy microseconds, fewer than
        the length where a span stands for iterations of a loop; `arrows` as rows of source lane,
        start, target lane, end and name; `total`, the number of all spans.
    """
    spans = [*((span, True) for span in timeline.tasks())]
    spans += ((span, False) for span in timeline.spans)
    # Events are made of the longest spans alone: there may be a million others.
    kept = nlargest(MAX_SPANS, spans, key=lambda pair: pair[0].end - pair[0].start)
    trace = chrome_trace(
        timeline.meshes,
        [span for span, is_task in kept if is_task],
        [span for span, is_task in kept if not is_task],
        timeline.arrows,
        (),
    )
    events = trace["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    numbers = {lane: number for number, lane in enumerate(lanes)}
    shown = sorted((event for event in events if event["ph"] == "X"), key=lambda e: e["ts"])
    texts = _Texts()
    return {
        "microseconds": timeline.makespan * 1e6,
        "meshes": [names[mesh] for mesh in sorted(names)],
        "lanes": [{"mesh": mesh, "name": name} for (mesh, _), name in lanes.items()],
        "total": len(spans),
        "spans": [_span_row(event, numbers, texts) for event in shown],
        "arrows": list(_arrow_rows(events, numbers, texts)),
        "texts": texts.texts,
    }


def _span_row(
    event: Mapping[str, Any], lanes: Mapping[tuple[int, int], int], texts: _Texts
) -> list[float]:
    arguments = event["args"]
    return [
        lanes[event["pid"], event["tid"]],
        event["ts"],
        event["dur"],
        texts.number(event["name"]),
        texts.number(event["cat"]),
        texts.number(arguments["task"]),
        texts.number(arguments.get("axis", "")),
        arguments["busy_us"],
    ]


def _arrow_rows(
    events: Iterable[Mapping[str, Any]],
    lanes: Mapping[tuple[int, int], int],
    texts: _Texts,
) -> Iterable[list[float]]:
    """Yield the first arrows of the Perfetto file, each of which is a pair of events of one id."""
    starts: dict[int, Mapping[str, Any]] = {}
    count = 0
    for event in events:
        if event["ph"] == "s":
            starts[event["id"]] = event
        elif event["ph"] == "f" and count < MAX_SPANS:
            count += 1
            start = starts[event["id"]]
            source = lanes[start["pid"], start["tid"]]
            target = lanes[event["pid"], event["tid"]]
            yield [source, start["ts"], target, event["ts"], texts.number(event["name"])]


def memory_rows(timeline: Timeline, cluster: AnyCluster) -> list[dict[str, Any]]:
    """Return the memory of one device of each mesh over time, by role.

    Returns:
        For each mesh whose levels are known: `roles`; `levels`, rows of the second at which a level
        begins and the bytes of each role; `budget`, the bytes that a step may use.
    """
    rows = []
    for mesh, levels in enumerate(timeline.levels):
        used = {role for _, level in levels for role in level}
        roles: list[Role] = [role for role in get_args(Role) if role in used]
        pool = cluster.pools[cluster.pool_of(timeline.meshes[mesh])]
        rows.append(
            {
                "mesh": mesh,
                "roles": roles,
                "levels": [
                    [second, *(level.get(role, 0) for role in roles)] for second, level in levels
                ],
                "budget": pool.device.usable_bytes,
            }
        )
    return rows
