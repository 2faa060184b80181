"""Plans for a cluster that need not be here: `plan_step`."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from autopar._cpython import builds_graphs
from autopar.checks import SHAPE, OptionError, checked, instance, short_repr
from autopar.devices import logical_mesh, mesh_on_cluster, requested_mesh
from autopar.ir.spec import LogicalMesh
from autopar.lowering.planned import PlannedStep
from autopar.methods import PLAN, PipeshardParallel, PlanningMethod, ShardParallel
from autopar.plan import Plan
from autopar.planning.method_planning import Target, any_cluster, plan_by_method, trace_for
from autopar.planning.stage_problem import NoStagesError
from autopar.sharding.planner import MemoryBudgetError
from autopar.tracing.arguments import ARGNUMS, DEFAULT_BATCH, batch_arguments, check_arrays
from autopar.tracing.trace import abstract
from simulator.hardware.heterogeneous import AnyCluster


@builds_graphs
def plan_step(
    fun: Callable[..., Any],
    args: Sequence[Any],
    *,
    method: PlanningMethod | None = None,
    cluster: AnyCluster | str | Path,
    mesh_shape: Sequence[int] | None = None,
    batch_argnums: int | Sequence[int] = DEFAULT_BATCH,
) -> Plan:
    """Plan `fun` for arguments like `args` (arrays or ShapeDtypeStructs) on a cluster that need not be here.

    XLA may need more memory than the planner estimates, and nothing is compiled here. So of a `memory_budget` of the method,
    `WORKSPACE_BYTES` are set aside and the rest is divided by `MEMORY_MARGIN` before planning; the plan's `predicted_bytes` are the
    estimate.

    Args:
        method: how to parallelize; ShardParallel() by default. Its `devices` mean what they do on devices that are here, but of
            the first devices of the cluster: a mesh, abstract or not, a shape or a number; all by default.
        mesh_shape: logical mesh over the cluster's first devices, where `method.devices` leaves it open. A pipeline has its own
            mesh for each stage and takes only the number of devices from it.

    Raises:
        OptionError: an option is of another type, or `mesh_shape` and `method.devices`, or `cluster` and `method.cluster`, differ.
        MemoryBudgetError: no plan fits into the memory budget, less the margin.
        ValueError: `method.devices` are more than the cluster has, or devices that are here, and not as many as it has.
    """
    method = ShardParallel() if method is None else method
    checked("method", method, _METHOD)
    cluster = any_cluster(cluster)
    if method.cluster is not None and any_cluster(method.cluster) != cluster:
        raise OptionError(
            f"cluster is {cluster.name!r}, but method.cluster is {short_repr(method.cluster)}; leave the method's out"
        )
    batch_argnums = checked_step(fun, args, batch_argnums)
    mesh = _mesh(method, cluster, mesh_shape)
    given = method.memory_budget
    workspace = 0 if all(pool.device.kind == "cpu" for pool in cluster.pools) else WORKSPACE_BYTES
    if given is not None:
        method = replace(method, memory_budget=max(1.0, (given - workspace) / MEMORY_MARGIN))
    try:
        return plan_by_method(method, fun, args, batch_argnums, Target(mesh, cluster)).plan
    except (MemoryBudgetError, NoStagesError) as error:
        if given is None:
            raise
        if isinstance(error, MemoryBudgetError):
            error = MemoryBudgetError(given, workspace + MEMORY_MARGIN * error.least, error.step)
        error.add_note(
            f"memory_budget is {given / 1e9:.3g} GB; plan_step keeps {workspace / 1e6:.1f} MB for workspaces of"
            f" libraries, and a margin of {MEMORY_MARGIN - 1:.0%} for XLA"
        )
        raise error from None


def planned_step(
    fun: Callable[..., Any],
    args: Sequence[Any],
    plan: Plan,
    *,
    batch_argnums: int | Sequence[int] = DEFAULT_BATCH,
) -> PlannedStep:
    """Trace `fun` as `plan` was made for, to ask `autopar.report` about the two without a device.

    Args:
        args: arrays or ShapeDtypeStructs, like those that the plan was made for.

    Raises:
        PlanError: the plan is for another step.
    """
    plan = checked("plan", plan, PLAN)
    return PlannedStep(trace_for(plan, fun, args, checked_step(fun, args, batch_argnums)), plan)


MEMORY_MARGIN = 1.13
"""How many times its estimate of memory the planner allows XLA to need. The largest excess in results/tables/fidelity.csv is 1.124."""


WORKSPACE_BYTES = 8 * 2**20
"""Bytes for what XLA:GPU gives cuBLAS to work in: 4 MiB for each matrix product, of which two may run at the same time (jaxlib 0.11.2)."""


_METHOD = instance(
    "one of autopar.methods that make a plan, e.g. autopar.ShardParallel()", PlanningMethod
)
_ARGS = instance("the arguments of the step, in a tuple or a list", tuple, list)


def checked_step(
    fun: Callable[..., Any], args: Sequence[Any], batch_argnums: int | Sequence[int]
) -> tuple[int, ...]:
    """The numbers of the batch arguments of a step, which is checked."""
    if not callable(fun) or hasattr(fun, "get_last_executable"):
        raise OptionError(
            f"fun is {short_repr(fun)}, expected a function of arrays; of a parallelized one take its .fun"
        )
    checked("args", args, _ARGS)
    try:
        jax.tree.map(abstract, args)
    except TypeError:
        check_arrays(args)
        raise
    return batch_arguments(checked("batch_argnums", batch_argnums, ARGNUMS), args)


def _mesh(
    method: PlanningMethod, cluster: AnyCluster, mesh_shape: Sequence[int] | None
) -> LogicalMesh:
    """The logical mesh that a step is planned for."""
    if mesh_shape is None:
        return mesh_on_cluster(cluster, method.devices)
    mesh = logical_mesh(checked("mesh_shape", mesh_shape, SHAPE))
    if method.devices is None:
        return mesh
    own = requested_mesh(method.devices, cluster.num_devices)
    agree = (
        own.num_devices == mesh.num_devices
        if isinstance(method, PipeshardParallel)
        else own.shape == mesh.shape
    )
    if not agree:
        raise OptionError(
            f"mesh_shape is {mesh.shape}, but method.devices make a mesh of shape {own.shape}; leave one out"
        )
    return own
