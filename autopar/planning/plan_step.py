"""`plan_step`: plans for a cluster that this process may have no devices of."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from autopar._cpython import builds_graphs
from autopar.checks import SHAPE, OptionError, checked, instance, short_repr
from autopar.derived_methods import PLAN
from autopar.devices import logical_mesh, mesh_on_cluster, requested_mesh
from autopar.ir.spec import LogicalMesh
from autopar.lowering.planned import PlannedStep
from autopar.methods import PLANNING_METHOD, PlanningMethod, ShardParallel
from autopar.plan import Plan
from autopar.planning.method_planning import Target, any_cluster, plan_by_method, trace_for
from autopar.planning.stage_problem import NoStagesError
from autopar.sharding.solve_within_memory import MemoryBudgetError
from autopar.tracing.arguments import (
    BATCH_ARGNUMS,
    BatchArgnums,
    batch_arguments,
    batch_dims,
    by_position,
    result_shapes,
)
from autopar.tracing.packing import Packing
from autopar.tracing.shared_traces import shared
from simulator.hardware.heterogeneous import AnyCluster


@builds_graphs
def plan_step(
    fun: Callable[..., Any],
    args: Sequence[Any],
    *,
    method: PlanningMethod | None = None,
    cluster: AnyCluster | str | Path,
    mesh_shape: Sequence[int] | None = None,
    batch_argnums: BatchArgnums = "auto",
) -> Plan:
    """Plan `fun` for a cluster without running or compiling it.

    XLA may need more memory than the planner estimates. So the method's `memory_budget` is divided
    by `MEMORY_MARGIN` before planning. The plan's `predicted_bytes` are the estimate itself.

    Args:
        fun: the training step.
        args: arguments of the step, arrays or ShapeDtypeStructs.
        method: how to parallelize; ShardParallel() by default. Its `devices` are a mesh (abstract
            or not), a shape or a number, and stand for the first devices of the cluster; all by
            default.
        cluster: the cluster, its name or the path of its file.
        mesh_shape: shape of the logical mesh over the cluster's first devices, where
            `method.devices` leaves it open. A pipeline has a mesh for each stage and takes only the
            number of devices from it.
        batch_argnums: as in `parallelize`.

    Raises:
        OptionError: an option has another type, or `mesh_shape` and `method.devices`, or `cluster`
            and `method.cluster`, differ.
        MemoryBudgetError: no plan fits into the memory budget, less the margin.
        ValueError: `method.devices` are more than the cluster has, or are devices of this process
            and not as many as the cluster has.
    """
    method = ShardParallel() if method is None else method
    checked("method", method, PLANNING_METHOD)
    cluster = any_cluster(cluster)
    if method.cluster is not None and any_cluster(method.cluster) != cluster:
        raise OptionError(
            f"cluster is {cluster.name!r}, but method.cluster is {short_repr(method.cluster)};"
            " leave the method's out"
        )
    fun, args, batch = packed_step(fun, args, batch_argnums)
    mesh = _mesh(method, cluster, mesh_shape)
    budget = method.memory_budget
    if budget is not None:
        method = replace(method, memory_budget=budget / MEMORY_MARGIN)
    try:
        planned = plan_by_method(method, fun, args, batch, Target(mesh, cluster))
        return planned.within(budget).plan
    except (MemoryBudgetError, NoStagesError) as error:
        if budget is None:
            raise
        notes = getattr(error, "__notes__", [])
        if isinstance(error, MemoryBudgetError):
            error = MemoryBudgetError(budget, MEMORY_MARGIN * error.least, error.step)
        error.add_note(
            f"memory_budget is {budget / 1e9:.3g} GB; plan_step keeps a margin of"
            f" {MEMORY_MARGIN - 1:.0%} for XLA"
        )
        for note in notes if isinstance(error, MemoryBudgetError) else ():
            error.add_note(note)
        raise error from None


def planned_step(
    fun: Callable[..., Any],
    args: Sequence[Any],
    plan: Plan,
    *,
    batch_argnums: BatchArgnums = "auto",
) -> PlannedStep:
    """Trace `fun` as it was traced for `plan`, for `autopar.report`; no device is needed.

    Args:
        fun: the training step that the plan is for.
        args: its arguments, arrays or ShapeDtypeStructs, like those that the plan was made for.
        plan: the plan.
        batch_argnums: numbers of the arguments whose arrays have the batch as their first dim.

    Raises:
        PlanError: the plan is for another step.
    """
    plan = checked("plan", plan, PLAN)
    return PlannedStep(trace_for(plan, *packed_step(fun, args, batch_argnums)), plan)


MEMORY_MARGIN = 1.13
"""Factor by which XLA may need more memory than the planner estimates.

The largest excess in results/tables/fidelity.csv is 1.124.
"""


_ARGS = instance("the arguments of the step, in a tuple or a list", tuple, list)


def packed_step(
    fun: Callable[..., Any], args: Sequence[Any], batch_argnums: BatchArgnums
) -> tuple[Callable[..., Any], Sequence[Any], tuple[int, ...]]:
    """Check a step and its arguments; return them packed, and the numbers of batch arguments.

    Args:
        fun: the training step.
        args: arguments of the step, arrays or ShapeDtypeStructs.
        batch_argnums: as in `parallelize`.

    Raises:
        OptionError: `fun` is no function of arrays, or `args` or `batch_argnums` have another type.
    """
    if not callable(fun) or hasattr(fun, "get_last_executable"):
        raise OptionError(
            f"fun is {short_repr(fun)}, expected a function of arrays; of a parallelized one take"
            " its .fun"
        )
    checked("args", args, _ARGS)
    batch_argnums = checked("batch_argnums", batch_argnums, BATCH_ARGNUMS)
    dims = batch_dims(batch_argnums, args)
    packing = Packing(args, (), dims)
    key = packed_step, fun, jax.tree.structure(packing.args), tuple(sorted(dims.items()))
    step = shared(key, lambda: packing.step(by_position(fun)))
    batch = batch_arguments(
        batch_argnums,
        packing.args[: packing.count],
        lambda: result_shapes(step, packing.args),
    )
    return step, packing.args, batch


def _mesh(
    method: PlanningMethod, cluster: AnyCluster, mesh_shape: Sequence[int] | None
) -> LogicalMesh:
    """Return the logical mesh that a step is planned for."""
    if mesh_shape is None:
        return mesh_on_cluster(cluster, method.devices)
    mesh = logical_mesh(checked("mesh_shape", mesh_shape, SHAPE))
    if method.devices is None:
        return mesh
    method_mesh = requested_mesh(method.devices, cluster.num_devices)
    same_number = method_mesh.num_devices == mesh.num_devices
    same_shape = method_mesh.shape == mesh.shape
    if not (same_number if method.has_stage_meshes else same_shape):
        raise OptionError(
            f"mesh_shape is {mesh.shape}, but method.devices make a mesh of shape"
            f" {method_mesh.shape}; leave one out"
        )
    return method_mesh
