"""The strategies of JAX's introduction to parallelism, written by hand: their collectives."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure

from experiments.by_hand import BY_HAND
from experiments.models import MLP
from experiments.paper.paper_style import bar_style, legend_above, new_figure
from experiments.paper.study import Table
from simulator import Cluster, work_of

NAMES = {
    "manual_data": "data",
    "manual_fsdp": "FSDP",
    "manual_megatron": "tensor",
    "manual_tensor_2d": "2D tensor",
    "manual_pipeline": "pipeline",
}
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "collective_permute")
DEVICES = 8

LOSS_BYTES = 1e4
"""A collective of fewer bytes carries losses and statistics."""


def rows(part: str, smoke: bool) -> Iterator[dict[str, Any]]:
    """Yield the bytes of each kind of collective in the program of 8 H100s."""
    strategy = BY_HAND[part]
    size = 64 if smoke else 1024
    model = MLP(dim=size, num_layers=8, batch_size=size)
    mesh = (DEVICES,) if len(strategy.axes) == 1 else (2, DEVICES // 2)
    program = strategy.predict(model, mesh, None, Cluster.load("dgx_h100")).program
    moved: Counter[str] = Counter()
    for body in program.bodies.values():
        moved.update(work_of(body).collectives)
    parameters = jax.tree.leaves(model.abstract_args()[0].params)
    for kind in KINDS:
        yield {
            "series": NAMES[part],
            "mesh": "x".join(map(str, mesh)),
            "kind": kind,
            "unit": "MB",
            "ours": moved[kind] / 1e6,
            "parameters_mb": sum(x.size * x.dtype.itemsize for x in parameters) / 1e6,
        }


def draw(table: Table) -> Figure:
    """Draw the bytes of each strategy's collectives, stacked by kind."""
    figure = new_figure(2.0)
    axes = figure.subplots()
    moved = table.pivot(index="series", columns="kind", values="ours").fillna(0)
    moved = moved.loc[[name for name in NAMES.values() if name in moved.index]]
    bottom = np.zeros(len(moved))
    for number, kind in enumerate(KINDS):
        axes.bar(
            moved.index,
            moved[kind],
            0.7,
            bottom=bottom,
            label=kind,
            **bar_style(number),
        )
        bottom += moved[kind].to_numpy()
    axes.axhline(table["parameters_mb"].iloc[0], color="black", linewidth=0.7, linestyle="--")
    axes.set_ylabel("MB of a device's step")
    legend_above(figure, axes, columns=2)
    return figure


def caption(table: Table) -> str:
    """Return the caption."""
    return (
        "Collectives in the programs that XLA compiles for 8 H100s from strategies written by hand,"
        " as JAX's introduction to parallelism teaches them: bytes of whole arrays by kind, for a"
        f" step of an MLP with {table['parameters_mb'].iloc[0]:.1f} MB of parameters (dashed)."
        " There are no published numbers; what each strategy must communicate is checked."
    )


def claims(table: Table) -> dict[str, bool]:
    """Return whether the strategies communicate what they are defined to."""
    moved = table.pivot(index="series", columns="kind", values="ours")
    parameters, loss = table["parameters_mb"].iloc[0], LOSS_BYTES / 1e6
    data, fsdp = moved.loc["data"], moved.loc["FSDP"]
    return {
        "jax_data": abs(data["all_reduce"] / parameters - 1) < 0.01
        and data.drop("all_reduce").max() < loss,
        "jax_fsdp": fsdp["all_gather"] > 0.9 * parameters
        and fsdp["reduce_scatter"] > 0.9 * parameters
        and fsdp["all_reduce"] < 0.05 * parameters,
        "jax_pipeline": moved.loc["pipeline", "collective_permute"] > loss,
    }
