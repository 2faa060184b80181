"""Timelines: devices, memory, spans and totals by category."""

import json
from pathlib import Path

import pytest

from simulator.engine.timeline import Timeline
from simulator.hardware.cluster import Cluster
from simulator.memory import MemoryUse
from simulator.spans import Span
from tests.simulator.bodies import exposed_communication

TIMELINE = Timeline(
    spans=(
        Span("dot.1", 0, "compute", 0.0, 2e-3, "gemm", "0F0"),
        Span("dot.2", 0, "compute", 2e-3, 3e-3, "gemm", "0F0"),
        Span("send x>1", 0, "communication", 3e-3, 4e-3, "send", "send x>1"),
        Span("recv x<0", 1, "compute", 0.0, 4e-3, "bubble", "recv x<0"),
        Span("98 x gemm", 1, "compute", 4e-3, 9e-3, "gemm", "1F0", busy=3e-3),
        Span("98 x wait", 1, "compute", 4e-3, 9e-3, "wait", "1F0", busy=2e-3),
    ),
    meshes=((0, 1, 2), (5, 7)),
    memory=(MemoryUse(arguments=int(15e9)), MemoryUse(arguments=int(12e9), temporaries=int(2e9))),
)


def test_a_summary_span_counts_its_busy_seconds() -> None:
    assert TIMELINE.makespan == 9e-3
    assert TIMELINE.busy(1, "compute") == 3e-3
    assert exposed_communication(TIMELINE, 1) == 2e-3
    assert TIMELINE.seconds_by_category(1) == {"bubble": 4e-3, "gemm": 3e-3, "wait": 2e-3}


def test_a_timeline_fits_if_its_fullest_device_fits() -> None:
    assert TIMELINE.peak_bytes == int(15e9)
    assert TIMELINE.fits(Cluster.load("p3.16xlarge"))  # 16.9 GB minus a reserve of 1 GB
    full = Timeline((), ((0,),), (MemoryUse(arguments=int(16e9)),))
    assert not full.fits(Cluster.load("p3.16xlarge"))
    assert full.fits(Cluster.load("dgx_a100_80"))


def test_fits_is_refused_without_memory() -> None:
    timeline = Timeline((), ((0,),))
    assert (timeline.makespan, timeline.peak_bytes) == (0, 0)
    with pytest.raises(ValueError, match="knows no memory"):
        timeline.fits(Cluster.load("h200"))


def test_a_timeline_prints_the_seconds_of_each_mesh_by_category() -> None:
    assert str(TIMELINE) == (
        "9.000 ms, 15.000 GB\n"
        "mesh 0: gemm 3.000 ms, send 1.000 ms\n"
        "mesh 1: bubble 4.000 ms, gemm 3.000 ms, wait 2.000 ms\n"
        "mesh 0 holds arguments 15.000 GB\n"
        "mesh 1 holds arguments 12.000 GB, temporaries 2.000 GB"
    )


def test_a_trace_is_saved_as_json(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    TIMELINE.save_chrome_trace(path)
    assert json.loads(path.read_text()) == TIMELINE.chrome_trace()
