"""Alpa's figure 7: its pipelines for GPT and MoE on 4 to 64 V100s, measured and predicted.

    python -m experiments.validation.alpa_figure7 [--only PATTERN] [--output FILE]

The plans are those that Alpa found (`experiments.validation.pipeline_quality`), with their layers,
stages and logical meshes; autopar plans the shardings within stages. A second kind of row has one
GPU per stage ("inter-op only" in the figure) and says whether it fits in memory; where there are
enough GPUs its stages are as small as possible, one block each. Rates count FLOP as the paper does
(`alpa/util.py` in its repository): matrix products and attention, including what is recomputed.
"""

import argparse
import csv
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

import autopar
from experiments.models.gpt import GPT
from experiments.models.moe import MoE
from experiments.validation.pipeline_quality import (
    GLOBAL_BATCH,
    PUBLISHED,
    AlpaPlan,
    p3,
    plan_pipeline,
)
from simulator.validation import records

type Which = Literal["alpa", "inter_only"]

_ANY_SIZE = 1e15
"""A memory budget, in bytes, that any stage fits into."""


@dataclass(frozen=True, slots=True)
class FigureBar:
    """One bar of the figure.

    Attributes:
        model: "gpt" or "moe".
        gpus: number of GPUs.
        plan: "alpa" for Alpa's plan, "inter_only" for one GPU per stage.
        published: PFLOP/s of all GPUs, or "OOM".
        predicted: PFLOP/s; None if the paper does not say the number of microbatches, or the plan
            does not fit.
        predicted_gb: GB that a GPU needs.
        usable_gb: GB of a GPU that a step may use.
    """

    model: str
    gpus: int
    plan: Which
    published: str
    predicted: float | None
    predicted_gb: float
    usable_gb: float

    @property
    def fits(self) -> bool:
        """Whether the plan is predicted to fit in memory."""
        return self.predicted_gb <= self.usable_gb

    @property
    def error(self) -> float | None:
        """Relative error of the predicted rate; None without one."""
        return None if self.predicted is None else self.predicted / float(self.published) - 1

    @property
    def agrees(self) -> bool:
        """Whether the prediction that it fits in memory agrees with the figure."""
        return self.fits == (self.published != "OOM")


def inter_only(published: AlpaPlan) -> AlpaPlan:
    """Return the plan of the same model with one GPU per stage, and at least one block."""
    blocks = published.sizes[1]
    count = min(blocks, published.num_devices)
    stages = ((blocks // count, (1, 1), (1, 1)),) * count
    return AlpaPlan(published.family, published.sizes, GLOBAL_BATCH // 4, blocks, stages)


def step_flops(model: GPT | MoE) -> float:
    """Return the FLOP of a step whose blocks are recomputed.

    Each block counts two forward passes and a backward pass, which has twice the FLOP of a forward
    pass.
    """
    tokens, hidden, seq = (
        model.batch_size * model.sequence_length,
        model.hidden_size,
        model.sequence_length,
    )
    attention = tokens * (8.0 * hidden**2 + 4.0 * seq * hidden)
    head = 6.0 * tokens * hidden * model.vocab_size
    if isinstance(model, GPT):
        return 4 * model.num_layers * (attention + 16.0 * tokens * hidden**2) + head
    dense = 4.0 * model.widening * tokens * hidden**2
    gates = 2.0 * tokens * hidden * model.num_experts
    # Tokens are dispatched to the experts and combined again by products with masks.
    dispatch = 2 * 2.0 * tokens * (2 * model.group_size) * hidden
    return 4 * model.num_layers / 2 * (2 * attention + dense + 2 * dense + gates + dispatch) + head


def compare(published: AlpaPlan, gpus: int, measured: str, which: Which) -> FigureBar:
    """Plan a model with given stages, and compare the prediction with the figure.

    Args:
        published: the model and its stages.
        gpus: number of GPUs in the figure.
        measured: the bar: PFLOP/s, or "OOM".
        which: the kind of row.
    """
    model = published.model()
    assert isinstance(model, GPT | MoE)

    cluster = p3(published.num_devices)
    stages = published.option()
    try:
        plan = plan_pipeline(published, stages)
        fits = True
    except (autopar.NoStagesError, autopar.InfeasibleError):
        plan = plan_pipeline(published, stages, _ANY_SIZE)
        fits = False
    return FigureBar(
        model=published.family,
        gpus=gpus,
        plan=which,
        published=measured,
        predicted=step_flops(model) / plan.predicted_seconds / 1e15
        if fits and which == "alpa"
        else None,
        predicted_gb=plan.predicted_bytes / 1e9,
        usable_gb=cluster.device.usable_bytes / 1e9,
    )


def rows(only: str) -> Iterator[FigureBar]:
    """Compare the bars whose names match a pattern, bars of few GPUs first.

    Rows with one GPU per stage are of MoE; some of them ran out of memory.
    """
    bars = {(row.model.lower(), row.gpus): row for row in records("alpa_fig7_digitised_pflops")}
    for published in sorted(PUBLISHED, key=lambda plan: plan.num_devices):
        gpus = published.num_devices
        bar = bars.get((published.family, gpus))
        if bar is None or not re.search(only, published.name):
            continue
        yield compare(published, gpus, str(bar.alpa), "alpa")
        if published.family == "moe":
            yield compare(inter_only(published), gpus, str(bar.inter_only), "inter_only")


def main() -> None:
    """Write the table, and print it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="a pattern of e.g. gpt-8")
    parser.add_argument("--output", type=Path, default=Path("results/tables/alpa_figure7.csv"))
    args = parser.parse_args()
    with args.output.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*(field.name for field in fields(FigureBar)), "error", "fits"])
        for row in rows(args.only):
            writer.writerow([*asdict(row).values(), row.error, row.fits])
            file.flush()
            print(_text(row), flush=True)


def _text(row: FigureBar) -> str:
    rate = "" if row.error is None else f"{row.predicted:6.3f} PFLOP/s {row.error:+7.1%}"
    memory = f"{row.predicted_gb:5.1f} of {row.usable_gb:.1f} GB{'' if row.fits else ', OOM'}"
    bar = f"{row.model} on {row.gpus:2}, {row.plan:10}: published {row.published:>5}"
    return f"{bar}, predicted {memory} {rate}"


if __name__ == "__main__":
    main()
