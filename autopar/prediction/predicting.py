"""Plans and predictions for a cluster that need not be here: `plan_step`, `compile_step`, `predict`, `simulate`."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import jax

from autopar._cpython import builds_graphs
from autopar.checks import SHAPE, OptionError, checked, instance, one_of, shown, that, whole
from autopar.devices import logical_mesh, mesh_meant, mesh_on
from autopar.ir.control_flow import MARKERS, repeats
from autopar.ir.equation_work import kernel_of
from autopar.ir.graph import aval_of
from autopar.ir.spec import LogicalMesh
from autopar.ir.step_graph import StepGraph
from autopar.lowering.compilation import compile_planned
from autopar.lowering.planned import Planned, PlannedStep, as_planned
from autopar.methods import PLAN, PipeshardParallel, PlanningMethod, ShardParallel
from autopar.plan import Plan
from autopar.planning.method_planning import Target, any_cluster, plan_by_method, trace_for
from autopar.planning.stage_problem import NoStagesError
from autopar.prediction.analytic import analytic_program
from autopar.sharding.planner import MemoryBudgetError
from autopar.tracing.arguments import (
    ARGNUMS,
    AUTO_ARGNUMS,
    DEFAULT_BATCH,
    Argnums,
    batch_arguments,
    check_arrays,
    donated_arguments,
    leaves_of,
)
from autopar.tracing.trace import abstract
from simulator.breakdown import predict as prediction_of_program
from simulator.cost_fingerprint import cost_fingerprint
from simulator.engine import simulate as timeline_of
from simulator.heterogeneous import AnyCluster
from simulator.hlo.provenance import part_of
from simulator.prediction import Prediction
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
            f"cluster is {cluster.name!r}, but method.cluster is {shown(method.cluster)}; leave the method's out"
        )
    batch_argnums = _checked_step(fun, args, batch_argnums)
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


MEMORY_MARGIN = 1.13
"""How many times its estimate of memory the planner allows XLA to need. The largest excess in results/tables/fidelity.csv is 1.124."""


WORKSPACE_BYTES = 8 * 2**20
"""Bytes for what XLA:GPU gives cuBLAS to work in: 4 MiB for each matrix product, of which two may run at the same time (jaxlib 0.11.2)."""


_METHOD = instance("one of autopar.methods that make a plan, e.g. autopar.ShardParallel()", PlanningMethod)
_PLANNED = that(
    "a simulator.Program, or a step and its plan, as get_executable gives them",
    lambda planned: isinstance(planned, Program) or (hasattr(planned, "step") and hasattr(planned, "plan")),
)
_ARGS = instance("the arguments of the step, in a tuple or a list", tuple, list)


def _checked_step(fun: Callable[..., Any], args: Sequence[Any], batch_argnums: int | Sequence[int]) -> tuple[int, ...]:
    """The numbers of the batch arguments of a step, which is checked."""
    if not callable(fun) or hasattr(fun, "get_last_executable"):
        raise OptionError(f"fun is {shown(fun)}, expected a function of arrays; of a parallelized one take its .fun")
    checked("args", args, _ARGS)
    try:
        jax.tree.map(abstract, args)
    except TypeError:
        check_arrays(args)
        raise
    return batch_arguments(checked("batch_argnums", batch_argnums, ARGNUMS), args)


def _mesh(method: PlanningMethod, cluster: AnyCluster, mesh_shape: Sequence[int] | None) -> LogicalMesh:
    """The logical mesh that a step is planned for."""
    if mesh_shape is None:
        return mesh_on(cluster, method.devices)
    mesh = logical_mesh(checked("mesh_shape", mesh_shape, SHAPE))
    if method.devices is None:
        return mesh
    own = mesh_meant(method.devices, cluster.num_devices)
    agree = own.num_devices == mesh.num_devices if isinstance(method, PipeshardParallel) else own.shape == mesh.shape
    if not agree:
        raise OptionError(
            f"mesh_shape is {mesh.shape}, but method.devices make a mesh of shape {own.shape}; leave one out"
        )
    return own


def predict(
    fun: Callable[..., Any],
    args: Sequence[Any],
    plan: Plan,
    cluster: AnyCluster | str | Path,
    *,
    donate_argnums: Argnums = "auto",
    batch_argnums: int | Sequence[int] = DEFAULT_BATCH,
    fidelity: Fidelity = "compiled",
) -> Timeline:
    """Predict what happens when in a step, and per-device memory, on a cluster that need not be here: `compile_step`, simulated.

    `simulate` says where the time goes.
    """
    cluster = any_cluster(cluster)
    program = compile_step(
        fun, args, plan, cluster, donate_argnums=donate_argnums, batch_argnums=batch_argnums, fidelity=fidelity
    )
    return timeline_of(program, cluster)


def compile_step(
    fun: Callable[..., Any],
    args: Sequence[Any],
    plan: Plan,
    cluster: AnyCluster | str | Path,
    *,
    donate_argnums: Argnums = "auto",
    batch_argnums: int | Sequence[int] = DEFAULT_BATCH,
    fidelity: Fidelity = "compiled",
) -> Program:
    """The program of a plan for the GPUs of a cluster that need not be here.

    `simulator.simulate` times it, `simulator.save_program` keeps it, for `python -m simulator predict`, say.

    Args:
        fidelity: "compiled": as XLA compiles it, on this machine; memory is the compiler's buffer assignment. "analytic": as the
            planner counts, in little more than it takes to trace; what is donated is then what a step carries on.
    """
    plan = checked("plan", plan, PLAN)
    step = trace_for(plan, fun, args, _checked_step(fun, args, batch_argnums))
    return _program(PlannedStep(step, plan), any_cluster(cluster), donate_argnums, fidelity)


def simulate(
    planned: Planned | Program,
    cluster: AnyCluster | str | Path,
    *,
    donate_argnums: Argnums = "auto",
    fidelity: Fidelity = "compiled",
    tokens: int = 0,
) -> Prediction:
    """What one step takes on a cluster that need not be here, and where its time and its memory go.

    Args:
        planned: a step and its plan, as `parallelize(...).get_executable(...)` gives them; or a program of them.
        donate_argnums, fidelity: as of `compile_step`, which this does for a plan.
        tokens: that the step learns from, for the throughput.
    """
    cluster = any_cluster(cluster)
    tokens = checked("tokens", tokens, whole(0))
    checked("planned", planned, _PLANNED)
    if not isinstance(planned, Program):
        planned = _program(planned, cluster, donate_argnums, fidelity)
    return prediction_of_program(planned, cluster, tokens=tokens)


def _program(planned: Planned, cluster: AnyCluster, donate_argnums: Argnums, fidelity: Fidelity) -> Program:
    checked("fidelity", fidelity, one_of(*get_args(Fidelity)))
    donate_argnums = checked("donate_argnums", donate_argnums, AUTO_ARGNUMS)
    step = planned.step
    whole = as_planned(planned)
    if fidelity == "analytic":
        program = analytic_program(whole, cluster)
    else:
        donated = leaves_of(step.in_avals, donated_arguments(donate_argnums, step.in_avals))
        program = compile_planned(whole, cluster, donated)[0]
    rows = [jax.tree.leaves(step.in_avals)[i].shape[0] for i in step.batch]
    costed_for = cost_fingerprint(program, cluster) if fidelity == "analytic" else ""
    needed, examples = _needed_flops(step), max(rows, default=0)
    return replace(program, model_flops=needed, examples=examples, costed_for=costed_for)


def _needed_flops(step: StepGraph) -> float:
    """FLOP of the products and convolutions that a step needs, on however many devices, nothing computed twice."""
    body = {number for number, _ in step.microbatching.body} if step.microbatching else set()
    total = 0.0
    for number, (eqn, times) in enumerate(zip(step.jaxpr.eqns, repeats(step.jaxpr.eqns), strict=True)):
        if eqn.primitive in MARKERS or not eqn.outvars or part_of(str(eqn.source_info.name_stack)) == "recompute":
            continue
        kernel = kernel_of(eqn, [aval_of(atom).shape for atom in eqn.invars], 0.0)
        if kernel.kind != "memory":
            total += kernel.flops * times * (step.num_micro_batches if number in body else 1)
    return total
