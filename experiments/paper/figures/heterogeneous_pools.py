"""Clusters whose hosts differ: the pools alone, equal stages over both, and searched stages."""

from collections.abc import Iterator
from typing import Any

from matplotlib.figure import Figure

import autopar
from experiments.models.model_sizes import gpt
from experiments.paper.figure_rows import DoesNotFit, by_series
from experiments.paper.paper_style import bar_figure
from experiments.paper.study import Table
from experiments.validation.pipeline_quality import step_of
from simulator import load_cluster

CLUSTERS = {"p3_beside_p4d": "8 V100 + 8 A100", "a2_uneven": "8 A100 + 4 A100"}
EQUAL, SEARCHED = "equal layers on both", "searched on both"
FIRST, SECOND = "first pool alone", "second pool alone"

LAYERS, MICRO_BATCHES, BATCH = 12, 16, 96


def rows(part: str, smoke: bool) -> Iterator[dict[str, Any]]:
    """Yield the step time on each pool alone, and on both with each kind of stages."""
    cluster = load_cluster(part)
    layers = 2 if smoke else LAYERS
    searched = autopar.AutoStageOption(submesh_logical_shape_space="same_as_physical")
    pools: list[tuple[str, Any, Any]] = [
        (series, pool, searched)
        for series, pool in zip((FIRST, SECOND), cluster.pools, strict=True)
    ]
    equal = autopar.ManualStageOption(
        [list(range(layers // 2)), list(range(layers // 2, layers))],
        [(1, pool.num_devices) for pool in cluster.pools],
        [(pool.num_devices,) for pool in cluster.pools],
    )
    for series, where, stages in [*pools, (EQUAL, cluster, equal), (SEARCHED, cluster, searched)]:
        row = {"group": CLUSTERS[part], "series": series, "gpus": where.num_devices}
        try:
            plan = _plan(where, stages, layers, smoke)
        except DoesNotFit:
            yield {**row, "fits": False}
            continue
        yield {
            **row,
            "fits": True,
            "seconds": plan.predicted_seconds,
            "sequences_per_s": BATCH / plan.predicted_seconds,
            "memory_gb": plan.predicted_bytes / 1e9,
            "stages": len(plan.stages),
        }


def _plan(cluster: Any, stages: Any, layers: int, smoke: bool) -> autopar.Plan:
    """Return the plan of a GPT of 1.3 billion parameters, or a tiny one."""
    train_step, args = step_of(gpt(64, 2, 2, BATCH) if smoke else gpt(2048, 24, 32, BATCH))
    method = autopar.PipeshardParallel(
        num_micro_batches=1 if smoke else MICRO_BATCHES,
        layer_option=autopar.AutoLayerOption(layers, eps=1.0),
        stage_option=stages,
    )
    return autopar.plan_step(train_step, args, method=method, cluster=cluster)


def draw(table: Table) -> Figure:
    """Draw the sequences per second of each cluster."""
    return bar_figure(table, 1.9, 2, value="sequences_per_s", ylabel="sequences/s")


def caption(table: Table) -> str:
    """Return the caption."""
    rates = by_series(table, "sequences_per_s")
    gains = (rates[SEARCHED] / rates[EQUAL] - 1).dropna()
    alone = (rates[SEARCHED] / rates[[FIRST, SECOND]].max(axis=1) - 1).dropna()
    text = "; ".join(
        f"{gains.get(group, float('nan')):.0%} over equal layers and {gain:.0%} over the faster"
        f" pool alone on {group}"
        for group, gain in alone.items()
    )
    return (
        f"GPT of 1.3 billion parameters, {BATCH} sequences a step, on clusters of two unlike hosts:"
        " each host alone, two stages with as many layers each, and the stages that the search"
        f" finds. The search gains {text}. No document has numbers of these clusters."
    )
