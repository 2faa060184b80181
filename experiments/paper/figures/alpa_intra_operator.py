"""Alpa's figure 8: shardings of a GPT on one host as its width, and so its memory, grows."""

from collections.abc import Iterator
from typing import Any

from matplotlib.figure import Figure

import autopar
from experiments.models.model_sizes import gpt
from experiments.paper.paper_style import draw_bars, legend_above, new_figure
from experiments.paper.study import Table
from experiments.validation.alpa_figure7 import step_flops
from simulator import Cluster

METHODS: dict[str, tuple[str, type[autopar.PlanningMethod]]] = {
    "data": ("data", autopar.DataParallel),
    "zero2": ("ZeRO-2", autopar.Zero2Parallel),
    "zero3": ("ZeRO-3", autopar.Zero3Parallel),
    "program": ("integer program", autopar.ShardParallel),
}
"""The series and the method of each part."""

LAYERS, BATCH = 4, 16
WIDTHS = (1024, 2048, 3072, 4096, 6144, 8192)


def rows(part: str, smoke: bool) -> Iterator[dict[str, Any]]:
    """Yield the rate of each method for each width, on 8 V100s."""
    series, method = METHODS[part]
    for width in (128,) if smoke else WIDTHS:
        model = gpt(width, LAYERS, width // 64, batch_size=BATCH)
        row = {"group": width, "series": series, "unit": "PFLOP/s"}
        try:
            plan = autopar.plan_step(
                model.train_step,
                model.abstract_args(),
                method=method(),
                cluster=Cluster.load("p3.16xlarge"),
                mesh_shape=(8,),
            )
        except autopar.InfeasibleError:
            yield {**row, "fits": False}
            continue
        yield {
            **row,
            "ours": step_flops(model) / plan.predicted_seconds / 1e15,
            "memory_gb": plan.predicted_bytes / 1e9,
            "fits": True,
        }


def draw(table: Table) -> Figure:
    """Draw the rates by width."""
    figure = new_figure(1.9)
    axes = figure.subplots()
    draw_bars(axes, table.sort_values("group", kind="stable"))
    axes.set(xlabel="width of the model", ylabel="PFLOP/s")
    legend_above(figure, axes, columns=4)
    return figure


def caption(table: Table) -> str:
    """Return the caption."""
    rates = _rates(table)
    others = rates.drop(columns="integer program", errors="ignore").max(axis=1)
    gain = (rates["integer program"] / others).max() - 1 if "integer program" in rates else 0.0
    return (
        f"Shardings of a GPT of {LAYERS} layers on 8 V100s with 16 GB as it gets wider, {BATCH}"
        " sequences a step (after Zheng et al., figure 8, whose claims in words are checked; its"
        " heuristic baseline is left out). Crosses: no plan of the method fits in memory. The"
        f" integer program is up to {gain:.0%} faster than the best of the others that fits."
    )


def _rates(table: Table) -> Table:
    return table.pivot(index="group", columns="series", values="ours")


def _fits(table: Table) -> Table:
    fits = table.assign(fits=table["fits"].astype(str) == "True")
    return fits.pivot(index="group", columns="series", values="fits")


def claims(table: Table) -> dict[str, bool]:
    """Return whether the paper's claims hold for our rows."""
    rates, fits = _rates(table), _fits(table)
    best = rates.max(axis=1)
    ends = [fits[name].sum() for name in ("data", "ZeRO-2", "ZeRO-3") if name in fits]
    return {
        "alpa_program_is_best": (rates["integer program"] >= 0.999 * best).all(),
        "alpa_data_runs_out": ends == sorted(ends) and ends[0] < ends[-1],
    }
