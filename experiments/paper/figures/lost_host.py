"""Chaos: what a lost host costs, predicted by cluster size, and measured on this machine."""

import time
from collections.abc import Iterator
from typing import Any

from matplotlib.figure import Figure

from experiments.paper.megatron_steps import machine, sized
from experiments.paper.paper_style import draw_lines, new_figure
from experiments.paper.study import Table
from simulator.transformer import Execution, search_layouts

PREDICTED, IDEAL, MEASURED = "predicted", "GPUs alone", "measured"

HOSTS = (2, 4, 8, 16)
BATCH = 13440
"""Sequences of a step: every number of GPUs of `HOSTS`, or of one host less, divides it."""

MODEL = sized(layers=48, hidden=4096, heads=32)
"""10 billion parameters."""

STEPS, SAVE_EVERY = 40, 10


def rows(part: str, smoke: bool) -> Iterator[dict[str, Any]]:
    """Yield the slowdown after the loss of a host, or what a killed host cost a training here."""
    if part == "measured":
        yield _measured(smoke)
        return
    for hosts in HOSTS[: 2 if smoke else None]:
        before, after = (_fastest(count) for count in (hosts, hosts - 1))
        yield {
            "series": PREDICTED,
            "hosts": hosts,
            "slowdown": after["seconds"] / before["seconds"],
            "planning_s": after["planning_s"],
            "layout": after["layout"],
        }
        yield {"series": IDEAL, "hosts": hosts, "slowdown": hosts / (hosts - 1)}


def _fastest(hosts: int) -> dict[str, Any]:
    """Return the seconds of the fastest layout on hosts with 8 A100s, and of its search."""
    start = time.perf_counter()
    execution = Execution(global_batch=BATCH, scatter_sends=True, zero=1)
    best = search_layouts(MODEL, execution, machine(8 * hosts), kept=("context",)).fitting[0]
    chosen = best.execution
    return {
        "seconds": best.prediction.seconds,
        "planning_s": time.perf_counter() - start,
        "layout": f"t{chosen.tensor} p{chosen.pipeline} d{chosen.data}",
    }


def _measured(smoke: bool) -> dict[str, Any]:
    """Return what the loss of one of two hosts cost a training; hosts are raylets here."""
    from experiments.chaos import Victim, survived  # starts Ray, which only this part needs

    steps, every = (8, 4) if smoke else (STEPS, SAVE_EVERY)
    result = survived(
        steps, kills=1, save_every=every, hosts=2, devices=2, victim=Victim.HOST, seed=0
    )
    return {
        "series": MEASURED,
        "hosts": 2,
        "steps": steps,
        "save_every": every,
        "steps_again": result.steps_again,
        "lost_s": result.seconds - result.undisturbed_seconds,
        "undisturbed_s": result.undisturbed_seconds,
        "largest_difference": result.largest_difference,
        "kills": result.kills,
    }


def draw(table: Table) -> Figure:
    """Draw the slowdown by the number of hosts before the loss."""
    figure = new_figure(1.8)
    axes = figure.subplots()
    draw_lines(axes, table[table["series"] != MEASURED], "hosts", "slowdown")
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(HOSTS), list(map(str, HOSTS)))
    axes.set(xlabel="hosts before the loss", ylabel="step time after / before")
    axes.legend()
    return figure


def caption(table: Table) -> str:
    """Return the caption."""
    predicted = table[table["series"] == PREDICTED].sort_values("hosts")
    text = ""
    if len(predicted):
        last = predicted.iloc[-1]
        text = (
            "Step time after the loss of a host with 8 A100s, over that before it, with the fastest"
            " layouts of a GPT of 10 billion parameters, and that of as many GPUs less alone. With"
            f" {last['hosts']:.0f} hosts a step takes {last['slowdown']:.2f} times as long; to find"
            f" the new layout takes {predicted['planning_s'].max():.1f} s at most."
        )
    measured = table[table["series"] == MEASURED]
    if len(measured):
        row = measured.iloc[0]
        text += (
            f" Measured with two raylets as hosts on a machine: {row['steps']:.0f} steps of a tiny"
            f" GPT, with a checkpoint each {row['save_every']:.0f}, while one host is killed, take"
            f" {row['lost_s']:.0f} s more than undisturbed ({row['undisturbed_s']:.0f} s), and"
            f" {row['steps_again']:.0f} steps run again; parameters differ by"
            f" {row['largest_difference']:.0e} at most."
        )
    return text.strip()
