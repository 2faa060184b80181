"""vTrain's measurements of Megatron-LM (VIA Research, MIT): hosts of 8 A100 with four cards of 200 Gb/s."""

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from simulator.transformer import EAGER, Backend, Execution, Transformer, predict
from simulator.transformer.scenario import Recompute
from simulator.validation.cases import Case
from simulator.validation.sets.published_rows import PUBLISHED, machine, records, table


def vtrain_multi_node(folder: Path = PUBLISHED) -> Iterator[Case]:
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
        model, plan = _described(row, "full")
        where = machine("dgx_a100_80", row.gpus, nics=4)
        yield Case.of_step(
            f"{row.params}B t{row.t} d{row.d} p{row.p} b{row.micro}",
            row.ms / 1e3,
            predict(model, plan, where),
            f"{row.params}B on {row.gpus}",
        )


def vtrain_single_node_rows(folder: Path = PUBLISHED) -> pd.DataFrame:
    """The table, with a column that says which 40 rows are for fitting: those with the smallest CRC of their plan. Of another folder, none
    but the same plans."""
    fitted = _single_node(PUBLISHED).sort_values("crc", kind="stable").head(40)
    plans = _single_node(folder)
    return plans.assign(fitted=plans.plan.isin(fitted.plan)).drop(columns=["plan", "crc"])


def _single_node(folder: Path) -> pd.DataFrame:
    """The table, with each row's plan as a text and the CRC of that."""
    columns = ["gpus", "batch", "micro", "hidden", "heads", "layers", "seq", "t", "d", "p", "ms"]
    rows = table("vtrain_single_node", columns, folder)
    plans = rows[columns[:-1]].astype(str).agg(",".join, axis=1)
    return rows.assign(plan=plans, crc=plans.map(lambda plan: zlib.crc32(plan.encode())))


def vtrain_single_node_case(row: Any, backend: Backend) -> Case:
    """One row of `vtrain_single_node_rows`. vTrain's own model of these steps sends gradients as 16-bit numbers (src/predictor.py)."""
    model, plan = _described(row, "selective")
    plan = plan.model_copy(update={"communicated_gradient_bytes": 2})
    return Case.of_step(
        f"h{row.hidden} l{row.layers} t{row.t} d{row.d} p{row.p} b{row.micro} of {row.batch}",
        row.ms / 1e3,
        predict(model, plan, machine("dgx_a100_80", 8, backend)),
        f"h{row.hidden} l{row.layers} on {row.gpus}, batch {row.batch}",
        bool(row.fitted),
    )


def vtrain_single_node(folder: Path = PUBLISHED) -> Iterator[Case]:
    for row in vtrain_single_node_rows(folder).itertuples():
        yield vtrain_single_node_case(row, EAGER)


def _described(row: Any, recompute: Recompute) -> tuple[Transformer, Execution]:
    """The model of a row, and its plan."""
    model = Transformer(
        layers=row.layers, hidden=row.hidden, heads=row.heads, seq=row.seq, vocab=51200
    )
    plan = Execution(
        tensor=row.t,
        pipeline=row.p,
        data=row.d,
        microbatch=row.micro,
        global_batch=row.batch,
        recompute=recompute,
        scatter_sends=True,
        overlap_tensor="backward",
    )
    return model, plan
