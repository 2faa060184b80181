"""Decisions of a plan as a table; printed while planning if AUTOPAR_DEBUG_PRINT_AS_STRATEGY=1."""

from dataclasses import fields
from math import ceil
from typing import TYPE_CHECKING

from autopar.analysis.descriptions import describe_spec
from autopar.analysis.reasons import Reason, explain
from autopar.lowering.planned import Planned, single_stage
from autopar.plan import Plan
from autopar.sharding.options import ShardingOptions
from simulator.costs.cost_model import ClusterCosts, CostModel
from simulator.hardware.heterogeneous import HeterogeneousCluster, load_cluster

if TYPE_CHECKING:
    import pandas as pd


def decisions(
    planned: Planned,
    *,
    stage: int | None = None,
    costs: CostModel | None = None,
    options: ShardingOptions | None = None,
    runners_up: int | None = 3,
) -> "pd.DataFrame":
    """A row for every input and equation of the step: what was chosen, what it costs, and what else there was.

    Args:
        planned: an executable, or a `PlannedStep`.
        stage: of a pipeline, the stage to tell of.
        costs: the cost model that the plan was made with; by default that of the shipped cluster of the plan's name.
        options: the limits that the plan was made with; by default those that the plan names.
        runners_up: how many candidates that were not chosen to tell of each decision; None for all.

    Returns:
        The fields of `Reason` as columns; specs as text, `runners_up` as tuples of `RunnerUp`. Seconds of what follows are NaN,
        the others add up to the plan's predicted time.

    Raises:
        PlanError: the plan is for another step, or was made with other options.
        ValueError: there is no shipped cluster of the plan's name, and no `costs`; or no stage of a pipeline is given.
    """
    import pandas as pd  # takes a second to import, and only tables need it

    planned = single_stage(planned, stage)
    reasons = explain(
        planned, costs or default_costs(planned.plan), options or planned.plan.options, runners_up
    )
    columns = [field.name for field in fields(Reason)]
    rows = [
        {name: getattr(each, name) for name in columns} | {"result": describe_spec(each.result)}
        for each in reasons
    ]
    return pd.DataFrame(rows, columns=columns).astype({"eqn": "Int64"})


def default_costs(plan: Plan) -> CostModel:
    """The cost model of the shipped cluster that the plan was made for, grown to whole hosts where its mesh is larger."""
    try:
        cluster = load_cluster(plan.cluster)
    except ValueError as error:
        raise ValueError(
            f"the plan is for cluster {plan.cluster!r}, which is not a shipped one; give the cost model it was made with,"
            " e.g. costs=ClusterCosts(cluster)"
        ) from error
    if isinstance(cluster, HeterogeneousCluster):
        cluster = cluster.pools[cluster.pool_of(plan.stages[0].devices)]
    count = plan.stages[0].mesh.num_devices
    if count > cluster.num_devices:
        cluster = cluster.with_size(hosts=ceil(count / cluster.devices_per_host))
    return ClusterCosts(cluster)
