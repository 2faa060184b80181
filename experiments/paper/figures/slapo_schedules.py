"""Slapo's schedules: a GPT by kernels, checkpointing and tensor parallelism."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from jax.sharding import AbstractMesh
from matplotlib.figure import Figure

import autopar
from autopar import model_schedules
from autopar.model_schedules import Knobs
from experiments.gpt_directives import NAMES, schedule_gpt, scheduled_step
from experiments.models import GPT
from experiments.models.model_sizes import gpt
from experiments.paper.figure_rows import by_series
from experiments.paper.paper_style import bar_figure
from experiments.paper.study import Table
from experiments.planned_strategies import MESH_AXES
from simulator import Cluster, simulate

PLAIN = "plain"
KNOBS = {
    PLAIN: Knobs(),
    "kernels": Knobs(flash_attention=True),
    "kernels, checkpoints": Knobs(flash_attention=True, checkpoint_ratio=1.0),
}
"""Schedules of one GPU, and of several with data parallelism."""

TENSOR = {
    "tensor": Knobs(vocabulary_parallel=True),
    "tensor, kernels": Knobs(vocabulary_parallel=True, flash_attention=True),
}
"""Schedules that divide layers over all GPUs of the host."""

SEQUENCES, LAYERS = 4, 4
"""Sequences of a GPU, and layers of the GPT, whose blocks repeat."""


def rows(part: str, smoke: bool) -> Iterator[dict[str, Any]]:
    """Yield the predicted rate of each schedule on a number of GPUs."""
    gpus = int(part)
    model = replace(gpt(1024, LAYERS, 16, SEQUENCES * gpus), remat=False)
    if smoke:
        gpus = min(gpus, 2)
        model = GPT(1, 32, 4, 16, 64, 8)
    schedules = [(name, knobs, (gpus, 1)) for name, knobs in KNOBS.items()]
    schedules += [(name, knobs, (1, gpus)) for name, knobs in TENSOR.items() if gpus > 1]
    for series, knobs, shape in schedules[:2] if smoke else schedules:
        yield {
            "group": f"{part} GPU{'s' if gpus > 1 else ''}",
            "series": series,
            "directives": _directives(model, shape, knobs),
            **_predicted(model, shape, knobs),
        }


def _mesh(shape: Sequence[int]) -> Any:
    return AbstractMesh(tuple(shape), MESH_AXES[: len(shape)])


def _cluster(gpus: int) -> Cluster:
    return Cluster.load("p3.16xlarge").first_devices(gpus)


def _predicted(model: GPT, shape: tuple[int, int], knobs: Knobs) -> dict[str, Any]:
    """Return the rate and the memory of a schedule, compiled for V100s."""
    step, args, method = scheduled_step(model, _mesh, shape, knobs, 1)
    cluster = _cluster(shape[0] * shape[1])
    plan = autopar.plan_step(step, args, method=method, cluster=cluster)
    program = autopar.compile_step(step, args, plan, cluster, donate_argnums=(0,))
    seconds = simulate(program, cluster).makespan
    memory = program.memory[0].total
    fits = memory <= cluster.device.usable_bytes
    rate = model.batch_size / seconds
    return {
        "sequences_per_s": rate if fits else None,
        "memory_gb": memory / 1e9,
        "fits": fits,
    }


def _directives(model: GPT, shape: tuple[int, int], knobs: Knobs) -> int:
    """Return the number of directives of a schedule, without those over a single device."""

    def count(chosen: Knobs) -> int:
        schedule = schedule_gpt(model, _mesh(shape))
        model_schedules.schedule_gpt(schedule, replace(chosen, batch_axis="x"), NAMES)
        return len(schedule.schedule.directives)

    return count(knobs) - (count(Knobs()) if shape[1] == 1 else 0)


def draw(table: Table) -> Figure:
    """Draw the rate of each schedule."""
    labels = {"yscale": "log", "ylabel": "sequences/s"}
    return bar_figure(table, 2.1, 3, value="sequences_per_s", **labels)


def caption(table: Table) -> str:
    """Return the caption."""
    most = table.loc[table["directives"].idxmax()]
    return (
        f"Blocks of a GPT of 350M parameters ({LAYERS} of them) under directives, compiled for"
        f" V100s and simulated, {SEQUENCES} sequences a GPU (after Chen et al., Slapo, whose"
        " measurements could not be had; claims in words are checked). The schedule with the most"
        f" directives, {most['series']!r}, has {most['directives']:.0f}."
    )


def claims(table: Table) -> dict[str, bool]:
    """Return whether Slapo's claims hold for our rows."""
    rates = by_series(table, "sequences_per_s")
    one = rates.loc["1 GPU"] if "1 GPU" in rates.index else None
    return {"slapo_kernels": one is not None and bool(one["kernels"] > one[PLAIN])}
