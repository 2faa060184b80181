"""Alpa's figure 7: Wide-ResNet on 1 to 64 V100s by its plans and by baselines."""

from collections.abc import Callable, Iterator
from typing import Any

from matplotlib.figure import Figure

import autopar
from experiments.paper.figure_rows import by_series, plan_rows
from experiments.paper.paper_style import bar_figure
from experiments.paper.published_values import published_factor
from experiments.paper.study import Table
from experiments.paper.wide_resnet_steps import (
    DATA_STAGES,
    SMOKE,
    WideResNetPlan,
    alpa_plans,
    convolution_flops,
    plan_wide_resnet,
)
from experiments.validation.pipeline_quality import p3, step_of

ALPA, INTRA = "Alpa's plans", "intra-operator only"
INTER, PP_DP = "inter-operator only", "pipeline and data (PP-DP)"

EFFICIENCY_GPUS = 32
"""GPUs of the four hosts for which the paper gives the efficiency."""

NEAR = 0.15
"""How near an efficiency has to be to count as the published one."""


def rows(part: str, smoke: bool) -> Iterator[dict[str, Any]]:
    """Return the rate of each system on one number of GPUs."""
    plan = SMOKE if smoke else alpa_plans()[int(part)]
    planned: dict[str, Callable[[], autopar.Plan]] = {
        ALPA: lambda: plan_wide_resnet(plan, plan.stages),
        INTRA: lambda: _without_stages(plan),
    }
    if plan.gpus > 1:
        planned[INTER] = lambda: _one_gpu_stages(plan)
        planned[PP_DP] = lambda: plan_wide_resnet(plan, DATA_STAGES, data_parallel=True)
    return plan_rows(planned, convolution_flops(plan.model), group=int(part))


def _without_stages(plan: WideResNetPlan) -> autopar.Plan:
    """Return the plan on one mesh, with Alpa's logical mesh and microbatches."""
    train_step, args = step_of(plan.model)
    method = autopar.ShardParallel(
        num_micro_batches=plan.model.batch_size // plan.intra_images, batch_statistics="microbatch"
    )
    return autopar.plan_step(
        train_step,
        args,
        method=method,
        cluster=p3(plan.gpus),
        mesh_shape=plan.intra_mesh,
    )


def _one_gpu_stages(plan: WideResNetPlan) -> autopar.Plan:
    """Return the plan with one GPU per stage; there are more layers than blocks where needed."""
    layers = max(plan.gpus, sum(plan.blocks))
    stages = autopar.UniformStageOption(plan.gpus, (1, 1))
    return plan_wide_resnet(plan, stages, layers=layers)


def draw(table: Table) -> Figure:
    """Draw the rates by number of GPUs."""
    shown = table.sort_values("group", kind="stable")
    return bar_figure(shown, 2.1, 2, yscale="log", ylabel="PFLOP/s", xlabel="GPUs")


def _efficiency(table: Table) -> float | None:
    """Return the rate of a GPU of four hosts, relative to that of a single GPU."""
    rates = by_series(table)[ALPA]
    if not {1, EFFICIENCY_GPUS} <= set(rates.index):
        return None
    return float(rates[EFFICIENCY_GPUS] / (EFFICIENCY_GPUS * rates[1]))


def _runs_out(table: Table, series: str) -> bool:
    """Return whether a system runs out of memory at some size, and at all larger ones."""
    fits = table[table["series"] == series].sort_values("group")["fits"].astype(str) == "True"
    return not fits.iloc[-1] and fits.is_monotonic_decreasing


def caption(table: Table) -> str:
    """Return the caption."""
    efficiency = _efficiency(table)
    text = ""
    if efficiency is not None:
        published = published_factor("efficiency_four_hosts")
        text = (
            f" Alpa's plans are {efficiency:.0%} efficient on 4 hosts (published: {published:.0%})."
        )
    return (
        "Wide-ResNet in float32 on V100s (Zheng et al., figure 7, whose bars are not among the"
        " digitised ones, so that its claims in words are checked). The stages are Alpa's, and the"
        " shardings of our planner; the plans without stages have Alpa's logical meshes and"
        " microbatches. Rates count convolutions,"
        " without recomputation. Crosses: predicted not to fit." + text
    )


def claims(table: Table) -> dict[str, bool]:
    """Return whether the paper's claims hold for our rows."""
    rates, efficiency = by_series(table), _efficiency(table)
    several = rates[rates.index > 8]
    return {
        "alpa_wide_resnet_efficient": efficiency is not None
        and abs(efficiency / published_factor("efficiency_four_hosts") - 1) < NEAR,
        "alpa_wide_resnet_out_of_memory": {INTER, PP_DP} <= set(table["series"])
        and _runs_out(table, INTER)
        and _runs_out(table, PP_DP),
        "alpa_wide_resnet_network": bool((several[ALPA] > several[INTRA]).all()),
    }
