"""Seconds and memory of planning, from 125 million to 1 trillion parameters."""

import resource
import time
from collections.abc import Iterator
from typing import Any

from matplotlib.figure import Figure

from experiments.paper.megatron_steps import machine, sized
from experiments.paper.paper_style import draw_lines, new_figure
from experiments.paper.published_values import published_table
from experiments.paper.study import Table
from simulator.transformer import Execution, search_layouts

SIZES = {
    0.125: (12, 768, 12, 1),
    1.3: (24, 2048, 32, 8),
    18.4: (40, 6144, 48, 256),
    145.6: (80, 12288, 96, 1536),
    529.6: (105, 20480, 128, 2520),
    1008.0: (128, 25600, 160, 3072),
}
"""Layers, width, heads and GPUs of GPTs, by billions of parameters."""

LARGEST_PUBLISHED = 39
"""Billions of parameters of the GPT whose planning by Alpa is published."""

SEARCH, PLAN, ALPA = "layout search", "planner", "Alpa, published"


def rows(part: str, smoke: bool) -> Iterator[dict[str, Any]]:
    """Yield seconds and megabytes of each planning."""
    if part == "search":
        for parameters, (*sizes, gpus) in list(SIZES.items())[: 2 if smoke else None]:
            start = time.process_time()
            execution = Execution(global_batch=gpus, scatter_sends=True)
            found = search_layouts(sized(*sizes), execution, machine(gpus), kept=("context",))
            yield _row(SEARCH, parameters, gpus, start) | {"layouts": found.count}
        return
    if part == "alpa":
        for row in published_table("alpa_planning_seconds").itertuples():
            yield {
                "series": ALPA,
                "parameters_b": row.parameters_b,
                "gpus": row.gpus,
                "seconds": row.total_seconds,
            }
        return
    yield from _planned(part, smoke)


def _planned(part: str, smoke: bool) -> Iterator[dict[str, Any]]:
    """Yield the automatic plan of a GPT of Alpa's suite."""
    import autopar
    from experiments.validation.pipeline_quality import PUBLISHED, AlpaPlan, plan_pipeline

    published = {plan.name: plan for plan in PUBLISHED}[part]
    if smoke:
        published = AlpaPlan("gpt", (64, 4, 2), 512, 2, ((1, (1, 1), (1, 1)),) * 2)
    start = time.process_time()
    space = autopar.AutoStageOption(submesh_logical_shape_space="all")
    plan_pipeline(published, space)
    parameters = {"gpt-8": 2.6, "gpt-16": 6.7, "gpt-32": 15.0, "gpt-64": LARGEST_PUBLISHED}[part]
    yield _row(PLAN, parameters, published.num_devices, start)


def _row(series: str, parameters: float, gpus: int, start: float) -> dict[str, Any]:
    """Return seconds since the start, and the largest memory of this process until now.

    The seconds are those of the processor: other parts of the study may run beside this one.
    """
    return {
        "series": series,
        "parameters_b": parameters,
        "gpus": gpus,
        "seconds": time.process_time() - start,
        "memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    }


def draw(table: Table) -> Figure:
    """Draw seconds over the number of parameters."""
    figure = new_figure(1.9)
    axes = figure.subplots()
    draw_lines(axes, table.sort_values("parameters_b"), "parameters_b", "seconds")
    axes.set(xscale="log", yscale="log", xlabel="parameters (billion)", ylabel="planning (s)")
    axes.legend()
    return figure


def caption(table: Table) -> str:
    """Return the caption."""
    search, plan = (table[table["series"] == series] for series in (SEARCH, PLAN))
    text = (
        "Processor seconds of planning on one machine without GPUs: the search of closed-form"
        " layouts, and the planner of stages and shardings from the traced step of Alpa's GPTs,"
        " tracing included, beside what Alpa needed, which compiles and profiles on GPUs."
    )
    if len(search):
        text += f" The search takes {search['seconds'].max():.1f} s at most."
    if len(plan):
        seconds, memory = plan["seconds"].max(), plan["memory_gb"].max()
        text += f" The planner takes {seconds:.0f} s and {memory:.1f} GB of memory at most."
    return text


def numbers(table: Table) -> dict[str, str]:
    """Return the numbers of the text: how many times as long Alpa took for its largest GPT."""
    largest = table[table["parameters_b"] == LARGEST_PUBLISHED].set_index("series")["seconds"]
    if not {PLAN, ALPA} <= set(largest.index):
        return {"times": "(not computed)"}
    return {"times": f"{largest[ALPA] / largest[PLAN]:.0f}"}
