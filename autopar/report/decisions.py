"""The decisions of a plan as a table, with their costs and the other candidates."""

from dataclasses import fields
from math import ceil
from typing import TYPE_CHECKING

from autopar.analysis.descriptions import describe_spec
from autopar.analysis.reasons import Reason, explain
from autopar.lowering.planned import Planned, single_stage
from autopar.plan import Plan
from autopar.sharding.options import ShardingOptions
from simulator.costs.cost_model import ClusterCosts, CostModel
from simulator.hardware.heterogeneous import AnyCluster, HeterogeneousCluster, load_cluster

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
    """Return a table of the sharding and cost of every input and equation of a step.

    With AUTOPAR_DEBUG_PRINT_AS_STRATEGY=1 the planner prints the same as text.

    Args:
        planned: an executable, or a `PlannedStep`.
        stage: number of the stage of a pipeline.
        costs: the cost model that the plan was made with; by default the cost model of the shipped
            cluster with the name in the plan.
        options: the limits that the plan was made with; by default those in the plan.
        runners_up: maximum number of other candidates per decision; None for all.

    Returns:
        A row for each input and equation, with the fields of `Reason` as columns: specs as text,
        `runners_up` as tuples of `RunnerUp`. Seconds add up to the plan's predicted time;
        equations that follow a decision have NaN.

    Raises:
        PlanError: the plan is for another step, or was made with other options.
        ValueError: `costs` is missing, and no shipped cluster has the name in the plan; or the plan
            is a pipeline, and `stage` is missing.
    """
    import pandas as pd  # imported late because it takes a second

    planned = single_stage(planned, stage)
    reasons = explain(
        planned, costs or default_costs(planned.plan), options or planned.plan.options, runners_up
    )
    columns = [field.name for field in fields(Reason)]
    rows = [
        {name: getattr(reason, name) for name in columns} | {"result": describe_spec(reason.result)}
        for reason in reasons
    ]
    return pd.DataFrame(rows, columns=columns).astype({"eqn": "Int64"})


def default_costs(plan: Plan) -> CostModel:
    """Return the cost model of the shipped cluster with the name in the plan.

    Raises:
        ValueError: there is no shipped cluster of this name.
    """
    try:
        cluster = load_cluster(plan.cluster)
    except ValueError as error:
        raise ValueError(
            f"the plan is for cluster {plan.cluster!r}, which is not a shipped one; give the cost"
            " model it was made with, e.g. costs=ClusterCosts(cluster)"
        ) from error
    return costs_on(cluster, plan)


def costs_on(cluster: AnyCluster, plan: Plan) -> CostModel:
    """Return the cost model of a plan that has a single stage.

    Args:
        cluster: the cluster that the plan was made for. If it has pools, the pool of the stage
            counts. If it is smaller than the plan's mesh, it is extended by whole hosts.
        plan: the plan.
    """
    (stage,) = plan.stages
    if isinstance(cluster, HeterogeneousCluster):
        cluster = cluster.pools[cluster.pool_of(stage.devices)]
    count = stage.mesh.num_devices
    if count > cluster.num_devices:
        cluster = cluster.with_size(hosts=ceil(count / cluster.devices_per_host))
    return ClusterCosts(cluster)
