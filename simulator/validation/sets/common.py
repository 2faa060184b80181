"""What the published sets share: models, machines, tables, and the choice of what a table doesn't say."""

from collections.abc import Iterable
from functools import cache
from itertools import product
from typing import Any

import pandas as pd

from simulator.cluster import Cluster
from simulator.formula import EAGER, Backend, Execution, Machine, Transformer, predict
from simulator.prediction import Prediction
from simulator.validation.measurements import DATA

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


def table(name: str, columns: list[str] | None = None) -> pd.DataFrame:
    """One published table; `columns` replace the names in the file."""
    return pd.read_csv(DATA / "published" / f"{name}.csv", names=columns, header=0)


def records(name: str, columns: list[str] | None = None) -> list[Any]:
    """The rows of a table, with a column to an attribute."""
    return list(table(name, columns).itertuples(index=False))


def gpt(size: str, **changes: object) -> Transformer:
    """One of Megatron-LM's models, by its size."""
    layers, hidden, heads = GPT[size]
    return Transformer.model_validate(
        {"layers": layers, "hidden": hidden, "heads": heads, "seq": 2048, "vocab": 51200} | changes
    )


def fastest(
    model: Transformer, where: Machine, plan: dict[str, object], choices: dict[str, Iterable[object]]
) -> Prediction | None:
    """The fastest of all combinations of `choices` that divide the model and fit in memory."""
    found: list[Prediction] = []
    for values in product(*choices.values()):
        try:
            candidate = predict(model, Execution.model_validate(plan | dict(zip(choices, values, strict=True))), where)
        except ValueError:
            continue
        if candidate.memory.fits:
            found.append(candidate)
    return min(found, key=lambda prediction: prediction.seconds, default=None)
