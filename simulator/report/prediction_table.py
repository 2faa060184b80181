"""Predictions side by side: a table for the terminal, or JSON."""

import json
from collections.abc import Callable, Iterable, Mapping
from math import isnan

from rich import box
from rich.table import Table

from simulator.engine.prediction import PARTS, Prediction


def prediction_table(predictions: Mapping[str, Prediction]) -> Table:
    """Return a table with a column for each prediction, under its name.

    A row is left out if no prediction has its value.
    """
    table = Table("", *predictions, box=box.SIMPLE)
    for column in table.columns[1:]:
        column.justify = "right"
    columns = list(predictions.values())

    def row(
        label: str,
        cell: Callable[[Prediction], str],
        has_value: Callable[[Prediction], object] = lambda _: True,
    ) -> None:
        if any(map(has_value, columns)):
            table.add_row(label, *(cell(p) if has_value(p) else "" for p in columns))

    row("step, s", lambda p: f"{p.seconds:.4g}")
    row("  P10 to P90", lambda p: f"{p.quantile(0.1):.4g} to {p.quantile(0.9):.4g}")
    for part in PARTS:
        row(
            f"  {part}",
            lambda p, part=part: f"{getattr(p, part):.4g}",
            lambda p, part=part: getattr(p, part),
        )
    for axis in _keys(p.communication for p in columns):
        row(f"  {axis}, exposed (of)", lambda p, axis=axis: _exposed(p, axis))
    row("memory, GB", lambda p: f"{p.memory.total / 1e9:.3g}", lambda p: p.memory.parts)
    for part in _keys(p.memory.parts for p in columns):
        row(f"  {part}", lambda p, part=part: f"{p.memory.parts.get(part, 0) / 1e9:.3g}")
    row("  fits, with reserve", _fits, lambda p: p.memory.parts)
    row("examples per s", lambda p: f"{p.examples_per_s:,.0f}", lambda p: p.examples)
    row("tokens per s", lambda p: f"{p.tokens_per_s:,.0f}", lambda p: p.tokens)
    row("TFLOP/s a device", lambda p: f"{p.tflop_per_s_per_device:.1f}", lambda p: not isnan(p.mfu))
    row("MFU", lambda p: f"{p.mfu:.1%}", lambda p: not isnan(p.mfu))
    row("HFU", lambda p: f"{p.hfu:.1%}", lambda p: not isnan(p.hfu))
    for name in _keys(p.unmodelled_kernels for p in columns):
        row(f"cost unknown: {name}", lambda p, name=name: f"{p.unmodelled_kernels.get(name, 0)} x")
    return table


def prediction_json(predictions: Mapping[str, Prediction]) -> str:
    """Return the rows of the predictions by name as JSON, with null for unknown values."""
    return json.dumps(prediction_rows(predictions), indent=1)


def prediction_rows(predictions: Mapping[str, Prediction]) -> dict[str, dict[str, object]]:
    """Return the rows of the predictions by name, with None for unknown values."""
    return {
        name: {
            key: None if isinstance(value, float) and isnan(value) else value
            for key, value in prediction.row().items()
        }
        for name, prediction in predictions.items()
    }


def _keys(mappings: Iterable[Mapping[str, object]]) -> list[str]:
    return list(dict.fromkeys(key for mapping in mappings for key in mapping))


def _exposed(prediction: Prediction, axis: str) -> str:
    exposed = prediction.exposed.get(axis, 0)
    return f"{exposed:.4g} ({prediction.communication.get(axis, 0):.4g})"


def _fits(prediction: Prediction) -> str:
    memory = prediction.memory
    verdict = "yes" if memory.fits else "no"
    if memory.deviation:
        verdict += f" ({memory.fit_probability:.0%})"
    return f"{verdict}, {memory.reserved / 1e9:.3g} of {memory.capacity / 1e9:.3g}"
