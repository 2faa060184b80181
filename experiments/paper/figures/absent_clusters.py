"""What if: slower and faster NICs, other GPUs, and up to 100,000 of them."""

from collections.abc import Iterator
from typing import Any

from matplotlib.figure import Figure

from experiments.paper.paper_style import draw_lines, new_figure
from experiments.paper.study import Table
from simulator import Cluster
from simulator.transformer import Execution, Machine, Transformer, search_layouts

GPT = Transformer(
    layers=96,
    hidden=12288,
    heads=96,
    seq=4096,
    vocab=131072,
    attention="flash2",
    dropout=False,
)
"""GPT-3 with sequences of 4096 tokens."""

CLUSTERS = {"A100": "dgx_a100_80", "H100": "dgx_h100", "B200": "dgx_b200", "GB200": "gb200_nvl72"}
PANELS = ("NIC", "GPUs, weak", "GPUs, strong")
NIC_FACTORS = (0.0625, 0.125, 0.25, 0.5, 1.0, 2.0)
STRONG_BATCH = 4096


def rows(part: str, smoke: bool) -> Iterator[dict[str, Any]]:
    """Yield the fastest layout of each cluster."""
    cluster = Cluster.load(CLUSTERS[part])
    thousand = cluster.with_size(1024 // cluster.devices_per_host)
    link = cluster.inter_host
    assert link is not None
    for factor in (0.125, 1.0) if smoke else NIC_FACTORS:
        faster = {"bandwidth_gb_per_s": link.bandwidth_gb_per_s * factor}
        changed = thousand.model_copy(update={"inter_host": link.model_copy(update=faster)})
        row = _best(changed, part, changed.num_devices)
        per_host = faster["bandwidth_gb_per_s"] * cluster.nics_per_host
        yield {"panel": PANELS[0], "x": 8 * per_host / cluster.devices_per_host, **row}
    for count in (1024, 98304) if smoke else (256, 1024, 4096, 16384, 98304):
        scaled = cluster.with_size(max(1, round(count / cluster.devices_per_host)))
        weak = _best(scaled, part, scaled.num_devices)
        yield {"panel": PANELS[1], "x": scaled.num_devices, **weak}
        if STRONG_BATCH % cluster.devices_per_host == 0:  # otherwise no data axis divides the batch
            strong = _best(scaled, part, STRONG_BATCH)
            yield {"panel": PANELS[2], "x": scaled.num_devices, **strong}


def _best(cluster: Cluster, series: str, batch: int) -> dict[str, Any]:
    """Return the columns of the fastest layout that fits."""
    execution = Execution(
        global_batch=batch,
        zero=1,
        overlap_gradients=True,
        overlap_sends=True,
        overlap_tensor="all",
    )
    best = search_layouts(GPT, execution, Machine(cluster), kept=("context",)).fitting[0]
    return {
        "series": series,
        "gpus": cluster.num_devices,
        "batch": batch,
        "seconds": best.prediction.seconds,
        "mfu": best.prediction.mfu,
        "exposed": sum(best.prediction.exposed.values()) / best.prediction.seconds,
        "tensor": best.execution.tensor,
        "pipeline": best.execution.pipeline,
        "data": best.execution.data,
        "microbatch": best.execution.microbatch,
        "recompute": best.execution.recompute,
    }


def draw(table: Table) -> Figure:
    """Draw model FLOP utilization over bandwidth, and over the number of GPUs."""
    figure = new_figure(3.9)
    labels = (
        "NIC bandwidth per GPU (Gb/s)",
        "GPUs, a sequence for each",
        f"GPUs, {STRONG_BATCH} sequences",
    )
    for axes, panel, label in zip(figure.subplots(3, 1), PANELS, labels, strict=True):
        shown = table[table["panel"] == panel]
        draw_lines(axes, shown.assign(mfu=100 * shown["mfu"]), "x", "mfu")
        axes.set_xscale("log", base=2 if panel == PANELS[0] else 10)
        axes.set(xlabel=label, ylim=(0, None))
    figure.supylabel("model FLOP utilization (%)", fontsize=7)
    figure.axes[0].legend(ncols=4, loc="lower right")
    return figure


def caption(table: Table) -> str:
    """Return the caption."""
    weak = table[(table["panel"] == PANELS[1]) & (table["series"] == "H100")].sort_values("x")
    nic = table[(table["panel"] == PANELS[0]) & (table["series"] == "H100")].sort_values("x")
    return (
        "Model FLOP utilization of the fastest layout of GPT-3 (sequences of 4096 tokens) by the"
        " bandwidth of NICs on about 1024 GPUs, and by the number of GPUs with a batch that grows"
        f" with them or stays. H100: {nic['mfu'].iloc[0]:.0%} at {nic['x'].iloc[0]:.0f} Gb/s per"
        f" GPU, {nic['mfu'].iloc[-1]:.0%} at {nic['x'].iloc[-1]:.0f}; {weak['mfu'].iloc[0]:.0%} on"
        f" {weak['x'].iloc[0]:.0f} GPUs, {weak['mfu'].iloc[-1]:.0%} on {weak['x'].iloc[-1]:.0f}."
        " The fabric is assumed to have full bandwidth at every size, and nothing fails."
    )
