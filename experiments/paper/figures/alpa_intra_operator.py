"""Alpa's figure 8: shardings of models that grow with the number of GPUs of one host."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from matplotlib.figure import Figure

import autopar
from experiments.models import GPT, Model, MoE, WideResNet
from experiments.models.model_sizes import wide_resnet
from experiments.paper.figure_rows import plan_rate
from experiments.paper.paper_style import family_figure
from experiments.paper.study import Table
from experiments.paper.wide_resnet_steps import convolution_flops
from experiments.validation.pipeline_quality import step_flops
from simulator import Cluster

HEURISTIC, PROGRAM = "heuristic", "integer program"
METHODS: dict[str, autopar.PlanningMethod] = {
    "data": autopar.DataParallel(),
    "ZeRO-2": autopar.Zero2Parallel(),
    "ZeRO-3": autopar.Zero3Parallel(),
    HEURISTIC: autopar.ShardParallel(options=autopar.ShardingOptions(mode="heuristic")),
    PROGRAM: autopar.ShardParallel(),
}
"""The series and their methods; each but the last shards over one mesh axis."""

MESHES = {1: ((1,),), 2: ((2,),), 4: ((4,), (2, 2)), 8: ((8,), (2, 4), (4, 2))}
"""Logical meshes of the integer program, as in exp_intra_ablation.py of Alpa's repository."""

GPT_SIZES = {1: (2048, 16), 2: (3072, 24), 4: (4096, 32), 8: (5760, 40)}
"""Width and heads by number of GPUs, from the same file, as are the sizes below."""

MOE_SIZES = {1: (1024, 32, 8), 2: (1280, 40, 16), 4: (1536, 24, 16), 8: (1536, 24, 32)}
"""Width, heads and experts."""

CHANNELS = {1: 160, 2: 224, 4: 320, 8: 448}

NAMES = {"gpt": "GPT", "moe": "MoE", "wide_resnet": "Wide-ResNet"}


def rows(part: str, smoke: bool) -> Iterator[dict[str, Any]]:
    """Yield the rate of each method for each number of GPUs; a part is a family of models."""
    for gpus in (2,) if smoke else MESHES:
        model = _smaller(_model(part, gpus)) if smoke else _model(part, gpus)
        flops = convolution_flops(model) if isinstance(model, WideResNet) else step_flops(model)
        args = model.abstract_args()  # once, so that traces are shared
        for series, method in METHODS.items():
            meshes = MESHES[gpus] if series == PROGRAM else MESHES[gpus][:1]
            plans = [plan for mesh in meshes if (plan := _plan(model, args, method, gpus, mesh))]
            row = {"family": part, "group": gpus, "series": series, "unit": "PFLOP/s"}
            if not plans:
                yield {**row, "fits": False}
                continue
            yield row | plan_rate(flops, min(plans, key=lambda plan: plan.predicted_seconds))


def _model(family: str, gpus: int) -> GPT | MoE | WideResNet:
    if family == "gpt":
        width, heads = GPT_SIZES[gpus]
        return GPT(8, width, heads, 1024, 25600, 8, "float16", remat=True)
    if family == "moe":
        width, heads, experts = MOE_SIZES[gpus]
        return MoE(8, width, heads, experts, 1024, 1024, 51200, 8, 8, "float16", remat=True)
    return wide_resnet(50, CHANNELS[gpus], 2, batch_size=32)


def _smaller(model: GPT | MoE | WideResNet) -> GPT | MoE | WideResNet:
    if isinstance(model, WideResNet):
        return replace(model, num_layers=8, channels=8, image_size=32)
    return replace(model, num_layers=2, hidden_size=128, num_heads=8, vocab_size=512)


def _plan(
    model: Model, args: Any, method: autopar.PlanningMethod, gpus: int, mesh: tuple[int, ...]
) -> autopar.Plan | None:
    """Return the plan on GPUs of a host; None if none fits in memory."""
    try:
        return autopar.plan_step(
            model.train_step,
            args,
            method=method,
            cluster=Cluster.load("p3.16xlarge").first_devices(gpus),
            mesh_shape=mesh,
        )
    except autopar.InfeasibleError:
        return None


def draw(table: Table) -> Figure:
    """Draw the rates of each family by number of GPUs."""
    return family_figure(table, NAMES, 3.8, order=list(METHODS))


def caption(table: Table) -> str:
    """Return the caption."""
    rates = _rates(table)
    others = rates.drop(columns=PROGRAM).max(axis=1)
    gain = (rates[PROGRAM] / others).max() - 1
    slow = (rates[PROGRAM] / rates[HEURISTIC]).max()
    return (
        "Shardings of models that grow with the number of V100s in a host, one microbatch (after"
        " Zheng et al., figure 8, with the sizes of Alpa's repository; the bars were not digitised,"
        " so that claims in words are checked). Crosses: no plan of the method fits in memory. The"
        f" integer program is up to {gain:.0%} faster than the best of the others that fits, and up"
        f" to {slow:.1f} times as fast as the heuristic."
    )


def _rates(table: Table) -> Table:
    return table.pivot(index=["family", "group"], columns="series", values="ours")


def claims(table: Table) -> dict[str, bool]:
    """Return whether the paper's claims hold for our rows."""
    rates = _rates(table)
    fits = table.assign(fits=table["fits"].astype(str) == "True")
    count = fits.groupby("series")["fits"].sum()
    ends = [int(count[name]) for name in ("data", "ZeRO-2", "ZeRO-3")]
    several = rates[rates.index.get_level_values("group") > 1]
    return {
        "alpa_program_is_best": bool((rates[PROGRAM] >= 0.999 * rates.max(axis=1)).all()),
        "alpa_data_runs_out": ends == sorted(ends) and ends[0] < ends[-1],
        "alpa_heuristic_slow": bool((several[HEURISTIC] < several[PROGRAM]).all()),
    }
