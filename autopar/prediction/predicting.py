"""Predictions of a plan for a cluster whose devices need not be present.

`compile_step` returns the program of a step, `simulate` its timeline, and `predict` a summary of
time and memory.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, get_args

from autopar.checks import checked, integer, one_of
from autopar.ir.control_flow import MARKERS, repeats
from autopar.ir.step_graph import StepGraph
from autopar.lowering.compilation import compile_planned
from autopar.lowering.pass_programs import in_two_passes
from autopar.lowering.planned import Planned, PlannedStep, as_planned
from autopar.plan import Plan
from autopar.planning.method_planning import any_cluster
from autopar.planning.plan_step import planned_step
from autopar.prediction.analytic import analytic_program
from autopar.primitives import kernel_of
from autopar.primitives.fused_attention import check_capability
from autopar.primitives.ragged_products import products_per_row
from autopar.progress import progress_part
from autopar.tracing.arguments import (
    AUTO_ARGNUMS,
    Argnums,
    BatchArgnums,
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
"""The source of the program: XLA's compilation for the cluster, or the planner's model."""


class ProgramOptions(TypedDict, total=False):
    """The options of predictions of a planned step; see `compile_step`."""

    donate_argnums: Argnums
    fidelity: Fidelity


class StepOptions(ProgramOptions, total=False):
    """The options of predictions of a function and a plan; see `compile_step`."""

    batch_argnums: BatchArgnums


def simulate(
    fun: Callable[..., Any],
    args: Sequence[Any],
    plan: Plan,
    cluster: AnyCluster | str | Path,
    **options: Unpack[StepOptions],
) -> Timeline:
    """Return the timeline of a step on a cluster, with the memory of its devices.

    Args:
        fun: the step.
        args: its arguments, arrays or `jax.ShapeDtypeStruct`s.
        plan: the plan, made for this step.
        cluster: the cluster: a description, the name of a shipped one, or the path of a file.
        **options: `donate_argnums`, `batch_argnums` and `fidelity` of `compile_step`, whose
            program is simulated.

    Raises:
        PlanError: the plan is for another step.
        OptionError: an option has a type or a value that is not allowed.
    """
    cluster = any_cluster(cluster)
    return simulate_program(compile_step(fun, args, plan, cluster, **options), cluster)


def predict(
    fun: Callable[..., Any],
    args: Sequence[Any],
    plan: Plan,
    cluster: AnyCluster | str | Path,
    *,
    tokens: int = 0,
    **options: Unpack[StepOptions],
) -> Prediction:
    """Predict step time, its breakdown, throughput and memory per device on a cluster.

    Args:
        fun: the step.
        args: its arguments, arrays or `jax.ShapeDtypeStruct`s.
        plan: the plan, made for this step.
        cluster: the cluster: a description, the name of a shipped one, or the path of a file.
        tokens: number of tokens in the batch, for the throughput.
        **options: `donate_argnums`, `batch_argnums` and `fidelity` of `compile_step`.

    Returns:
        The prediction, in seconds and bytes. Its `timeline` is the result of `simulate`.

    Raises:
        PlanError: the plan is for another step.
        OptionError: an option has a type or a value that is not allowed.

    Example:
        >>> plan = autopar.plan_step(train_step, args, cluster="dgx_h100")
        >>> print(autopar.predict(train_step, args, plan, "dgx_h100"))
    """
    cluster = any_cluster(cluster)
    tokens = checked("tokens", tokens, integer(0))
    timeline = simulate(fun, args, plan, cluster, **options)
    return prediction_of(timeline, cluster, tokens=tokens)


def compile_step(
    fun: Callable[..., Any],
    args: Sequence[Any],
    plan: Plan,
    cluster: AnyCluster | str | Path,
    *,
    donate_argnums: Argnums = "auto",
    batch_argnums: BatchArgnums = "auto",
    fidelity: Fidelity = "compiled",
) -> Program:
    """Return the program of a step for a cluster.

    `simulator.simulate` turns it into a timeline. `simulator.save_program` writes it to a file, for
    example for `autopar simulate`.

    Args:
        fun: the step.
        args: its arguments, arrays or `jax.ShapeDtypeStruct`s.
        plan: the plan, made for this step.
        cluster: the cluster: a description, the name of a shipped one, or the path of a file.
        donate_argnums: as in `parallelize`.
        batch_argnums: as in `parallelize`.
        fidelity: "compiled" compiles the step with XLA, on this machine, for the GPUs of the
            cluster; memory is the compiler's buffer assignment. "analytic" uses the planner's model
            of costs and memory and takes little longer than tracing; it ignores `donate_argnums`
            and assumes that the state of the step is donated.

    Raises:
        PlanError: the plan is for another step; or it leaves decisions to XLA, and `fidelity` is
            "analytic".
        ClusterError: the step calls cuDNN's fused attention, which the GPUs of the cluster lack.
        ImportError: `fidelity` is "compiled", and `autopar[compile]` is not installed.
        OptionError: an option has a type or a value that is not allowed.
    """
    cluster = any_cluster(cluster)
    with progress_part(0, 0.5):
        planned = planned_step(fun, args, plan, batch_argnums=batch_argnums)
    with progress_part(0.5, 1):
        return program_of(planned, cluster, donate_argnums=donate_argnums, fidelity=fidelity)


def program_of(
    planned: Planned,
    cluster: AnyCluster,
    *,
    donate_argnums: Argnums = "auto",
    fidelity: Fidelity = "compiled",
) -> Program:
    """Return the program of a planned step for a cluster, with arguments as in `compile_step`."""
    checked("fidelity", fidelity, one_of(*get_args(Fidelity)))
    donate_argnums = checked("donate_argnums", donate_argnums, AUTO_ARGNUMS)
    step = planned.step
    planned_step = as_planned(planned)
    for number, stage in enumerate(planned_step.plan.stages):
        pool = cluster.pools[cluster.pool_of(stage.devices)]
        check_capability(planned_step.graphs[number].step.jaxpr.eqns, pool.device)
    donated = leaves_of(step.in_avals, donated_arguments(donate_argnums, step.in_avals))

    def of_all_passes(planned: PlannedStep, donated: frozenset[int]) -> Program:
        if fidelity == "analytic":
            program = analytic_program(planned, cluster)
        else:
            program, _ = compile_planned(planned, cluster, donated)
        if planned.first_pass is None:
            return program
        return in_two_passes(planned, of_all_passes(planned.first_pass, frozenset()), program)

    program = of_all_passes(planned_step, frozenset(donated))
    rows = [step.input_avals[i].shape[0] for i in step.batch]
    costed_for = cost_fingerprint(program, cluster) if fidelity == "analytic" else ""
    examples = max(rows, default=0)
    return replace(
        program, model_flops=_model_flops(step), examples=examples, costed_for=costed_for
    )


def _model_flops(step: StepGraph) -> float:
    """Return the FLOP of a step's products and convolutions, without recomputation or copies.

    What a first pass without gradients computes for each microbatch, the step computes again.
    """
    micro = step.microbatching
    body = {number for number, _ in micro.body} if micro else set()
    once = _flops(step, set(range(len(step.jaxpr.eqns))) - body)
    flops = once + step.num_micro_batches * _flops(step, body)
    if (first := step.first_pass) is not None:
        assert first.step.microbatching is not None
        tail = {number for number, _ in first.step.microbatching.tail}
        flops += _model_flops(first.step) if first.has_backward else _flops(first.step, tail)
    return flops


def _flops(step: StepGraph, numbers: Collection[int]) -> float:
    """Return the FLOP of some of a step's equations, in one microbatch if they run for each."""
    total = 0.0
    eqns = step.jaxpr.eqns
    for number, (eqn, times) in enumerate(zip(eqns, repeats(eqns), strict=True)):
        if (
            number not in numbers
            or eqn.primitive in MARKERS
            or not eqn.outvars
            or phase_of(str(eqn.source_info.name_stack)) == "recompute"
        ):
            continue
        kernel = kernel_of(eqn)
        if kernel.kind != "memory":
            total += kernel.flops / products_per_row(eqn) * times
    return total
