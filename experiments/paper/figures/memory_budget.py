"""Time against memory: the planner's step time as the memory budget of a device shrinks."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from matplotlib.figure import Figure

import autopar
from experiments.models.model_sizes import gpt
from experiments.paper.paper_style import draw_lines, new_figure
from experiments.paper.study import Table
from simulator import Cluster

SERIES = {
    "planned": ("auto", False),
    "every_block": ("keep", True),
    "none": ("none", False),
}
"""The planner's remat, and whether the model has `jax.checkpoint` around its blocks."""

NAMES = {"planned": "remat planned", "every_block": "remat of every block", "none": "no remat"}

LAYERS, SMOKE_LAYERS = 4, 1


def rows(part: str, smoke: bool) -> Iterator[dict[str, Any]]:
    """Yield the plan for each part of the memory that the fastest plan needs."""
    remat, has_checkpoints = SERIES[part]
    layers = SMOKE_LAYERS if smoke else LAYERS
    size = gpt(1024, 24, 16, batch_size=32)
    fastest = _plan(replace(size, num_layers=layers, remat=False), "none", None)
    assert fastest is not None
    model = replace(size, num_layers=layers, remat=has_checkpoints)
    for share in (1.1,) if smoke else (1.2, 1.1, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.45):
        budget = share * fastest.predicted_bytes
        plan = _plan(model, remat, budget)
        yield {
            "series": NAMES[part],
            "budget_gb": budget / 1e9,
            "fits": plan is not None,
            "seconds": plan.predicted_seconds if plan else None,
            "memory_gb": plan.predicted_bytes / 1e9 if plan else None,
            "slowdown": plan.predicted_seconds / fastest.predicted_seconds if plan else None,
        }


def _plan(model: Any, remat: Any, budget: float | None) -> autopar.Plan | None:
    """Return the plan on eight A100s; None if none fits in the budget."""
    method = autopar.ShardParallel(memory_budget=budget, remat=remat)
    try:
        return autopar.plan_step(
            model.train_step,
            model.abstract_args(),
            method=method,
            cluster=Cluster.load("dgx_a100_80"),
            mesh_shape=(8,),
        )
    except autopar.InfeasibleError:
        return None


def draw(table: Table) -> Figure:
    """Draw the slowdown over the budget."""
    figure = new_figure(1.8)
    axes = figure.subplots()
    draw_lines(axes, table, "budget_gb", "slowdown")
    axes.set(xlabel="memory budget of a GPU (GB)", ylabel="time / fastest")
    axes.legend()
    return figure


def caption(table: Table) -> str:
    """Return the caption."""
    ends = []
    for series, rows_of_series in table[table["seconds"].notna()].groupby("series", sort=False):
        tightest = rows_of_series.loc[rows_of_series["budget_gb"].idxmin()]
        ends.append(f"{series} {tightest['budget_gb']:.2f} GB, {tightest['slowdown']:.2f} times")
    return (
        "Step time that the planner predicts as the memory budget of a GPU shrinks (blocks of a GPT"
        " of 350M parameters on 8 A100s), when it chooses what to recompute, when every block is"
        " recomputed, and without recomputation. A line ends at the smallest of these budgets with"
        f" a plan: {'; '.join(ends)} the fastest time."
    )
