"""Plans a step as a method asks for: the one place that tells the planning methods apart."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from autopar.checks import checked
from autopar.devices import Device
from autopar.ir.spec import LogicalMesh
from autopar.ir.step_graph import StepGraph
from autopar.layering.layers import LayerOption
from autopar.lowering.planned import PlannedStep
from autopar.methods import CLUSTER, PipeshardParallel, PlanningMethod
from autopar.pipeline.pipeline_schedules import has_backward
from autopar.pipeline.stage_options import AutoStageOption
from autopar.plan import Plan
from autopar.planning.option_search import layer_options, micro_batch_counts, schedules, search
from autopar.planning.pipeline_planner import PipelinePlanner
from autopar.planning.step_planner import make_plan
from autopar.tracing.trace import trace
from simulator.hardware.cluster import Cluster
from simulator.hardware.description import ClusterError
from simulator.hardware.heterogeneous import AnyCluster, HeterogeneousCluster, load_cluster


@dataclass(frozen=True, slots=True)
class Target:
    """The hardware that a step is planned for.

    Attributes:
        mesh: the logical mesh that the method means by its `devices`. A pipeline takes only the number of devices from it.
        cluster: the hardware that the cost model describes.
        devices: the devices of this process that they are, by number, on which stages can be measured; None if they are elsewhere.
        platform: what the step is to run on, "cpu", "gpu" or "cuda"; "" if it is not to run.
    """

    mesh: LogicalMesh
    cluster: AnyCluster
    devices: Mapping[int, Device] | None = None
    platform: str = ""


def plan_by_method(
    method: PlanningMethod,
    fun: Callable[..., Any],
    args: Sequence[Any],
    batch: Sequence[int],
    target: Target,
) -> PlannedStep:
    """Trace and plan `fun` as `method` asks for.

    Args:
        batch: numbers of the arguments whose arrays have the batch as their first dim.

    Raises:
        MemoryBudgetError, NoStagesError: no plan fits on the devices.
        ClusterError: one mesh would span devices of different kinds.
    """
    if isinstance(method, PipeshardParallel):
        return _plan_pipeline(method, fun, args, batch, target)
    cluster = single_pool(target.cluster, type(method).__name__)
    step = trace(fun, args, batch, method.num_micro_batches)
    options, name = method.sharding_of(step), type(method).__name__
    return PlannedStep(
        step,
        make_plan(step, target.mesh, cluster, options, name, memory_budget=method.memory_budget),
    )


def _plan_pipeline(
    method: PipeshardParallel,
    fun: Callable[..., Any],
    args: Sequence[Any],
    batch: Sequence[int],
    target: Target,
) -> PlannedStep:
    cluster = target.cluster.first_devices(target.mesh.num_devices)
    forward = method.pipeline_schedule != "auto" and not has_backward(method.pipeline_schedule)
    rows = [
        leaf.shape[0]
        for i in batch
        for leaf in jax.tree.leaves(args[i])
        if getattr(leaf, "shape", ())
    ]

    def traced(count: int, layers: LayerOption | None) -> StepGraph:
        return trace(fun, args, batch, count, layers, marked=True, forward=forward)

    def planner(step: StepGraph) -> PipelinePlanner:
        options = method.sharding_of(step)
        return PipelinePlanner(
            step,
            cluster,
            options,
            method.memory_budget,
            devices=list(target.devices.values()) if target.devices else None,
        )

    def whole_step(count: int) -> tuple[StepGraph, Plan]:
        step = trace(fun, args, batch, count)
        pool, options = single_pool(cluster, name), method.sharding_of(step)
        return step, make_plan(
            step, target.mesh, pool, options, name, memory_budget=method.memory_budget
        )

    name = type(method).__name__
    stages = method.stages
    is_open = (
        method.pipeline_schedule == "auto"
        and isinstance(stages, AutoStageOption)
        and not stages.profile
    )
    step, plan = search(
        traced,
        planner,
        micro_batch_counts(method.num_micro_batches, rows),
        layer_options(method.layer_option),
        schedules(method.pipeline_schedule, method.chunks),
        stages,
        name,
        whole_step if is_open and isinstance(cluster, Cluster) else None,
    )
    return PlannedStep(step, plan)


def trace_for(
    plan: Plan, fun: Callable[..., Any], args: Sequence[Any], batch_argnums: Sequence[int]
) -> StepGraph:
    """Trace a step as `plan` was made for."""
    schedule = plan.schedule
    marked = not schedule.is_whole_step
    forward = marked and not has_backward(schedule.name)
    return trace(
        fun, args, batch_argnums, plan.num_micro_batches, schedule.layer_option, marked, forward
    )


def any_cluster(cluster: Any) -> AnyCluster:
    """Return the cluster that the user means, given itself, by its name or by the path of its file."""
    cluster = checked("cluster", cluster, CLUSTER)
    return cluster if isinstance(cluster, Cluster | HeterogeneousCluster) else load_cluster(cluster)


def single_pool(cluster: AnyCluster, what: str) -> Cluster:
    """Return the cluster, if one mesh can span it.

    Raises:
        ClusterError: it has several pools of hosts.
    """
    if isinstance(cluster, Cluster):
        return cluster
    raise ClusterError(
        f"{what} shards a step over one mesh of devices that are alike, but cluster {cluster.name!r} has {len(cluster.pools)} pools of"
        " different hosts; use PipeshardParallel, whose stages lie in one pool each, or one pool: load_cluster(...).pools[0]"
    )
