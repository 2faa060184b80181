"""The same plans predicted by the planner's model, by the compiled program, and run here."""

from collections.abc import Iterator
from typing import Any, Literal

import jax
from matplotlib.figure import Figure

import autopar
from experiments.local_steps import initial_args, largest_difference, use_devices_like
from experiments.models import Model
from experiments.models.model_sizes import SMALL
from experiments.paper.figure_rows import by_series
from experiments.paper.paper_style import draw_bars, legend_above, new_figure
from experiments.paper.study import Table
from experiments.validation.fidelity import MODELS
from simulator import Cluster, simulate

ANALYTIC, COMPILED = "planner's model", "compiled program"
FIDELITIES: dict[str, Literal["analytic", "compiled"]] = {
    ANALYTIC: "analytic",
    COMPILED: "compiled",
}
DEVICES = 8


def rows(part: str, smoke: bool) -> Iterator[dict[str, Any]]:
    """Yield step time and memory by both predictions, and how far a run here differs.

    The run is of a small model of the same kind on virtual devices, compared with one device.
    """
    use_devices_like(Cluster.load("cpu-virtual"), DEVICES)
    model = SMALL[part] if smoke else MODELS[part]
    cluster = Cluster.load("dgx_a100_80")
    args = model.abstract_args()
    plan = autopar.plan_step(
        model.train_step,
        args,
        method=autopar.ShardParallel(),
        cluster=cluster,
        mesh_shape=(DEVICES,),
    )
    difference = _difference(SMALL[part])
    for series, fidelity in FIDELITIES.items():
        program = autopar.compile_step(
            model.train_step, args, plan, cluster, fidelity=fidelity, donate_argnums=(0,)
        )
        yield {
            "group": part,
            "series": series,
            "milliseconds": 1e3 * simulate(program, cluster).makespan,
            "memory_gb": program.memory[0].total / 1e9,
            "run_difference": difference,
        }


def _difference(model: Model) -> float:
    """Return the largest difference of a planned step from one device, of parameters and loss."""
    args = initial_args(model)
    step = autopar.parallelize(
        model.train_step, method=autopar.ShardParallel(devices=DEVICES), donate_argnums=()
    )
    return largest_difference(step(*args), jax.jit(model.train_step)(*args))


def draw(table: Table) -> Figure:
    """Draw step times and memory of each model."""
    figure = new_figure(2.8)
    names = {"milliseconds": "ms of a step", "memory_gb": "GB of a GPU"}
    plots = list(figure.subplots(2, 1))
    for axes, (column, label) in zip(plots, names.items(), strict=True):
        draw_bars(axes, table.replace({"group": {"wide_resnet": "resnet"}}), value=column)
        axes.set(yscale="log", ylabel=label)
    legend_above(figure, plots, columns=2)
    return figure


def caption(table: Table) -> str:
    """Return the caption."""
    ratios = _ratios(table, "milliseconds")
    memory = _ratios(table, "memory_gb")
    return (
        f"Step time and memory of the same plans for {DEVICES} A100s by the planner's model and by"
        " the program that XLA compiles for them: the first is"
        f" {(ratios - 1).abs().mean():.1%} off in time and {(memory - 1).abs().mean():.1%} in"
        " memory, on average. Small models of these kinds were planned and run on virtual devices,"
        " too; parameters after a step differ from those of one device by"
        f" {table['run_difference'].max():.1g} at most."
    )


def _ratios(table: Table, column: str) -> Table:
    values = by_series(table, column)
    return values[ANALYTIC] / values[COMPILED]
