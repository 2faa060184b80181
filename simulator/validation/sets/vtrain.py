"""vTrain's measurements of Megatron-LM (VIA Research, MIT).

Hosts have 8 A100 and 4 NICs of 200 Gb/s.
"""

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from simulator.transformer import EAGER, Backend, Execution, Transformer, predict
from simulator.transformer.scenario import Recompute
from simulator.validation.cases import Case, PublishedSet
from simulator.validation.sets.published_rows import PUBLISHED, machine, records, table


def vtrain_multi_node(folder: Path = PUBLISHED) -> Iterator[Case]:
    """Yield the steps on 64 to 512 A100."""
    columns = [
        "params",
        "gpus",
        "batch",
        "micro",
        "hidden",
        "heads",
        "layers",
        "seq",
        "t",
        "d",
        "p",
        "ms",
    ]
    for row in records("vtrain_multi_node", columns, folder):
        model, execution = _model_and_execution(row, "full")
        where = machine("dgx_a100_80", row.gpus, nics=4)
        yield Case.of_step(
            f"{row.params}B t{row.t} d{row.d} p{row.p} b{row.micro}",
            row.ms / 1e3,
            predict(model, execution, where),
            f"{row.params}B on {row.gpus}",
        )


def vtrain_single_node_rows(folder: Path = PUBLISHED) -> pd.DataFrame:
    """Return the table of steps on one host, with a column `fitted`.

    The 40 rows to fit are those with the smallest CRC of their plan. In another folder, rows with
    the same plans count as fitted.
    """
    fitted = _single_node(PUBLISHED).sort_values("crc", kind="stable").head(40)
    plans = _single_node(folder)
    return plans.assign(fitted=plans.plan.isin(fitted.plan)).drop(columns=["plan", "crc"])


def _single_node(folder: Path) -> pd.DataFrame:
    """Return the table, with the plan of each row as a text and its CRC."""
    columns = ["gpus", "batch", "micro", "hidden", "heads", "layers", "seq", "t", "d", "p", "ms"]
    rows = table("vtrain_single_node", columns, folder)
    plans = rows[columns[:-1]].astype(str).agg(",".join, axis=1)
    return rows.assign(plan=plans, crc=plans.map(lambda plan: zlib.crc32(plan.encode())))


def vtrain_single_node_case(row: Any, backend: Backend) -> Case:
    """Return the case of a row of `vtrain_single_node_rows` under a backend.

    vTrain's own model of these steps sends gradients as 16-bit numbers (src/predictor.py).
    """
    model, execution = _model_and_execution(row, "selective")
    execution = execution.model_copy(update={"communicated_gradient_bytes": 2})
    return Case.of_step(
        f"h{row.hidden} l{row.layers} t{row.t} d{row.d} p{row.p} b{row.micro} of {row.batch}",
        row.ms / 1e3,
        predict(model, execution, machine("dgx_a100_80", 8, backend)),
        f"h{row.hidden} l{row.layers} on {row.gpus}, batch {row.batch}",
        bool(row.fitted),
    )


def vtrain_single_node(folder: Path = PUBLISHED) -> Iterator[Case]:
    """Yield the steps on 2 to 8 A100."""
    for row in vtrain_single_node_rows(folder).itertuples():
        yield vtrain_single_node_case(row, EAGER)


def _model_and_execution(row: Any, recompute: Recompute) -> tuple[Transformer, Execution]:
    """Return the model and the execution of a row."""
    model = Transformer(
        layers=row.layers, hidden=row.hidden, heads=row.heads, seq=row.seq, vocab=51200
    )
    execution = Execution(
        tensor=row.t,
        pipeline=row.p,
        data=row.d,
        microbatch=row.micro,
        global_batch=row.batch,
        recompute=recompute,
        scatter_sends=True,
        overlap_tensor="backward",
    )
    return model, execution


VTRAIN_MULTI_NODE = PublishedSet(
    name="vtrain-multi-node",
    title="vTrain, 64 to 512 A100",
    unit="s",
    source="VIA Research, vTrain (MIT)",
    cases=vtrain_multi_node,
    target=0.09,
    note=(
        "nothing fitted. Two rows (tensor 2, data 16, pipeline 16) take 10 s longer than their "
        "neighbours and one (tensor 8, microbatch 2) 3 s, for which the model has no explanation"
    ),
    files=("vtrain_multi_node",),
)

VTRAIN_SINGLE_NODE = PublishedSet(
    name="vtrain-single-node",
    title="vTrain, 2 to 8 A100",
    unit="s",
    source="VIA Research, vTrain (MIT)",
    cases=vtrain_single_node,
    target=0.075,
    note=(
        "the host's times of the eager backend are fitted to 40 rows, chosen by hash; gradients "
        "are sent in 16 bits, as in vTrain's model of these steps (several nodes: 32 bits); "
        "recomputation is not given: selective fits"
    ),
    files=("vtrain_single_node",),
)
