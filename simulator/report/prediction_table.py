"""Predictions side by side, for the terminal and as JSON."""

import json
from collections.abc import Callable, Iterable, Mapping
from math import isnan

from rich import box
from rich.table import Table

from simulator.engine.prediction import PARTS, Prediction


def prediction_table(predictions: Mapping[str, Prediction]) -> Table:
    """A column per prediction, under its name; rows for what is known of at least one."""
    table = Table("", *predictions, box=box.SIMPLE)
    for column in table.columns[1:]:
        column.justify = "right"
    several = list(predictions.values())

    def row(
        label: str,
        cell: Callable[[Prediction], str],
        known: Callable[[Prediction], object] = lambda _: True,
    ) -> None:
        if any(map(known, several)):
            table.add_row(label, *(cell(one) if known(one) else "" for one in several))

    row("step, s", lambda one: f"{one.seconds:.4g}")
    row("  P10 to P90", lambda one: f"{one.quantile(0.1):.4g} to {one.quantile(0.9):.4g}")
    for part in PARTS:
        row(
            f"  {part}",
            lambda one, part=part: f"{getattr(one, part):.4g}",
            lambda one, part=part: getattr(one, part),
        )
    for axis in _keys(one.communication for one in several):
        row(f"  {axis}, exposed (of)", lambda one, axis=axis: _exposed(one, axis))
    row("memory, GB", lambda one: f"{one.memory.total / 1e9:.3g}", lambda one: one.memory.parts)
    for part in _keys(one.memory.parts for one in several):
        row(f"  {part}", lambda one, part=part: f"{one.memory.parts.get(part, 0) / 1e9:.3g}")
    row("  fits, with reserve", _fits, lambda one: one.memory.parts)
    row("examples per s", lambda one: f"{one.examples_per_s:,.0f}", lambda one: one.examples)
    row("tokens per s", lambda one: f"{one.tokens_per_s:,.0f}", lambda one: one.tokens)
    row(
        "TFLOP/s a device",
        lambda one: f"{one.tflop_per_s_per_device:.1f}",
        lambda one: not isnan(one.mfu),
    )
    row("MFU", lambda one: f"{one.mfu:.1%}", lambda one: not isnan(one.mfu))
    row("HFU", lambda one: f"{one.hfu:.1%}", lambda one: not isnan(one.hfu))
    for name in _keys(one.unmodelled_kernels for one in several):
        row(
            f"cost unknown: {name}",
            lambda one, name=name: f"{one.unmodelled_kernels.get(name, 0)} x",
        )
    return table


def prediction_json(predictions: Mapping[str, Prediction]) -> str:
    """The rows of the predictions by name, null for what is not known."""
    rows = {
        name: {
            key: None if isinstance(value, float) and isnan(value) else value
            for key, value in one.row().items()
        }
        for name, one in predictions.items()
    }
    return json.dumps(rows, indent=1)


def _keys(several: Iterable[Mapping[str, object]]) -> list[str]:
    return list(dict.fromkeys(key for each in several for key in each))


def _exposed(one: Prediction, axis: str) -> str:
    return f"{one.exposed.get(axis, 0):.4g} ({one.communication.get(axis, 0):.4g})"


def _fits(one: Prediction) -> str:
    verdict = "yes" if one.memory.fits else "no"
    return f"{verdict}, {one.memory.reserved / 1e9:.3g} of {one.memory.capacity / 1e9:.3g}"
