"""Alpa's case study: the plan of Wide-ResNet on 16 V100s, as found by Alpa and by our search."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.paper.paper_style import bar_style, legend_above, new_figure
from experiments.paper.study import Table
from experiments.paper.wide_resnet_steps import SMOKE, STAGES, alpa_plans, plan_wide_resnet

ALPA, OURS = "Alpa's stages", "our stages"
BATCH, CHANNELS, BOTH, OTHER = "batch", "output channels", "batch and channels", "other"
KINDS = (BATCH, CHANNELS, BOTH, OTHER)
"""What the devices of a stage divide in the result of a convolution."""


_CONVOLUTION = "/conv_general_dilated"


def rows(part: str, smoke: bool) -> Iterator[dict[str, Any]]:
    """Yield for each stage of both plans its blocks, devices, and how kernels are divided."""
    plan = SMOKE if smoke else alpa_plans()[int(part)]
    for series, stages in ((ALPA, plan.stages), (OURS, STAGES)):
        found = plan_wide_resnet(plan, stages)
        first = 0
        for number, stage in enumerate(found.stages):
            last = stage.layers[-1] + 1 if stage.layers else first
            shares = _divided(stage)
            for kind, share in shares.items():
                yield {
                    "series": series,
                    "stage": number,
                    "first_block": first,
                    "blocks": last - first,
                    "devices": len(stage.devices),
                    "kind": kind,
                    "share": share,
                    "seconds": found.predicted_seconds,
                }
            first = last


def _divided(stage: Any) -> dict[str, float]:
    """Return the share of a stage's convolutions, forward, by what its devices divide."""
    counts: dict[str, int] = dict.fromkeys(KINDS, 0)
    for constraint in stage.constraints:
        is_forward = not constraint.name.startswith("transpose")
        if constraint.side == "out" and is_forward and constraint.name.endswith(_CONVOLUTION):
            batch, _, _, channels = constraint.spec
            kind: dict[tuple[bool, bool], str] = {
                (True, True): BOTH,
                (True, False): BATCH,
                (False, True): CHANNELS,
            }
            counts[kind.get((bool(batch), bool(channels)), OTHER)] += 1
    total = sum(counts.values())
    return {kind: count / total if total else 0.0 for kind, count in counts.items()}


def draw(table: Table) -> Figure:
    """Draw each stage over its blocks, as high as its devices, by what they divide."""
    figure = new_figure(2.2)
    names = list(dict.fromkeys(table["series"]))
    colours = {kind: number for number, kind in enumerate(KINDS)}
    for axes, series in zip(np.atleast_1d(figure.subplots(len(names), 1)), names, strict=True):
        for _, stage in table[table["series"] == series].groupby("stage"):
            bottom = 0.0
            for row in stage.itertuples():
                height = row.share * row.devices
                number = colours[row.kind]
                axes.bar(
                    row.first_block,
                    height,
                    row.blocks,
                    bottom=bottom,
                    align="edge",
                    **bar_style(number) | {"linewidth": 0.6},
                    label=row.kind if height else None,
                )
                bottom += height
        axes.set(ylabel="GPUs", xlabel=f"residual block, {series}")
    legend_above(figure, list(figure.axes), columns=4)
    return figure


def caption(table: Table) -> str:
    """Return the caption."""
    seconds = table.groupby("series")["seconds"].first()
    stages = table.groupby("series")["stage"].nunique()
    first = _shares(table).iloc[0]
    return (
        "Plans of Wide-ResNet on 16 V100s: stages over their blocks, as high as their GPUs, and"
        " what the GPUs of a stage divide in its convolutions, by their number (after Zheng"
        f" et al., figure 12). With Alpa's {stages[ALPA]} stages, {first[BATCH]:.0%} of the first"
        f" one's are divided by the batch. Our search finds {stages[OURS]} stages, whose step is"
        f" predicted to take {seconds[OURS] / seconds[ALPA]:.0%} of the time."
    )


def _shares(table: Table) -> Table:
    """Return the shares of Alpa's stages by what is divided."""
    rows_of = table[table["series"] == ALPA]
    return rows_of.pivot(index="stage", columns="kind", values="share").sort_index()


def claims(table: Table) -> dict[str, bool]:
    """Return whether the paper's claims hold for our rows."""
    batch = _shares(table)[BATCH]
    return {
        "alpa_early_batch": bool(batch.iloc[0] > 0.5),
        "alpa_late_channels": bool(batch.iloc[-1] < batch.iloc[0]),
    }
