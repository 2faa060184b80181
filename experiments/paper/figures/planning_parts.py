"""Alpa's table 5: the parts of the time that it takes to plan its largest GPT."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from matplotlib.figure import Figure

import autopar
from experiments.paper.paper_style import PUBLISHED_MARK, bar_style, new_figure
from experiments.paper.published_values import published_table
from experiments.paper.study import Table
from experiments.validation.pipeline_quality import PUBLISHED, AlpaPlan, plan_pipeline

COSTS, PROGRAM = "costs of stages", "dynamic program"
TRACING, REST = "tracing, layers", "rest"

MODULES = {
    COSTS: (
        "planning/stage_costs.py",
        "planning/layer_costs.py",
        "planning/layer_ranges.py",
        "planning/composition.py",
        "sharding/",
    ),
    PROGRAM: (
        "planning/stage_dp.py",
        "planning/stage_bounds.py",
        "planning/stage_problem.py",
        "planning/stage_construction.py",
    ),
    TRACING: ("tracing/", "layering/"),
}
"""The modules of each part of planning, whose time includes the functions that they call.

Time in modules of several parts belongs to the first: the dynamic program asks for costs.
"""

_INTERVAL = 0.005
"""Seconds between samples of the stack."""


def rows(part: str, smoke: bool) -> Iterator[dict[str, Any]]:
    """Yield the seconds of each part of planning, ours and Alpa's."""
    plan = {published.name: published for published in PUBLISHED}[part]
    if smoke:
        plan = AlpaPlan("gpt", (64, 2, 2), 512, 2, ((1, (1, 1), (1, 1)),) * 2)
    space = autopar.AutoStageOption(submesh_logical_shape_space="all")
    seconds = sampled_seconds(lambda: plan_pipeline(plan, space))
    total = sum(seconds.values())
    alpa = published_table("alpa_planning_seconds").iloc[0]
    published = {
        COSTS: alpa["compile_seconds"] + alpa["profile_seconds"],
        PROGRAM: alpa["dynamic_program_seconds"],
        TRACING: None,
    }
    rest = alpa["total_seconds"] - published[COSTS] - published[PROGRAM]
    for series in (COSTS, PROGRAM, TRACING, REST):
        yield {
            "series": series,
            "seconds": seconds.get(series, 0.0),
            "share": seconds.get(series, 0.0) / total,
            "alpa_seconds": rest if series == REST else published[series],
        }


def sampled_seconds(run: Callable[[], object]) -> dict[str, float]:
    """Run a function, and return the processor seconds of each part, from samples of the stack.

    A profiler that counts calls would slow planning down by a different factor in each part. Other
    parts of the study may run beside this one, so that time on the clock would depend on them.
    """
    planner = threading.get_ident()
    ended = threading.Event()
    seconds: dict[str, float] = {}
    last = time.process_time()

    def sample() -> None:
        nonlocal last
        while not ended.wait(_INTERVAL):
            part = part_of(sys._current_frames()[planner])
            now = time.process_time()
            seconds[part] = seconds.get(part, 0.0) + now - last
            last = now

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    try:
        run()
    finally:
        ended.set()
        sampler.join()
    seconds[REST] = seconds.get(REST, 0.0) + time.process_time() - last
    return seconds


def part_of(frame: FrameType | None) -> str:
    """Return the part of planning that a stack is in, by the modules of its functions."""
    files = []
    while frame is not None:
        _, inside, file = frame.f_code.co_filename.rpartition("/autopar/")
        files += [file] if inside else []
        frame = frame.f_back
    for part, modules in MODULES.items():
        if any(file.startswith(modules) for file in files):
            return part
    return REST


def draw(table: Table) -> Figure:
    """Draw the seconds of each part."""
    figure = new_figure(1.5)
    axes = figure.subplots()
    axes.barh(
        table["series"],
        table["seconds"],
        0.6,
        label="ours",
        **bar_style(1, colour=3),
    )
    marks = table.dropna(subset=["alpa_seconds"])
    axes.plot(marks["alpa_seconds"], marks["series"], **PUBLISHED_MARK, label="Alpa, published")
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel="seconds", xlim=(0.05, None))
    axes.grid(axis="x")
    axes.grid(axis="y", visible=False)
    axes.legend(loc="lower right")
    return figure


def caption(table: Table) -> str:
    """Return the caption."""
    ours = table.set_index("series")["seconds"]
    alpa = table.set_index("series")["alpa_seconds"]
    return (
        "Processor seconds of the parts of planning the GPT with 39 billion parameters for 64"
        " V100s, on one machine without GPUs, from samples of the stack; beside, Zheng et al.,"
        f" table 5. Alpa compiles and profiles stages for {alpa[COSTS]:.0f} s, where we predict"
        f" their costs in {ours[COSTS]:.0f} s; its dynamic program takes {alpa[PROGRAM]:.2f} s,"
        f" ours {ours[PROGRAM]:.2f} s. Alpa's table does not list tracing."
    )


def numbers(table: Table) -> dict[str, str]:
    """Return the numbers of the text: the share of each part that Alpa lists."""
    shares = table.set_index("series")["share"]
    return {"costs": f"{shares[COSTS]:.0%}", "tracing": f"{shares[TRACING]:.0%}"}


def claims(table: Table) -> dict[str, bool]:
    """Return whether what the paper's table shows holds for our rows."""
    shares = table.set_index("series")["share"]
    return {
        "alpa_costs_dominate": bool(shares[COSTS] > 0.5),
        "alpa_program_is_short": bool(shares[PROGRAM] < 0.05),
    }
