"""A timeline that was saved for Perfetto is read back, with the same prediction."""

from dataclasses import replace
from pathlib import Path

import pytest

from simulator import load_cluster, load_timeline, prediction_of, simulate
from simulator.engine.timeline import Timeline
from simulator.files import FileError
from simulator.memory import MemoryUse
from simulator.spans import Span
from tests.simulator.bodies import COSTS
from tests.simulator.test_perfetto import CLUSTER, PROGRAM
from tests.simulator.test_timeline import TIMELINE


def approximate(timeline: Timeline) -> Timeline:
    """Return a timeline with times rounded to a tenth of a nanosecond."""

    def rounded(span: Span) -> Span:
        busy = None if span.busy is None else round(span.busy, 10)
        return replace(span, start=round(span.start, 10), end=round(span.end, 10), busy=busy)

    return replace(timeline, spans=tuple(map(rounded, timeline.spans)))


ROLES = MemoryUse(arguments=3, temporaries=4, roles={"parameters": 3, "activations": 4})
SIMULATED = simulate(replace(PROGRAM, memory=(ROLES, ROLES)), CLUSTER, COSTS)
WAIT = Span(
    "all_reduce", 0, "compute", 0.0, 1.0, "wait", "0F0", None, "all_reduce", None, "backward", "x,y"
)


@pytest.mark.parametrize(
    "timeline",
    [
        TIMELINE,
        replace(SIMULATED, levels=()),
        Timeline((WAIT,), ((0, 1),), model_flops=2.0, examples=3, flops={"f32": 4.0}),
    ],
    ids=["by hand", "simulated", "with every field"],
)
def test_a_saved_timeline_is_read_back(timeline: Timeline, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    timeline.save_chrome_trace(path)
    assert approximate(load_timeline(path)) == approximate(timeline)


def test_levels_of_memory_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    SIMULATED.save_chrome_trace(path)
    read = load_timeline(path).levels
    assert [[dict(level) for _, level in levels] for levels in read] == [
        [{role: size for role, size in level.items() if size} for _, level in levels]
        for levels in SIMULATED.levels
    ]


def test_the_prediction_of_a_saved_timeline_is_that_of_the_original(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    SIMULATED.save_chrome_trace(path)
    cluster = load_cluster("cpu-virtual")
    read, original = (prediction_of(t, cluster).row() for t in (load_timeline(path), SIMULATED))
    assert read == pytest.approx(original, nan_ok=True)


@pytest.mark.parametrize("text", ["{}", "[]", "3", '{"traceEvents": [3], "otherData": {}}', "{"])
def test_a_file_of_another_kind_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(FileError, match=r"trace\.json: is (no timeline|not JSON)"):
        load_timeline(path)
