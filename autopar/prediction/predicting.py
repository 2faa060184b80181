"""Predictions of plans for a cluster that need not be here: `compile_step`, `simulate`, `predict`."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import jax

from autopar.checks import checked, integer, one_of
from autopar.ir.control_flow import MARKERS, repeats
from autopar.ir.graph import aval_of
from autopar.ir.step_graph import StepGraph
from autopar.lowering.compilation import compile_planned
from autopar.lowering.planned import Planned, PlannedStep, as_planned
from autopar.methods import PLAN
from autopar.plan import Plan
from autopar.planning.method_planning import any_cluster, trace_for
from autopar.planning.plan_step import checked_step
from autopar.prediction.analytic import analytic_program
from autopar.primitives.equation_work import kernel_of
from autopar.tracing.arguments import (
    AUTO_ARGNUMS,
    DEFAULT_BATCH,
    Argnums,
    donated_arguments,
    leaves_of,
)
from simulator.costs.cost_fingerprint import cost_fingerprint
from simulator.engine.breakdown import prediction_of
from simulator.engine.prediction import Prediction
from simulator.engine.simulation import simulate as simulate_program
from simulator.engine.timeline import Timeline
from simulator.hardware.heterogeneous import AnyCluster
from simulator.hlo.provenance import phase_of
from simulator.program import Program

Fidelity = Literal["compiled", "analytic"]
"""Whose program a prediction is of: XLA's, or the planner's."""


def simulate(
    fun: Callable[..., Any],
    args: Sequence[Any],
    plan: Plan,
    cluster: AnyCluster | str | Path,
    *,
    donate_argnums: Argnums = "auto",
    batch_argnums: int | Sequence[int] = DEFAULT_BATCH,
    fidelity: Fidelity = "compiled",
) -> Timeline:
    """Return what happens when in a step of a plan, and per-device memory, on a cluster that need not be here.

    Arguments as of `compile_step`, whose program is simulated.
    """
    cluster = any_cluster(cluster)
    program = compile_step(
        fun,
        args,
        plan,
        cluster,
        donate_argnums=donate_argnums,
        batch_argnums=batch_argnums,
        fidelity=fidelity,
    )
    return simulate_program(program, cluster)


def predict(
    fun: Callable[..., Any],
    args: Sequence[Any],
    plan: Plan,
    cluster: AnyCluster | str | Path,
    *,
    donate_argnums: Argnums = "auto",
    batch_argnums: int | Sequence[int] = DEFAULT_BATCH,
    fidelity: Fidelity = "compiled",
    tokens: int = 0,
) -> Prediction:
    """Return where the time and the memory of a step of a plan go on a cluster that need not be here; its `timeline` is `simulate`'s.

    Args:
        tokens: that the step learns from, for the throughput; the others as of `compile_step`.
    """
    cluster, tokens = any_cluster(cluster), checked("tokens", tokens, integer(0))
    timeline = simulate(
        fun,
        args,
        plan,
        cluster,
        donate_argnums=donate_argnums,
        batch_argnums=batch_argnums,
        fidelity=fidelity,
    )
    return prediction_of(timeline, cluster, tokens=tokens)


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
    """Return the program of a plan for the GPUs of a cluster that need not be here.

    `simulator.simulate` times it, `simulator.save_program` keeps it, for `python -m simulator predict`, say.

    Args:
        fidelity: "compiled": as XLA compiles it, on this machine; memory is the compiler's buffer assignment. "analytic": as the
            planner counts, in little more than it takes to trace; what is donated is then what a step carries on.
    """
    plan = checked("plan", plan, PLAN)
    step = trace_for(plan, fun, args, checked_step(fun, args, batch_argnums))
    return program_of(PlannedStep(step, plan), any_cluster(cluster), donate_argnums, fidelity)


def program_of(
    planned: Planned, cluster: AnyCluster, donate_argnums: Argnums, fidelity: Fidelity
) -> Program:
    """Return the program of a planned step for a cluster; arguments as of `compile_step`."""
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
    for number, (eqn, times) in enumerate(
        zip(step.jaxpr.eqns, repeats(step.jaxpr.eqns), strict=True)
    ):
        if (
            eqn.primitive in MARKERS
            or not eqn.outvars
            or phase_of(str(eqn.source_info.name_stack)) == "recompute"
        ):
            continue
        kernel = kernel_of(eqn, [aval_of(atom).shape for atom in eqn.invars], 0.0)
        if kernel.kind != "memory":
            total += kernel.flops * times * (step.num_micro_batches if number in body else 1)
    return total
