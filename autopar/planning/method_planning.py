"""Planning by method: the one place that dispatches on the planning methods."""

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
from autopar.planning.last_results import start_search
from autopar.planning.option_search import (
    OptionSpace,
    layer_options,
    micro_batch_counts,
    schedules,
    search,
)
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
        mesh: logical mesh that the method's `devices` stand for. A pipeline takes only its number
            of devices.
        cluster: hardware that the cost model describes.
        devices: devices of this process by their number in the cluster, on which stages can be
            measured; None if the cluster is elsewhere.
        platform: platform that the step will run on, "cpu", "gpu" or "cuda"; "" if it will not run.
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
    """Trace and plan `fun` with `method`.

    Args:
        method: the planning method, with its options.
        fun: the training step.
        args: its arguments, arrays or ShapeDtypeStructs.
        batch: numbers of the arguments whose arrays have the batch as their first dim.
        target: the hardware to plan for.

    Raises:
        MemoryBudgetError, NoStagesError: no plan fits on the devices.
        ClusterError: one mesh would span devices of different kinds.
    """
    if isinstance(method, PipeshardParallel):
        return _plan_pipeline(method, fun, args, batch, target)
    name = type(method).__name__
    cluster = single_pool(target.cluster, name)
    step = trace(fun, args, batch, method.num_micro_batches, rng=method.rng)
    options = method.sharding_of(step)
    plan = make_plan(step, target.mesh, cluster, options, name, memory_budget=method.memory_budget)
    return PlannedStep(step, plan)


def _plan_pipeline(
    method: PipeshardParallel,
    fun: Callable[..., Any],
    args: Sequence[Any],
    batch: Sequence[int],
    target: Target,
) -> PlannedStep:
    stages = method.stages
    cluster = target.cluster.first_devices(target.mesh.num_devices)
    leaves = [leaf for i in batch for leaf in jax.tree.leaves(args[i])]
    rows = [leaf.shape[0] for leaf in leaves if getattr(leaf, "shape", ())]
    is_open = (
        method.pipeline_schedule == "auto"
        and isinstance(stages, AutoStageOption)
        and not stages.profile
    )
    space = OptionSpace(
        micro_batch_counts(method.num_micro_batches, rows),
        layer_options(method.layer_option),
        schedules(method.pipeline_schedule, method.chunks),
        has_whole_step=is_open and isinstance(cluster, Cluster),
    )
    planning = _PipelinePlanning(method, fun, args, batch, target, cluster)
    return PlannedStep(*search(planning, space, stages, type(method).__name__, start_search()))


@dataclass(frozen=True)
class _PipelinePlanning:
    """Traces and planners of a function for one PipeshardParallel: what `search` asks for."""

    method: PipeshardParallel
    fun: Callable[..., Any]
    args: Sequence[Any]
    batch: Sequence[int]
    target: Target
    cluster: AnyCluster

    def trace(self, num_micro_batches: int, layer_option: LayerOption | None) -> StepGraph:
        """Return the step in layers, with its accumulated values marked."""
        schedule = self.method.pipeline_schedule
        forward = schedule != "auto" and not has_backward(schedule)
        return trace(
            self.fun,
            self.args,
            self.batch,
            num_micro_batches,
            layer_option,
            marked=True,
            forward=forward,
            rng=self.method.rng,
        )

    def planner(self, step: StepGraph) -> PipelinePlanner:
        """Return the planner of pipelines for a traced step."""
        devices = self.target.devices
        return PipelinePlanner(
            step,
            self.cluster,
            self.method.sharding_of(step),
            self.method.memory_budget,
            devices=list(devices.values()) if devices else None,
        )

    def plan_whole_step(self, num_micro_batches: int) -> tuple[StepGraph, Plan]:
        """Return the step and its plan as one program."""
        name = type(self.method).__name__
        step = trace(self.fun, self.args, self.batch, num_micro_batches, rng=self.method.rng)
        pool = single_pool(self.cluster, name)
        options = self.method.sharding_of(step)
        budget = self.method.memory_budget
        plan = make_plan(step, self.target.mesh, pool, options, name, memory_budget=budget)
        return step, plan


def trace_for(
    plan: Plan, fun: Callable[..., Any], args: Sequence[Any], batch_argnums: Sequence[int]
) -> StepGraph:
    """Trace `fun` the way it was traced for `plan`.

    Args:
        plan: a plan for `fun`.
        fun: the training step.
        args: its arguments, arrays or ShapeDtypeStructs.
        batch_argnums: numbers of the arguments whose arrays have the batch as their first dim.
    """
    schedule = plan.schedule
    marked = not schedule.is_whole_step
    forward = marked and not has_backward(schedule.name)
    count, layers = plan.num_micro_batches, schedule.layer_option
    return trace(fun, args, batch_argnums, count, layers, marked, forward, plan.rng)


def any_cluster(cluster: Any) -> AnyCluster:
    """Return the cluster that is given itself, by its name or by the path of its file."""
    cluster = checked("cluster", cluster, CLUSTER)
    return cluster if isinstance(cluster, Cluster | HeterogeneousCluster) else load_cluster(cluster)


def single_pool(cluster: AnyCluster, what: str) -> Cluster:
    """Return the cluster if one mesh can span it.

    Args:
        cluster: any cluster.
        what: what needs one mesh, for the error.

    Raises:
        ClusterError: the cluster has several pools of hosts.
    """
    if isinstance(cluster, Cluster):
        return cluster
    raise ClusterError(
        f"{what} shards a step over one mesh of devices that are alike, but cluster"
        f" {cluster.name!r} has {len(cluster.pools)} pools of different hosts; use"
        " PipeshardParallel, whose stages lie in one pool each, or one pool:"
        " load_cluster(...).pools[0]"
    )
