"""Alpa (OSDI'22): figure 7, digitised, of GPT on 4 to 64 V100."""

from collections.abc import Iterator
from pathlib import Path

from simulator.transformer import JITTED, Execution, Transformer, predict
from simulator.validation.cases import Case, PublishedSet, Unpredicted
from simulator.validation.sets.published_rows import PUBLISHED, machine, records

_PLANS = {
    4: (24, 2048, 32, 1, 2, 2, 128),
    8: (32, 2560, 32, 1, 4, 2, 128),
    16: (32, 4096, 32, 4, 2, 2, 64),
    32: (48, 5120, 40, 4, 4, 2, 128),
    64: (48, 8192, 64, 4, 16, 1, 1024),
}
"""Layers, hidden size, heads, degrees of tensor, pipeline and data parallelism, and number of
microbatches, by number of devices."""


def alpa_figure7(folder: Path = PUBLISHED) -> Iterator[Case | Unpredicted]:
    """Yield the throughput of the plans that Alpa found for GPT, in PFLOP/s of hardware FLOP."""
    for row in records("alpa_fig7_digitised_pflops", folder=folder):
        if row.model != "GPT":
            continue
        if row.gpus not in _PLANS:
            yield Unpredicted(f"GPT on {row.gpus}", "as Alpa's plan is not known")
            continue
        layers, hidden, heads, tensor, pipeline, data, microbatches = _PLANS[row.gpus]
        model = Transformer(
            layers=layers, hidden=hidden, heads=heads, seq=1024, vocab=51200, precision="f16"
        )
        execution = Execution(
            tensor=tensor,
            pipeline=pipeline,
            data=data,
            microbatch=1024 // (microbatches * data),
            global_batch=1024,
            recompute="full",
            zero=2,
            scatter_sends=True,  # its cross-mesh resharding sends parts, which the receivers gather
        )
        prediction = predict(model, execution, machine("p3.16xlarge", row.gpus, JITTED, nics=1))
        slowest, usual, fastest = (
            prediction.hardware_flops / seconds / 1e15
            for seconds in (prediction.quantile(0.9), prediction.seconds, prediction.quantile(0.1))
        )
        yield Case(f"GPT on {row.gpus}", float(row.alpa), usual, interval=(slowest, fastest))


ALPA_FIGURE_7 = PublishedSet(
    name="alpa-figure7",
    title="Alpa, figure 7, GPT",
    unit="PFLOP/s",
    source="OSDI'22, V100-16, digitised",
    cases=alpa_figure7,
    note=(
        "its plans, unequal stages taken as equal ones; no GEMM was measured on V100. As "
        "programs, unequal stages and MoE too: results/paper/alpa_weak_scaling.csv"
    ),
    files=("alpa_fig7_digitised_pflops",),
)
