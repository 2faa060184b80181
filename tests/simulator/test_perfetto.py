"""Chrome traces have a thread per stream, and arrows from sends to their receivers."""

import pytest

from simulator.engine.simulation import simulate
from simulator.engine.timeline import Timeline
from simulator.hardware.cluster import Cluster
from simulator.program import Free, Program, Recv, Run, Send
from simulator.spans import Span
from tests.simulator.bodies import COSTS, compute, start
from tests.simulator.test_timeline import TIMELINE

CLUSTER = Cluster.load("cpu-virtual").with_size(hosts=1, devices_per_host=4)


def test_meshes_are_processes_and_streams_are_threads() -> None:
    names = [
        (e["pid"], e["tid"], e["args"]["name"])
        for e in TIMELINE.chrome_trace()["traceEvents"]
        if e["ph"] == "M"
    ]
    assert names == [
        (0, 0, "mesh 0: devices 0-2"),
        (0, 0, "tasks"),
        (0, 1, "compute"),
        (0, 2, "communication"),
        (1, 0, "mesh 1: devices 5,7"),
        (1, 0, "tasks"),
        (1, 1, "compute"),
    ]


def test_spans_are_in_microseconds() -> None:
    events = [e for e in TIMELINE.chrome_trace()["traceEvents"] if e["ph"] == "X"]
    spans = {(e["pid"], e["tid"], e["name"]): (e["ts"], e["dur"]) for e in events}
    assert spans[0, 1, "dot.2"] == pytest.approx((2000, 1000))
    assert spans[0, 2, "send x>1"] == pytest.approx((3000, 1000))
    # a task lasts from its first to its last kernel
    assert spans[0, 0, "0F0"] == pytest.approx((0, 3000))
    assert (1, 0, "recv x<0") in spans
    assert all(e["dur"] >= 0 for e in events)


def test_each_class_of_links_and_the_host_have_a_thread() -> None:
    spans = (
        Span("sum", 0, "communication", 0, 1, "all_reduce", "0F0", link="within hosts"),
        Span("gather", 0, "communication", 1, 2, "all_gather", "0F0", link="between hosts"),
        Span("0F0", 0, "host", 0, 1, "dispatch", "0F0"),
    )
    events = Timeline(spans, ((0,),)).chrome_trace()["traceEvents"]
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    thread_of_span = {e["name"]: threads[e["tid"]] for e in events if e["ph"] == "X"}
    assert thread_of_span == {"sum": "within hosts", "gather": "between hosts", "0F0": "host"}


PROGRAM = Program(
    meshes=((0, 1), (2, 3)),
    instructions=(
        (Run(0, "F"), Send("x", 1, 4), Free(("x",))),
        (Recv("x", 0), Run(1, "F"), Free(("x",))),
    ),
    bodies={"0F": (compute(3),), "1F": (compute(5), start(1))},
    levels=(
        (
            ({"inputs": 2, "activations": 7}, {"inputs": 7}),
            ({"inputs": 7}, {"inputs": 7}),
            ({"inputs": 7}, {"inputs": 2}),
        ),
        (
            ({"inputs": 8}, {"inputs": 8}),
            ({"inputs": 9}, {"inputs": 8}),
            ({"inputs": 8}, {"inputs": 4}),
        ),
    ),
)


def test_an_arrow_leads_from_a_send_to_the_receiving_task() -> None:
    events = simulate(PROGRAM, CLUSTER, COSTS).chrome_trace()["traceEvents"]
    send = next(e for e in events if e["name"] == "send x>1" and e["ph"] == "X" and e["tid"])
    begin, end = (next(e for e in events if e["ph"] == phase) for phase in "sf")
    # Computation ends at 3 s; each device sends 2 bytes until 5 s.
    assert (begin["pid"], begin["tid"], begin["ts"]) == (0, send["tid"], send["ts"]) == (0, 3, 3e6)
    assert (end["pid"], end["tid"], end["ts"]) == (1, 0, 5e6)
    assert begin["id"] == end["id"]


def test_the_counter_of_memory_follows_the_instructions() -> None:
    timeline = simulate(PROGRAM, CLUSTER, COSTS)
    totals = [
        [(seconds, sum(level.values())) for seconds, level in levels] for levels in timeline.levels
    ]
    assert totals == [
        [(0, 9), (3, 7), (3, 7), (3, 7), (3, 7), (3, 2)],
        [(5, 8), (5, 8), (5, 9), (10, 8), (10, 8), (10, 4)],
    ]
    counters = [e for e in timeline.chrome_trace()["traceEvents"] if e["ph"] == "C"]
    assert [(e["pid"], e["ts"], e["args"]) for e in counters[:2]] == [
        (0, 0, {"inputs, GB": 2e-9, "activations, GB": 7e-9}),
        (0, 3e6, {"inputs, GB": 7e-9, "activations, GB": 0}),
    ]
