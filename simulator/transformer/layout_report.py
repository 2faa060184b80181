"""Layouts of a search: a table, JSON values, and a picture of time against memory."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from simulator.report.figure_style import pyplot, save_figure
from simulator.transformer.layout_search import SEARCHED, Layout, LayoutSearch

_DEGREES = {
    "tensor": "tp",
    "pipeline": "pp",
    "interleave": "vp",
    "context": "cp",
    "data": "dp",
    "expert": "ep",
    "expert_shards": "etp",
    "microbatch": "batch",
    "recompute": "recompute",
}
"""Headings of the columns by the field of the execution, in their order."""

_EXPERT_DEGREES = ("expert", "expert_shards")
_HEADROOM = 1.15
"""Largest memory in a picture, as a multiple of the capacity."""


def layout_table(search: LayoutSearch, rows: int, title: str) -> Table:
    """Return a table of the fastest layouts that fit.

    Its columns are seconds, memory with its reserve in GB, the probability of fitting, MFU, the
    degrees of tensor, pipeline, context, data and expert parallelism, stages per device (vp),
    sequences of a microbatch, and recomputation. A star marks layouts on the frontier, which have
    less memory than all faster ones.

    Args:
        search: the search.
        rows: number of layouts, at most.
        title: text above the table.
    """
    caption = "* has less memory than all faster ones"
    table = Table(box=box.SIMPLE, title=title or None, caption=caption, padding=(0, 0, 0, 1))
    for heading in ("step, s", "", "memory, GB", "fits", "MFU"):
        table.add_column(heading, justify="right", no_wrap=True)
    has_experts = any(layout.execution.expert > 1 for layout in search.fitting)
    shown = [name for name in _DEGREES if has_experts or name not in _EXPERT_DEGREES]
    for name in shown:
        table.add_column(_DEGREES[name], justify="right", no_wrap=True)
    frontier = set(map(id, search.frontier))
    for layout in search.fitting[:rows]:
        prediction, execution = layout.prediction, layout.execution
        table.add_row(
            f"{prediction.seconds:.4g}",
            "*" if id(layout) in frontier else "",
            f"{prediction.memory.reserved / 1e9:.1f}",
            f"{100 * prediction.memory.fit_probability:.1f} %",
            f"{100 * prediction.mfu:.1f} %",
            *(str(getattr(execution, name)) for name in shown),
        )
    return table


def layout_values(search: LayoutSearch, rows: int) -> dict[str, Any]:
    """Return the search as plain values: counts, the fastest layouts that fit, and the frontier.

    Args:
        search: the search.
        rows: number of layouts that fit, at most; the frontier is complete.
    """
    return {
        "looked_at": search.count,
        "fitting": len(search.fitting),
        "uncertain": len(search.uncertain),
        "oversized": search.oversized,
        "least_memory_gb": search.least_bytes / 1e9,
        "layouts": [_values(layout) for layout in search.fitting[:rows]],
        "frontier": [_values(layout) for layout in search.frontier],
    }


def _values(layout: Layout) -> dict[str, Any]:
    prediction, execution = layout.prediction, layout.execution
    return {
        "seconds": prediction.seconds,
        "memory_gb": prediction.memory.reserved / 1e9,
        "fit_probability": prediction.memory.fit_probability,
        "mfu": prediction.mfu,
        "tokens_per_s": prediction.tokens_per_s,
        **{name: getattr(execution, name) for name in (*SEARCHED, "data")},
        "expert_tensor": execution.expert_shards,
        "sequence_parallel": execution.sequence_parallel,
    }


def save_layout_picture(search: LayoutSearch, path: str | Path, title: str) -> None:
    """Draw the seconds of layouts over their memory, with the frontier as a line.

    Args:
        search: the search, with at least one layout that was timed.
        path: the file, whose ending determines the format: .svg, .png or .pdf.
        title: text above the picture.

    Raises:
        FileError: the file can't be written.
        ModuleNotFoundError: matplotlib is not installed.
    """
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(6, 4))
    timed = (*search.fitting, *search.uncertain)
    capacity = timed[0].prediction.memory.capacity / 1e9
    for layouts, color, label in (
        (search.fitting, "#4878cf", "fits"),
        (search.uncertain, "#cccccc", "may not fit"),
    ):
        memory, seconds = _points(layouts)
        axes.scatter(memory, seconds, s=6, color=color, linewidths=0, label=label)
    memory, seconds = _points(search.frontier)
    axes.plot(
        memory,
        seconds,
        color="#d65f5f",
        marker="o",
        markersize=3,
        linewidth=1,
        drawstyle="steps-pre",
        label="frontier",
    )
    axes.axvline(capacity, color="black", linewidth=0.8, linestyle="--", label="capacity")
    axes.set(
        xlim=(0, _HEADROOM * capacity),
        yscale="log",
        xlabel="memory of a device with its reserve, GB",
        ylabel="step, s",
        title=title,
    )
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.legend(frameon=False, loc="upper left")
    save_figure(figure, Path(path))


def _points(layouts: Iterable[Layout]) -> tuple[list[float], list[float]]:
    """Return the memory in GB and the seconds of layouts."""
    predictions = [layout.prediction for layout in layouts]
    memory = [prediction.memory.reserved / 1e9 for prediction in predictions]
    return memory, [prediction.seconds for prediction in predictions]
