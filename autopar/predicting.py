"""Plans and predictions for a cluster that need not be here: `plan_step`, `compile_step`, `predict`."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import jax
from jax.sharding import AbstractMesh, Mesh

from autopar.analytic import analytic_pipeline, analytic_program
from autopar.arguments import Argnums, donated_arguments, leaves_of
from autopar.devices import Device, logical_mesh
from autopar.interpreter import builds_graphs
from autopar.layers import LayerOption
from autopar.lower import compile_program
from autopar.methods import PipeshardParallel, PlanningMethod, ShardParallel
from autopar.pipeline.compiling import compile_pipeline
from autopar.pipeline.planned import PlannedPipeline
from autopar.pipeline.planning import PipelinePlanner
from autopar.pipeline.search import layer_options, micro_batch_counts, schedules, search
from autopar.plan import Plan
from autopar.planned import PlannedStep
from autopar.planning import make_plan
from autopar.sharding.spec import LogicalMesh
from autopar.trace import StepGraph, trace
from simulator.cluster import Cluster
from simulator.description import ClusterError
from simulator.engine import simulate
from simulator.mixed import AnyCluster, MixedCluster, load_cluster
from simulator.program import Program
from simulator.timeline import Timeline

Fidelity = Literal["compiled", "analytic"]
"""Whose program a prediction is of: XLA's, or the planner's."""


@builds_graphs
def plan_step(
    fun: Callable[..., Any],
    args: Sequence[Any],
    *,
    method: PlanningMethod | None = None,
    cluster: AnyCluster | str,
    mesh_shape: Sequence[int] | None = None,
    batch_argnums: Sequence[int] = (1,),
) -> Plan:
    """Plan `fun` for arguments like `args` (arrays or ShapeDtypeStructs) on a cluster that need not be here.

    Args:
        mesh_shape: logical mesh over the cluster's first devices. By default that of `method.devices` if these are a mesh, abstract
            or not, else one axis over all; a pipeline has its own mesh for each stage and takes only the number of devices from it.
    """
    method = method or ShardParallel()
    cluster = any_cluster(cluster)
    if mesh_shape is not None:
        mesh = logical_mesh(mesh_shape)
    elif isinstance(method.devices, Mesh | AbstractMesh):
        mesh = LogicalMesh(method.devices.axis_sizes, method.devices.axis_names)
    else:
        mesh = logical_mesh((cluster.num_devices,))
    if isinstance(method, PipeshardParallel):
        return plan_pipelined(fun, args, batch_argnums, method, cluster.first_devices(mesh.num_devices))[1]
    cluster = single_pool(cluster, type(method).__name__)
    step = trace(fun, args, batch_argnums, method.num_micro_batches)
    return plan_sharded(step, mesh, cluster, method)


def predict(
    fun: Callable[..., Any],
    args: Sequence[Any],
    plan: Plan,
    cluster: AnyCluster | str,
    *,
    donate_argnums: Argnums = "auto",
    batch_argnums: Sequence[int] = (1,),
    fidelity: Fidelity = "compiled",
) -> Timeline:
    """Step time and per-device memory of a plan on a cluster that need not be here: `compile_step`, simulated."""
    cluster = any_cluster(cluster)
    program = compile_step(
        fun, args, plan, cluster, donate_argnums=donate_argnums, batch_argnums=batch_argnums, fidelity=fidelity
    )
    return simulate(program, cluster)


def compile_step(
    fun: Callable[..., Any],
    args: Sequence[Any],
    plan: Plan,
    cluster: AnyCluster | str,
    *,
    donate_argnums: Argnums = "auto",
    batch_argnums: Sequence[int] = (1,),
    fidelity: Fidelity = "compiled",
) -> Program:
    """The program of a plan for the GPUs of a cluster that need not be here.

    `simulator.simulate` times it, `simulator.save_program` keeps it, for `python -m simulator predict`, say.

    Args:
        fidelity: "compiled": as XLA compiles it, on this machine; memory is the compiler's buffer assignment. "analytic": as the
            planner counts, in little more than it takes to trace; what is donated is then what a step carries on.
    """
    cluster = any_cluster(cluster)
    if fidelity not in get_args(Fidelity):
        raise ValueError(f"fidelity {fidelity!r}, expected 'compiled' or 'analytic'")
    step = trace_for(plan, fun, args, batch_argnums)
    donated = donated_arguments(donate_argnums, args)
    analytic = fidelity == "analytic"
    if plan.pipeline is not None:
        planned = PlannedPipeline(step, plan)
        if analytic:
            return analytic_pipeline(planned, cluster)
        return compile_pipeline(planned, cluster, leaves_of(args, donated))[0]
    pool = single_pool(cluster, f"a plan of {plan.method}")
    return (
        analytic_program(PlannedStep(step, plan), pool) if analytic else compile_program(step, plan, pool, donated)[0]
    )


def plan_sharded(step: StepGraph, mesh: LogicalMesh, cluster: Cluster, method: PlanningMethod) -> Plan:
    name = type(method).__name__
    return make_plan(step, mesh, cluster, method.sharding_of(step), name, memory_budget=method.memory_budget)


def plan_pipelined(
    fun: Callable[..., Any],
    args: Sequence[Any],
    batch: Sequence[int],
    method: PipeshardParallel,
    cluster: AnyCluster,
    devices: Sequence[Device] | None = None,
) -> tuple[StepGraph, Plan]:
    forward = method.pipeline_schedule == "inference"
    rows = [leaf.shape[0] for i in batch for leaf in jax.tree.leaves(args[i]) if getattr(leaf, "shape", ())]

    def traced(count: int, layers: LayerOption | None) -> StepGraph:
        return trace(fun, args, batch, count, layers, marked=True, forward=forward)

    def planner(step: StepGraph) -> PipelinePlanner:
        options = method.sharding_of(step)
        return PipelinePlanner(step, cluster, options, method.memory_budget, devices=devices)

    return search(
        traced,
        planner,
        micro_batch_counts(method.num_micro_batches, rows),
        layer_options(method.layer_option),
        schedules(method.pipeline_schedule, method.num_chunks),
        method.stages,
        type(method).__name__,
    )


def trace_for(plan: Plan, fun: Callable[..., Any], args: Sequence[Any], batch_argnums: Sequence[int]) -> StepGraph:
    """The step as `plan` was made for."""
    if plan.pipeline is None:
        return trace(fun, args, batch_argnums, plan.num_micro_batches)
    forward = plan.pipeline.name == "inference"
    return trace(fun, args, batch_argnums, plan.num_micro_batches, plan.pipeline.layer_option, True, forward)


def any_cluster(cluster: Any) -> AnyCluster:
    return cluster if isinstance(cluster, Cluster | MixedCluster) else load_cluster(cluster)


def single_pool(cluster: AnyCluster, what: str) -> Cluster:
    """The cluster, if one mesh can span it."""
    if isinstance(cluster, Cluster):
        return cluster
    raise ClusterError(
        f"{what} shards a step over one mesh of devices that are alike, but cluster {cluster.name!r} has {len(cluster.pools)} pools of"
        " different hosts; use PipeshardParallel, whose stages lie in one pool each, or one pool: load_cluster(...).pools[0]"
    )
