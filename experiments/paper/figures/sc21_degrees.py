"""Narayanan et al., figures 13 to 15: degrees of tensor, pipeline and data parallelism."""

from collections.abc import Iterator
from typing import Any

from matplotlib.figure import Figure

from experiments.paper.megatron_steps import sized, step, throughput
from experiments.paper.paper_style import draw_lines, new_figure
from experiments.paper.study import Table

GPUS = 64
LARGE = sized(layers=32, hidden=20480, heads=128)
"""162 billion parameters."""
SMALL = sized(layers=32, hidden=3840, heads=32)
"""5.9 billion parameters."""

PANELS = ("tensor and pipeline", "pipeline and data", "tensor and data")


def rows(part: str, smoke: bool) -> Iterator[dict[str, Any]]:
    """Yield a row for each division of the GPUs and each batch, with a microbatch of one."""
    del part
    for batch in (32, 128):
        for tensor in (2, 4, 8, 16, 32):
            yield _row(PANELS[0], batch, tensor, tensor, GPUS // tensor)
    for batch in (128,) if smoke else (32, 128, 512):
        for degree in (2, 4, 8, 16, 32):
            yield _row(PANELS[1], batch, degree, 1, degree)
            yield _row(PANELS[2], batch, degree, degree, 1)


def _row(panel: str, batch: int, degree: int, tensor: int, pipeline: int) -> dict[str, Any]:
    model = LARGE if panel == PANELS[0] else SMALL
    prediction = step(model, GPUS, tensor=tensor, pipeline=pipeline, global_batch=batch)
    row = {"panel": panel, "group": f"{panel}, batch {batch}", "series": f"batch {batch}"}
    return row | {"batch": batch, "degree": degree, **throughput(prediction)}


def draw(table: Table) -> Figure:
    """Draw throughput over the degree of the first kind of parallelism of each panel."""
    figure = new_figure(3.6)
    for axes, panel in zip(figure.subplots(3, 1, sharex=True), PANELS, strict=True):
        draw_lines(axes, table[table["panel"] == panel], "degree", "ours")
        axes.set_xscale("log", base=2)
        axes.set_xticks([2, 4, 8, 16, 32], ["2", "4", "8", "16", "32"])
        axes.set_ylim(0, None)
        axes.set_xlabel(f"{panel.split()[0]} degree; {panel.split()[-1]} divides the rest")
        axes.tick_params(labelbottom=True)
    figure.supylabel("TFLOP/s per GPU", fontsize=7)
    figure.axes[1].legend(ncols=3, loc="lower left")
    return figure


def caption(table: Table) -> str:
    """Return the caption."""
    best = table[table["panel"] == PANELS[0]].groupby("batch").apply(_fastest)
    return (
        f"Throughput on {GPUS} A100s by tensor and pipeline degree (162 billion parameters, above),"
        " by pipeline and by tensor degree beside data parallelism (5.9 billion, below); Narayanan"
        " et al., figures 13 to 15, whose claims in words are checked, as their values are only"
        f" plotted. Fastest tensor degree by batch: {_listed(best)}."
    )


def _fastest(rows: Table) -> int:
    return int(rows.loc[rows["ours"].idxmax(), "degree"])


def _listed(best: Table) -> str:
    return ", ".join(f"{degree} (batch {batch})" for batch, degree in best.items())


def claims(table: Table) -> dict[str, bool]:
    """Return whether the paper's claims hold for our rows."""
    large, pipelined, split = (table[table["panel"] == panel] for panel in PANELS)
    by_degree = pipelined.sort_values("degree").groupby("batch")["ours"]
    tensor = split.sort_values("degree").groupby("batch")["ours"]
    return {
        "sc21_tensor_in_host": (large.groupby("batch").apply(_fastest) == 8).all(),
        "sc21_data_over_pipeline": by_degree.apply(lambda x: x.is_monotonic_decreasing).all(),
        "sc21_data_over_tensor": tensor.apply(lambda x: x.iloc[0] == x.max()).all(),
    }
