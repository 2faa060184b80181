"""Alpa's figure 7: GPT and MoE on 4 to 64 V100s by its plans and by its baselines."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from matplotlib.figure import Figure

import autopar
from experiments.models import MoE
from experiments.paper.figure_rows import DoesNotFit, by_series, plan_rate, rate
from experiments.paper.paper_style import family_figure
from experiments.paper.published_values import published_factor, published_table
from experiments.paper.study import Table
from experiments.validation.pipeline_quality import (
    PUBLISHED,
    AlpaPlan,
    inter_only,
    p3,
    plan_pipeline,
    step_flops,
    step_of,
)
from simulator.transformer import (
    EAGER,
    JITTED,
    Backend,
    Execution,
    Machine,
    Transformer,
    predict,
    search_layouts,
)
from simulator.validation import records

ALPA, MEGATRON = "Alpa's plans", "Megatron-LM's best grid"
DEEPSPEED = "DeepSpeed's experts and ZeRO"
INTER, INTRA = "inter-operator only", "intra-operator only"
COLUMNS = {
    ALPA: "alpa",
    MEGATRON: "megatron_or_baseline",
    DEEPSPEED: "megatron_or_baseline",
    INTER: "inter_only",
    INTRA: "intra_only",
}
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
    layout = _intra_layout(plan.family, gpus)
    if plan.family == "gpt":
        series |= _closed_form(plan, gpus)
        assert layout is not None
        series[INTRA] = _given_layout(gpt_of(plan), gpus, layout)
    else:
        series[INTER] = _planned(inter_only(plan))
        series[DEEPSPEED] = _deepspeed(plan, gpus)
        if layout is not None:
            series[INTRA] = _without_stages(plan, layout)
    for name, columns in series.items():
        text = str(getattr(bar, COLUMNS[name]))
        known = text != "-"
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
        columns = plan_rate(step_flops(model), plan_pipeline(plan, plan.option()))
    except DoesNotFit:
        planned = plan_pipeline(plan, plan.option(), _ANY_SIZE)
        columns = rate(0.0, planned.predicted_bytes, fits=False)
    return columns | {"by": "planner"}


@dataclass(frozen=True, slots=True)
class IntraLayout:
    """How Alpa ran a model without stages.

    Attributes:
        batch_axis: size of the axis of its logical mesh that the batch is on.
        other_axis: size of the other axis.
        sequences: sequences of a microbatch.
    """

    batch_axis: int
    other_axis: int
    sequences: int


def _intra_layout(family: str, gpus: int) -> IntraLayout | None:
    """Return the layout of a model; None if the paper has no such bar."""
    for row in published_table("alpa_intra_only").itertuples():
        if (row.family, row.gpus) == (family, gpus):
            return IntraLayout(int(row.batch_axis), int(row.other_axis), int(row.sequences))
    return None


def gpt_of(plan: AlpaPlan) -> Transformer:
    """Return the closed-form GPT of a plan."""
    hidden, layers, heads = plan.sizes
    return Transformer(
        layers=layers, hidden=hidden, heads=heads, seq=1024, vocab=51200, precision="f16"
    )


def _closed_form(plan: AlpaPlan, gpus: int) -> dict[str, dict[str, Any]]:
    """Return the baselines of a GPT: the fastest microbatch and degrees of each that fit."""
    baselines = {MEGATRON: (EAGER, ()), INTER: (JITTED, ("tensor",))}
    return {
        name: _fastest(gpt_of(plan), gpus, backend, kept)
        for name, (backend, kept) in baselines.items()
    }


def _machine(gpus: int, backend: Backend) -> Machine:
    return Machine(p3(gpus).model_copy(update={"nics_per_host": 1}), backend)


def _fastest(
    model: Transformer, gpus: int, backend: Backend, kept: tuple[str, ...]
) -> dict[str, Any]:
    """Return the rate of the fastest layout."""
    execution = Execution(global_batch=1024, recompute="full", scatter_sends=True)
    always = ("context", "interleave", "recompute")
    where = _machine(gpus, backend)
    found = search_layouts(model, execution, where, _CONFIDENCE, (*always, *kept))
    if not found.fitting:
        return _closed(0.0, found.least_bytes, fits=False)
    best = found.fitting[0].prediction
    return _closed(best.hardware_flops / best.seconds, best.memory.total)


def _closed(flop_per_s: float, num_bytes: float, *, fits: bool = True) -> dict[str, Any]:
    """Return the columns of a rate of the closed form."""
    return rate(flop_per_s, num_bytes, fits=fits) | {"by": "closed form"}


def _given_layout(model: Transformer, gpus: int, layout: IntraLayout) -> dict[str, Any]:
    """Return the rate of a GPT without stages, with a given logical mesh and microbatch.

    Alpa scatters the sums of gradients, so that optimizer states are sharded as by ZeRO-2.
    """
    execution = Execution(
        data=layout.batch_axis,
        tensor=layout.other_axis,
        microbatch=layout.sequences // layout.batch_axis,
        global_batch=1024,
        recompute="full",
        zero=2,
    )
    found = predict(model, execution, _machine(gpus, JITTED))
    flop_per_s, memory = found.hardware_flops / found.seconds, found.memory
    return _closed(flop_per_s, memory.total, fits=memory.fits)


def _without_stages(plan: AlpaPlan, layout: IntraLayout) -> dict[str, Any]:
    """Return the rate of an MoE without stages, on a given logical mesh."""
    model: Any = plan.model()
    train_step, args = step_of(model)
    mesh = (layout.batch_axis, layout.other_axis)
    try:
        planned = autopar.plan_step(
            train_step,
            args,
            method=autopar.ShardParallel(num_micro_batches=model.batch_size // layout.sequences),
            cluster=p3(plan.num_devices),
            mesh_shape=tuple(size for size in mesh if size > 1),
        )
    except autopar.InfeasibleError:
        return {"fits": False, "by": "planner"}
    return plan_rate(step_flops(model), planned) | {"by": "planner"}


def _deepspeed(plan: AlpaPlan, gpus: int) -> dict[str, Any]:
    """Return the rate of the fastest degree of expert parallelism with ZeRO-2 and no stages.

    DeepSpeed sends all tokens of a device to experts in one group, by products with masks that are
    as wide as the group; the closed form has no such products, so that their seconds are added.
    """
    hidden, layers, count = plan.sizes
    inner = 8 * hidden
    experts = {"count": count, "top_k": 2, "ffn": inner, "every": 2, "capacity_factor": 1.0}
    sizes = {"layers": layers, "hidden": hidden, "heads": 16, "seq": 1024, "vocab": 32000}
    fields = {"precision": "f16", "ffn": inner, "experts": experts}
    model = Transformer.model_validate(sizes | fields)
    execution = Execution(global_batch=1024, recompute="full", zero=2)
    kept = ("context", "interleave", "recompute", "pipeline")
    machine = _machine(gpus, EAGER)
    found = search_layouts(model, execution, machine, _CONFIDENCE, kept)
    if not found.fitting:
        return _closed(0.0, found.least_bytes, fits=False)
    timed = [
        (layout.prediction.seconds + _mask_seconds(model, layout.execution, machine), layout)
        for layout in found.fitting
    ]
    seconds, best = min(timed, key=lambda one: one[0])
    flops = step_flops(cast(MoE, plan.model()))
    return _closed(flops / seconds, best.prediction.memory.total)


def _mask_seconds(model: Transformer, execution: Execution, machine: Machine) -> float:
    """Return the seconds of a step's products with masks: dispatch and combination of tokens.

    Each is of a group's tokens, twice as many places in experts, and the width of a token; it runs
    forward, recomputed, and twice backward.
    """
    tokens = execution.microbatch * model.seq
    product = machine.gemms.seconds(2 * tokens, model.hidden, tokens)
    layers = model.layers // 2
    return 2 * 4 * product * layers * execution.microbatches


def draw(table: Table) -> Figure:
    """Draw the rates of each model."""
    by_gpus = table.assign(group=table["gpus"])
    figure = family_figure(by_gpus, NAMES, 3.4, order=list(COLUMNS), columns=2)
    for axes in figure.axes:
        axes.set(yscale="log", ylim=(0.05, None))
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
        " PFLOP/s). Alpa's plans have its stages and meshes, and shardings of our planner. Plans"
        " without stages have the logical meshes and microbatches of Alpa's scripts; of MoE's plans"
        " with a GPU per stage these tried several numbers of microbatches, of which ours have one."
        " The other baselines are the fastest layouts of the closed form. Crosses: predicted not to"
        " fit; plusses: out of memory in the paper." + text
    )


def claims(table: Table) -> dict[str, bool]:
    """Return whether the paper's claims hold for our rows."""
    rates = by_series(table)
    gpt = rates[rates.index.str.startswith("gpt")]
    others = gpt.drop(columns=[ALPA, MEGATRON], errors="ignore").max(axis=1)
    near = gpt[ALPA] / gpt[MEGATRON] if MEGATRON in gpt else gpt[ALPA]
    return {
        "alpa_beats_one_level": (gpt[ALPA] >= others)[gpt.index.str.len() > 5].all(),
        "alpa_matches_megatron": near.between(0.85, 1.3).all(),
        "alpa_experts_two_hosts": _over_deepspeed(rates)
        > 0.85 * published_factor("experts_two_hosts"),
    }


def _over_deepspeed(rates: Table) -> float:
    """Return by which factor MoE on two hosts is faster than DeepSpeed's; 0 without the rows."""
    if "moe-16" not in rates.index:
        return 0.0
    moe = rates.loc["moe-16"]
    return float(moe[ALPA] / moe[DEEPSPEED])


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
