"""What the published sets share: models, machines, tables, and the choice of what a table doesn't say."""

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

GPT = {  # layers, hidden, heads
    "22B": (48, 6144, 64),
    "175B": (96, 12288, 96),
    "530B": (105, 20480, 128),
    "1T": (128, 25600, 160),
}


@cache
def machine(cluster: str, devices: int, backend: Backend = EAGER, nics: int = 8) -> Machine:
    """Whole hosts of a shipped cluster, at least as many as hold `devices`."""
    hosts = Cluster.load(cluster).with_size(-(-devices // 8))
    return Machine(hosts.model_copy(update={"nics_per_host": nics}), backend)


PUBLISHED = DATA / "published"
"""The tables that come with the package."""


def table(name: str, columns: list[str] | None = None, folder: Path = PUBLISHED) -> pd.DataFrame:
    """One published table, or rows of the same columns in another folder; `columns` replace the names in the file.

    Raises:
        ValueError: the other file lacks a column that the table has.
    """
    path = folder / f"{name}.csv"
    found = read_table(path)
    expected = list(pd.read_csv(PUBLISHED / f"{name}.csv", nrows=0).columns)
    if missing := [column for column in expected if column not in found]:
        raise ValueError(f"{path}: no column {missing[0]!r}; expected {', '.join(expected)}")
    names = dict(zip(expected, columns or expected, strict=True))
    return found.reindex(columns=expected).rename(columns=names)


def records(name: str, columns: list[str] | None = None, folder: Path = PUBLISHED) -> list[Any]:
    """The rows of a table, with a column to an attribute; none where another folder doesn't have it."""
    if folder != PUBLISHED and not (folder / f"{name}.csv").exists():
        return []
    return list(table(name, columns, folder).itertuples(index=False))


def chosen[Known](name: str, known: Mapping[str, Known], what: str) -> Known:
    """What is known of a name in a table; an unknown one: `ValueError`."""
    if name not in known:
        raise ValueError(
            f"unknown {what} {name!r} in the table; expected one of {', '.join(known)}"
        )
    return known[name]


def gpt(size: str, **changes: object) -> Transformer:
    """One of Megatron-LM's models, by its size."""
    layers, hidden, heads = chosen(size, GPT, "model")
    return Transformer.model_validate(
        {"layers": layers, "hidden": hidden, "heads": heads, "seq": 2048, "vocab": 51200} | changes
    )


def fastest_case(
    name: str,
    measured: Callable[[Prediction], float],
    model: Transformer,
    where: Machine,
    plan: dict[str, object],
    choices: dict[str, Iterable[object]],
) -> Case | Unpredicted:
    """The row of a table that doesn't tell `choices`: the fastest of all combinations that divide the model and fit in memory.

    Args:
        measured: its seconds, which may depend on what is predicted of the model.
    """
    found: list[Prediction] = []
    for values in product(*choices.values()):
        try:
            candidate = predict(
                model,
                Execution.model_validate(plan | dict(zip(choices, values, strict=True))),
                where,
            )
        except ValueError:
            continue
        if candidate.memory.fits:
            found.append(candidate)
    if not found:
        return Unpredicted(
            name, f"as no {' and '.join(choices)} divides the model and fits in memory"
        )
    best = min(found, key=lambda prediction: prediction.seconds)
    return Case.of_step(name, measured(best), best)
