"""Alpa's figure 7: GPT and MoE on 4 to 64 V100s by its plans and by its baselines."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from matplotlib.figure import Figure

import autopar
from experiments.paper.paper_style import draw_bars, legend_above, new_figure
from experiments.paper.study import Table
from experiments.validation.alpa_figure7 import inter_only, step_flops
from experiments.validation.pipeline_quality import PUBLISHED, AlpaPlan, p3, plan_pipeline
from simulator.transformer import (
    EAGER,
    JITTED,
    Backend,
    Execution,
    Machine,
    Transformer,
    search_layouts,
)
from simulator.validation import records

ALPA, MEGATRON = "Alpa's plans", "Megatron-LM's best grid"
INTER, INTRA = "inter-operator only", "intra-operator only"
COLUMNS = {ALPA: "alpa", MEGATRON: "megatron_or_baseline", INTER: "inter_only", INTRA: "intra_only"}
"""The columns of the digitised figure."""

NAMES = {"gpt": "GPT", "moe": "MoE"}

SMOKE = AlpaPlan("gpt", (64, 2, 2), 512, 2, ((1, (1, 1), (1, 1)),) * 2)

_CONFIDENCE = 0.5
_ANY_SIZE = 1e15
"""A memory budget, in bytes, that any stage fits into."""


def rows(part: str, smoke: bool) -> Iterator[dict[str, Any]]:
    """Yield the bars of one model on one number of GPUs."""
    plan = {published.name: published for published in PUBLISHED}[part]
    bars = {(row.model.lower(), row.gpus): row for row in records("alpa_fig7_digitised_pflops")}
    bar = bars[plan.family, plan.num_devices]
    gpus = plan.num_devices
    if smoke:
        plan = SMOKE
    named = {"family": plan.family, "gpus": gpus, "group": part, "unit": "PFLOP/s"}
    series = {ALPA: _planned(plan)}
    if plan.family == "gpt":
        series |= _closed_form(plan, gpus)
    else:
        series[INTER] = _planned(inter_only(plan))
    for name, columns in series.items():
        text = str(getattr(bar, COLUMNS[name]))
        known = text != "nan"
        yield {
            **named,
            "series": name,
            "published": float(text) if known and text != "OOM" else None,
            "published_fits": text != "OOM" if known else None,
            **columns,
        }


def _planned(plan: AlpaPlan) -> dict[str, Any]:
    """Return the rate and the memory of a pipeline with given stages, whose shardings we plan."""
    model: Any = plan.model()
    try:
        planned = plan_pipeline(plan, plan.option())
    except (autopar.NoStagesError, autopar.InfeasibleError):
        planned = plan_pipeline(plan, plan.option(), _ANY_SIZE)
        return {"fits": False, "memory_gb": planned.predicted_bytes / 1e9, "by": "planner"}
    return {
        "ours": step_flops(model) / planned.predicted_seconds / 1e15,
        "fits": True,
        "memory_gb": planned.predicted_bytes / 1e9,
        "by": "planner",
    }


def _closed_form(plan: AlpaPlan, gpus: int) -> dict[str, dict[str, Any]]:
    """Return the baselines of a GPT: the fastest microbatch and degrees of each that fit."""
    hidden, layers, heads = plan.sizes
    model = Transformer(
        layers=layers, hidden=hidden, heads=heads, seq=1024, vocab=51200, precision="f16"
    )
    kept = {MEGATRON: (), INTER: ("tensor",), INTRA: ("pipeline",)}
    backends = {MEGATRON: EAGER, INTER: JITTED, INTRA: JITTED}
    return {
        name: _fastest(model, gpus, backends[name], fields, name == INTRA)
        for name, fields in kept.items()
    }


def _fastest(
    model: Transformer, gpus: int, backend: Backend, kept: tuple[str, ...], shards_states: bool
) -> dict[str, Any]:
    """Return the rate of the fastest layout, of all levels of ZeRO if states may be sharded."""
    where = Machine(p3(gpus).model_copy(update={"nics_per_host": 1}), backend)
    best = None
    least = []
    for zero in (0, 2, 3) if shards_states else (0,):
        execution = Execution(global_batch=1024, recompute="full", scatter_sends=True, zero=zero)
        always = ("context", "interleave", "recompute")
        found = search_layouts(model, execution, where, _CONFIDENCE, (*always, *kept))
        least.append(found.least_bytes)
        fastest = found.fitting[0] if found.fitting else None
        if fastest and (best is None or fastest.prediction.seconds < best.prediction.seconds):
            best = fastest
    if best is None:
        return {"fits": False, "memory_gb": min(least) / 1e9, "by": "closed form"}
    return {
        "ours": best.prediction.hardware_flops / best.prediction.seconds / 1e15,
        "fits": True,
        "memory_gb": best.prediction.memory.total / 1e9,
        "by": "closed form",
    }


def draw(table: Table) -> Figure:
    """Draw the rates of each model."""
    figure = new_figure(3.4)
    panels = list(table.groupby("family", sort=False))
    plots = np.atleast_1d(figure.subplots(len(panels), 1))
    for axes, (family, panel) in zip(plots, panels, strict=True):
        shown = panel.assign(group=panel["gpus"]).sort_values("gpus", kind="stable")
        draw_bars(axes, shown, order=list(COLUMNS))
        axes.set(yscale="log", ylabel="PFLOP/s", xlabel=f"GPUs, {NAMES[family]}")
        axes.set_ylim(0.05, None)
    legend_above(figure, list(plots), columns=2)
    return figure


def caption(table: Table) -> str:
    """Return the caption."""
    text = ""
    for family, panel in table[table["series"] == ALPA].groupby("family", sort=False):
        both = panel.dropna(subset=["ours", "published"])
        deviation = both["ours"] / both["published"] - 1
        if len(both):
            text += f" {NAMES[str(family)]} with Alpa's plans: {deviation.min():+.0%} to"
            text += f" {deviation.max():+.0%}."
    return (
        "GPT and MoE on V100s (Zheng et al., figure 7, whose bars were digitised to about 0.01"
        " PFLOP/s). Alpa's plans have its stages and meshes, and shardings of our planner; of MoE's"
        " inter-operator plans Alpa's number of microbatches is not known. The baselines of GPT are"
        " the fastest layouts of the closed form. Crosses: predicted not to fit; plusses: out of"
        " memory in the paper." + text
    )


def claims(table: Table) -> dict[str, bool]:
    """Return whether the paper's claims hold for our rows."""
    by_series = table.pivot(index="group", columns="series", values="ours")
    gpt = by_series[by_series.index.str.startswith("gpt")]
    others = gpt.drop(columns=[ALPA, MEGATRON], errors="ignore").max(axis=1)
    near = gpt[ALPA] / gpt[MEGATRON] if MEGATRON in gpt else gpt[ALPA]
    return {
        "alpa_beats_one_level": (gpt[ALPA] >= others)[gpt.index.str.len() > 5].all(),
        "alpa_matches_megatron": near.between(0.85, 1.3).all(),
    }


def numbers(table: Table) -> dict[str, str]:
    """Return the numbers of the text."""
    result = {}
    for family in ("gpt", "moe"):
        for series, name in ((ALPA, "alpa"), (MEGATRON, "megatron"), (INTER, "inter")):
            rows_of = table[(table["family"] == family) & (table["series"] == series)]
            both = rows_of.dropna(subset=["ours", "published"])
            deviation = (both["ours"] / both["published"] - 1).abs()
            result[f"{family}_{name}"] = f"{deviation.mean():.1%}" if len(both) else "–"
    return result
