"""Layouts that the search finds beside published ones, on the same simulator and in its memory."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.paper.megatron_steps import GPT, machine, sized
from experiments.paper.paper_style import bar_style, legend_above, new_figure
from experiments.paper.study import Table
from simulator import Cluster
from simulator.transformer import Execution, Machine, Transformer, search_layouts
from simulator.validation import records

CONFIDENCE = 0.5
"""Probability of fitting in memory: that of a layout whose predicted memory just fits."""

DEGREES = ("tensor", "context", "pipeline")
ABLATION = {
    "published": (*DEGREES, "recompute"),  # the table gives no microbatch and no interleaving
    "degrees searched": ("context", "recompute"),
    "recomputation searched": DEGREES,
    "all searched": ("context",),
}
"""Which fields have their published values; context parallelism is none of Megatron-LM's then."""


def rows(part: str, smoke: bool) -> Iterator[dict[str, Any]]:
    """Yield a row for each published configuration and each part of the search."""
    for name, model, published, where in list(_configurations(part))[: 2 if smoke else None]:
        base = None
        for series, kept in ABLATION.items():
            best = search_layouts(model, published, where, CONFIDENCE, kept).fitting[0]
            base = base or best.prediction.seconds
            execution = best.execution
            yield {
                "configuration": name,
                "gpus": execution.devices,
                "series": series,
                "seconds": best.prediction.seconds,
                "speedup": base / best.prediction.seconds,
                "memory_gb": best.prediction.memory.total / 1e9,
                "tensor": execution.tensor,
                "pipeline": execution.pipeline,
                "data": execution.data,
                "microbatch": execution.microbatch,
                "interleave": execution.interleave,
                "recompute": execution.recompute,
            }


def _configurations(part: str) -> Iterator[tuple[str, Transformer, Execution, Machine]]:
    if part == "sc21":
        for row in records("megatron_sc21_table1"):
            model = sized(row.layers, row.hidden, row.heads)
            execution = _execution(row, recompute="full", scatter_sends=True)
            yield f"{row.params_B:g}B", model, execution, machine(row.gpus)
        return
    for row in records("megatron_core_h100_weak"):
        fields = {"layers": row.layers, "hidden": row.hidden, "heads": row.heads, "seq": 4096}
        fields |= {"vocab": 131072, "attention": "flash2", "dropout": False}
        model = Transformer.model_validate({**GPT.model_dump(), **fields})
        execution = _execution(
            row,
            sequence_parallel=row.tp > 1,
            overlap_tensor="all",
            overlap_sends=True,
            overlap_gradients=True,
            zero=1,
            communicated_gradient_bytes=2,
        )
        where = Machine(Cluster.load("dgx_h100").with_size(row.gpus // 8))
        yield f"{row.params_B:g}B", model, execution, where


def _execution(row: Any, **fields: Any) -> Execution:
    degrees = {"tensor": row.tp, "pipeline": row.pp, "data": row.dp, "global_batch": row.gbs}
    return Execution.model_validate(degrees | fields)


def draw(table: Table) -> Figure:
    """Draw the speedup over the published degrees."""
    figure = new_figure(3.0)
    shown = list(table.groupby("part", sort=False))
    plots = np.atleast_1d(figure.subplots(len(shown), 1))
    for axes, (part, panel) in zip(plots, shown, strict=True):
        names = list(dict.fromkeys(panel["configuration"]))
        width = 0.84 / (len(ABLATION) - 1)
        for number, series in enumerate(list(ABLATION)[1:]):
            values = panel[panel["series"] == series]["speedup"]
            axes.bar(
                np.arange(len(names)) + (number - 1) * width,
                values,
                0.94 * width,
                label=series,
                **bar_style(number),
            )
        axes.axhline(1, color="black", linewidth=0.6)
        axes.set_xticks(range(len(names)), names)
        axes.set(ylabel="speedup", xlabel={"sc21": "A100", "core": "H100"}[str(part)])
    legend_above(figure, list(plots))
    return figure


def caption(table: Table) -> str:
    """Return the caption."""
    best = table[table["series"] == "all searched"]["speedup"]
    degrees = table[table["series"] == "degrees searched"]["speedup"]
    return (
        "Predicted speedup of the layouts that the search finds over the published degrees of"
        " tensor, pipeline and data parallelism with the fastest microbatch and interleaving that"
        " fit: Narayanan et al., table 1 (A100), and Megatron-Core's weak scaling (H100). Degrees"
        f" alone gain {degrees.min() - 1:.1%} to {degrees.max() - 1:.1%}, everything"
        f" {best.min() - 1:.1%} to {best.max() - 1:.1%}. All layouts have sequence parallelism;"
        " like selective recomputation it is younger than the first table."
    )


def numbers(table: Table) -> dict[str, str]:
    """Return the numbers of the text."""
    found = table[table["series"] == "all searched"]["speedup"]
    return {
        "best": f"{found.max() - 1:.0%}",
        "least": f"{found.min() - 1:.0%}",
        "degrees": f"{table[table['series'] == 'degrees searched']['speedup'].max() - 1:.0%}",
    }
