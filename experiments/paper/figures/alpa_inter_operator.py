"""Alpa's figure 9: pipelines of equal operators, of equal layers, and of the dynamic program."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure

import autopar
from experiments.models import GPT
from experiments.paper.figure_rows import DoesNotFit, by_series, plan_rows
from experiments.paper.paper_style import family_figure
from experiments.paper.published_values import Factor, published_factor
from experiments.paper.study import Table
from experiments.paper.wide_resnet_steps import (
    SMOKE,
    STAGES,
    alpa_plans,
    convolution_flops,
    plan_wide_resnet,
)
from experiments.validation.pipeline_quality import PUBLISHED, AlpaPlan, plan_pipeline, step_flops

OPERATORS, LAYERS, PROGRAM = "equal operators", "equal layers", "dynamic program"
ORDER = (OPERATORS, LAYERS, PROGRAM)
NAMES = {"gpt": "GPT", "wide_resnet": "Wide-ResNet"}

FACTORS: dict[str, Factor] = {OPERATORS: "program_over_operators", LAYERS: "program_over_layers"}
"""Names of the published factors by which the dynamic program is faster on Wide-ResNet."""

FACTOR_GPUS = 32
"""The number of GPUs for which the factors are published."""

HOST_GPUS = 8
"""GPUs of a host; stages of several hosts are slow to plan, and to run."""

SPEEDUP = "times as fast"
"""Unit of the rows of these factors."""


def rows(part: str, smoke: bool) -> Iterator[dict[str, Any]]:
    """Yield the rate with each kind of stages, for a model on a number of GPUs."""
    family, _, count = part.rpartition("-")
    gpus = int(count)
    planned: Callable[..., autopar.Plan]
    if family == "gpt":
        published = {plan.name: plan for plan in PUBLISHED}[part]
        published = AlpaPlan("gpt", (64, 8, 2), 512, 4, published.stages) if smoke else published
        model: Any = published.model()
        assert isinstance(model, GPT)
        planned = partial(plan_pipeline, published)
        flops, layers = step_flops(model), published.num_layers
    else:
        resnet = SMOKE if smoke else alpa_plans()[gpus]
        planned = partial(plan_wide_resnet, resnet)
        gpus = resnet.gpus
        flops, layers = convolution_flops(resnet.model), sum(resnet.blocks)
    makers: dict[str, Callable[[], autopar.Plan]] = {
        OPERATORS: lambda: planned(STAGES, work="count"),
        LAYERS: lambda: _equal_layers(planned, gpus, layers),
        PROGRAM: lambda: planned(STAGES),
    }
    named = {"family": family, "group": int(count)}
    rates: dict[str, float] = {}
    for row in plan_rows(makers, flops, **named):
        yield row
        if "ours" in row:
            rates[row["series"]] = row["ours"]
    if family == "wide_resnet" and int(count) == FACTOR_GPUS:
        for series, name in FACTORS.items():
            both = series in rates and PROGRAM in rates
            yield {
                **named,
                "series": f"over {series}",
                "unit": SPEEDUP,
                "published": published_factor(name),
                "ours": rates[PROGRAM] / rates[series] if both else None,
            }


def _equal_layers(
    planned: Callable[[autopar.UniformStageOption], autopar.Plan], gpus: int, layers: int
) -> autopar.Plan:
    """Return the fastest plan whose stages have as many layers and devices each, within hosts.

    Raises:
        NoStagesError, InfeasibleError, TimeoutError: none fits in memory, or was found in time.
    """
    plans: list[autopar.Plan] = []
    error: Exception | None = None
    for count in (1, 2, 4, 8, 16):
        devices = gpus // count
        if devices > HOST_GPUS or gpus % count or layers % count:
            continue
        stages = autopar.UniformStageOption(count, (1, devices), (devices,))
        try:
            plans.append(planned(stages))
        except (*DoesNotFit, TimeoutError) as unfit:
            error = unfit
    if not plans:
        assert error is not None
        raise error
    return min(plans, key=lambda one: one.predicted_seconds)


def _shown(table: Table) -> Table:
    """Return the rows of rates."""
    return table[table["unit"] != SPEEDUP]


def draw(table: Table) -> Figure:
    """Draw the rates of each model by number of GPUs."""
    return family_figure(_shown(table), NAMES, 2.8, order=ORDER)


def _gains(table: Table, family: str) -> Table:
    """Return by which factor the dynamic program is faster than the others, by number of GPUs.

    A factor is infinite where only the dynamic program fits in memory.
    """
    shown = _shown(table)
    rows_of = shown[shown["family"] == family]
    zero = rows_of["fits"].astype(str) == "False"
    rated = rows_of.assign(rate=rows_of["ours"].astype(float).mask(zero, 0.0))
    rates = by_series(rated, "rate").reindex(columns=list(ORDER))
    with np.errstate(divide="ignore"):
        return (1 / rates[[OPERATORS, LAYERS]]).mul(rates[PROGRAM], axis=0)


def _text(gains: Table) -> str:
    parts = []
    for series in FACTORS:
        factors = gains[series][np.isfinite(gains[series])]
        ends = dict.fromkeys([f"{factors.min():.2f}", f"{factors.max():.2f}"])
        text = f"{' to '.join(ends)} times as fast as with {series}"
        if (gains[series] == np.inf).all():
            text = f"the only one that fits, beside {series}"
        elif len(factors) < len(gains):
            text += ", where those have a rate"
        parts.append(text)
    return " and ".join(parts)


def caption(table: Table) -> str:
    """Return the caption."""
    texts = "; ".join(
        f"{NAMES[family]}: {_text(_gains(table, family))}"
        for family in dict.fromkeys(table["family"])
    )
    operators, layers = (published_factor(FACTORS[series]) for series in (OPERATORS, LAYERS))
    shown = _shown(table)
    late = shown[shown["ours"].isna() & shown["fits"].isna()]
    names = [
        f"{row.series} of {NAMES[str(row.family)]} on {row.group}" for row in late.itertuples()
    ]
    unknown = f" Not planned within the solver's time limit: {', '.join(names)}." if names else ""
    return (
        "Rates with the dynamic program's stages of layers that have equal FLOP, with its stages of"
        " layers that have equal numbers of matrix products and convolutions, and with the best"
        " equal division of layers and GPUs into stages within hosts (after Zheng et al., figure 9,"
        " whose bars were not digitised; other numbers of GPUs are left out, as each takes minutes"
        f" to plan). Crosses: no stages fit in memory. The first is, for {texts}. Published for"
        f" Wide-ResNet on {FACTOR_GPUS} GPUs: {operators:.1f} and {layers:.1f} times.{unknown}"
    )


def claims(table: Table) -> dict[str, bool]:
    """Return whether the paper's claims hold for our rows."""
    resnet, gpt = (_gains(table, family) for family in ("wide_resnet", "gpt"))
    return {
        "alpa_program_beats_operators": bool((resnet[OPERATORS].dropna() > 1).all())
        and bool(resnet[OPERATORS].notna().any()),
        "alpa_layers_match_on_gpt": len(gpt) > 0 and bool((gpt[LAYERS] < 1.05).all()),
        "alpa_layers_slower_on_wide_resnet": bool((resnet[LAYERS] > 1.1).any()),
    }
