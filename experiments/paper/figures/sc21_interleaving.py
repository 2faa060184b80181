"""Narayanan et al., figures 12 and 18: interleaved stages and scattered sends."""

from collections.abc import Iterator
from typing import Any

from matplotlib.figure import Figure

from experiments.paper.megatron_steps import GPT, step, throughput
from experiments.paper.paper_style import draw_lines, new_figure
from experiments.paper.study import Table

GPUS, TENSOR, PIPELINE = 96, 8, 12


def rows(part: str, smoke: bool) -> Iterator[dict[str, Any]]:
    """Yield a row for each number of stages per device, each batch, and both kinds of sends."""
    del part
    for stages in (1, 4) if smoke else (1, 2, 4, 8):
        for batch in (12, 60) if smoke else (12, 24, 36, 48, 60):
            for scattered in (True, False):
                prediction = step(
                    GPT,
                    GPUS,
                    tensor=TENSOR,
                    pipeline=PIPELINE,
                    global_batch=batch,
                    interleave=stages,
                    scatter_sends=scattered,
                )
                series = f"{stages} {'stage' if stages == 1 else 'stages'}"
                row = {"series": series, "stages": stages, "batch": batch, "scattered": scattered}
                yield row | throughput(prediction)


def draw(table: Table) -> Figure:
    """Draw throughput over the batch, and what scattered sends gain."""
    figure = new_figure(3.0)
    rates, gains = figure.subplots(2, 1)
    scattered = table["scattered"].astype(str) == "True"
    draw_lines(rates, table[scattered], "batch", "ours")
    rates.set(ylim=(0, None), xlabel="batch (sequences)", ylabel="TFLOP/s per GPU")
    rates.legend(ncols=2)
    gained = _scattered(table).mul(100).stack().rename("gain").reset_index()
    names = table.set_index("stages")["series"].to_dict()
    named = gained.assign(series=gained["stages"].map(names))
    draw_lines(gains, named.sort_values(["stages", "batch"]), "batch", "gain")
    gains.set(ylim=(0, None), xlabel="batch (sequences)", ylabel="gain of scatter (%)")
    return figure


def caption(table: Table) -> str:
    """Return the caption."""
    gain = _gain(table)
    return (
        f"GPT-3 on {GPUS} A100s (tensor {TENSOR}, pipeline {PIPELINE}) by stages per device, with"
        " sent activations scattered over the tensor group (above), and what that gains over whole"
        " ones (below); Narayanan et al., figures 12 and 18, whose claims in words are checked. The"
        " number of stages is not given there. The best one gains"
        f" {gain.iloc[0]:.1%} over one stage at the smallest batch and {gain.iloc[-1]:.1%} at the"
        " largest; scattered sends gain"
        f" {_scattered(table).max().max():.1%} at most."
    )


def _rates(table: Table, scattered: bool) -> Table:
    """Return throughput by batch (rows) and stages of a device (columns)."""
    shown = table[table["scattered"].astype(str) == str(scattered)]
    return shown.pivot(index="batch", columns="stages", values="ours").sort_index()


def _gain(table: Table) -> Table:
    """Return what the best interleaving gains over one stage, by batch."""
    rates = _rates(table, scattered=True)
    return rates.drop(columns=1).max(axis=1) / rates[1] - 1


def _scattered(table: Table) -> Table:
    """Return what scattered sends gain, by batch and stages."""
    return _rates(table, scattered=True) / _rates(table, scattered=False) - 1


def claims(table: Table) -> dict[str, bool]:
    """Return whether the paper's claims hold for our rows."""
    gain = _gain(table)
    return {
        "sc21_interleaving_gains": (gain > 0).all() and gain.max() > 0.1,
        "sc21_gap_closes": gain.is_monotonic_decreasing,
        "sc21_scatter": 0.05 < _scattered(table).max().max() < 0.15,
    }
