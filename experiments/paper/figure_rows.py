"""Rows that several figures have: rates of plans, or of a closed form, and tables of them."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import autopar
from experiments.paper.study import Table

DoesNotFit = (autopar.NoStagesError, autopar.InfeasibleError)
"""Errors of a step without a plan that fits in memory."""


def rate(flop_per_s: float, num_bytes: float, *, fits: bool = True) -> dict[str, Any]:
    """Return the columns of a rate in PFLOP/s, and of the memory of a device."""
    memory = {"fits": fits, "memory_gb": num_bytes / 1e9}
    return {"ours": flop_per_s / 1e15, **memory} if fits else memory


def plan_rate(flops: float, plan: autopar.Plan) -> dict[str, Any]:
    """Return the columns of the rate of a step with `flops` FLOP by its plan."""
    return rate(flops / plan.predicted_seconds, plan.predicted_bytes)


def plan_rows(
    makers: Mapping[str, Callable[[], autopar.Plan]], flops: float, **named: Any
) -> Iterator[dict[str, Any]]:
    """Yield the rate and the number of stages of each plan.

    Args:
        makers: functions that plan the step, by the name of the series.
        flops: FLOP of the step.
        named: columns that all rows share.
    """
    for series, make in makers.items():
        row = {**named, "series": series, "unit": "PFLOP/s"}
        try:
            plan = make()
        except DoesNotFit:
            yield {**row, "fits": False}
        except TimeoutError:
            yield row  # whether a plan fits is not known
        else:
            yield {**row, **plan_rate(flops, plan), "stages": len(plan.stages)}


def by_series(table: Table, value: str = "ours", index: str = "group") -> Table:
    """Return a column of a table with a row for each group and a column for each series."""
    return table.pivot(index=index, columns="series", values=value)
