"""Helpers of the published sets: tables, models, machines, and options that a table omits."""

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd

from simulator.calibration.measured_samples import DATA
from simulator.engine.prediction import Prediction
from simulator.files import read_table
from simulator.hardware.cluster import Cluster
from simulator.transformer import EAGER, Backend, Execution, Machine, Transformer, predict
from simulator.validation.cases import Case, Unpredicted

GIB = 2**30

_GPT_SIZES = {
    "22B": (48, 6144, 64),
    "175B": (96, 12288, 96),
    "530B": (105, 20480, 128),
    "1T": (128, 25600, 160),
}
"""Layers, hidden size and heads of Megatron-LM's models."""


@cache
def machine(cluster: str, devices: int, backend: Backend = EAGER, nics: int = 8) -> Machine:
    """Return a machine of complete hosts of a shipped cluster, with 8 devices each.

    Args:
        cluster: name of the cluster.
        devices: number of devices that are needed.
        backend: the software.
        nics: NICs of each host.
    """
    hosts = Cluster.load(cluster).with_size(-(-devices // 8))
    return Machine(hosts.model_copy(update={"nics_per_host": nics}), backend)


PUBLISHED = DATA / "published"
"""Folder of the shipped tables."""


def table(name: str, columns: list[str] | None = None, folder: Path = PUBLISHED) -> pd.DataFrame:
    """Return a published table, or a table with the same columns in another folder.

    Args:
        name: name of the file, without .csv.
        columns: names that replace those of the columns.
        folder: folder of the file.

    Raises:
        ValueError: a file in another folder lacks a column of the shipped one.
    """
    path = folder / f"{name}.csv"
    rows = read_table(path)
    expected = list(pd.read_csv(PUBLISHED / f"{name}.csv", nrows=0).columns)
    if missing := [column for column in expected if column not in rows]:
        raise ValueError(f"{path}: no column {missing[0]!r}; expected {', '.join(expected)}")
    names = dict(zip(expected, columns or expected, strict=True))
    return rows.reindex(columns=expected).rename(columns=names)


def records(name: str, columns: list[str] | None = None, folder: Path = PUBLISHED) -> list[Any]:
    """Return the rows of a table, with an attribute for each column.

    Arguments and errors as for `table`; a file that another folder lacks has no rows.
    """
    if folder != PUBLISHED and not (folder / f"{name}.csv").exists():
        return []
    return list(table(name, columns, folder).itertuples(index=False))


def look_up[Entry](name: str, entries: Mapping[str, Entry], what: str) -> Entry:
    """Return the entry of a name in a table.

    Args:
        name: the name.
        entries: entries by name.
        what: the kind of thing that has the name, for errors.

    Raises:
        ValueError: there is no such entry.
    """
    if name not in entries:
        raise ValueError(
            f"unknown {what} {name!r} in the table; expected one of {', '.join(entries)}"
        )
    return entries[name]


def gpt(size: str, **changes: object) -> Transformer:
    """Return a model of Megatron-LM by its number of parameters, with other fields changed."""
    layers, hidden, heads = look_up(size, _GPT_SIZES, "model")
    return Transformer.model_validate(
        {"layers": layers, "hidden": hidden, "heads": heads, "seq": 2048, "vocab": 51200} | changes
    )


def fastest_case(
    name: str,
    measured: Callable[[Prediction], float],
    model: Transformer,
    where: Machine,
    fields: dict[str, object],
    choices: dict[str, Iterable[object]],
) -> Case | Unpredicted:
    """Return a case of a row that omits some options: the fastest combination that fits in memory.

    Args:
        name: name of the row.
        measured: function that returns the measured seconds; the prediction has the model FLOP.
        model: the model of the row.
        where: the machine of the row.
        fields: fields of the execution that the table has.
        choices: values of each field that it omits.

    Returns:
        The case, or why none of the combinations can be predicted.
    """
    fitting: list[Prediction] = []
    for values in product(*choices.values()):
        try:
            execution = Execution.model_validate(fields | dict(zip(choices, values, strict=True)))
            if model.layers % (execution.pipeline * execution.interleave):
                continue  # Megatron-LM of these tables has equal stages
            candidate = predict(model, execution, where)
        except ValueError:
            continue
        if candidate.memory.fits:
            fitting.append(candidate)
    if not fitting:
        return Unpredicted(
            name, f"as no {' and '.join(choices)} divides the model and fits in memory"
        )
    best = min(fitting, key=lambda prediction: prediction.seconds)
    return Case.of_step(name, measured(best), best)
