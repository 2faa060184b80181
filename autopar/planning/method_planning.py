"""Planning of a step by a planning method, as one program or as a pipeline."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import Mesh

from autopar.checks import checked
from autopar.devices import Device, logical_mesh
from autopar.ir.spec import LogicalMesh
from autopar.ir.step_graph import MicrobatchError, StepGraph
from autopar.lowering.planned import PlannedStep
from autopar.methods import CLUSTER, PipeshardParallel, PlanningMethod
from autopar.pipeline.pipeline_schedules import has_backward, splits_backward
from autopar.pipeline.stage_options import AutoStageOption
from autopar.pipeline.submeshes import Submesh
from autopar.plan import Plan, PlanError
from autopar.planning.follow import follow_with_first_pass
from autopar.planning.last_results import start_search
from autopar.planning.offload_planning import plan_offloading
from autopar.planning.option_search import search
from autopar.planning.option_space import OptionSpace, layer_options, micro_batch_counts, schedules
from autopar.planning.pipeline_planning import Hosted, PipelinePlanning
from autopar.planning.recompute_planning import least_bytes
from autopar.planning.stage_construction import submesh_shapes
from autopar.planning.stage_problem import NoStagesError
from autopar.planning.step_planner import make_planned
from autopar.progress import progress_part
from autopar.recompute.offloading import OffloadError, offload
from autopar.recompute.rewriting import (
    RecomputeError,
    recompute,
    with_waits,
)
from autopar.sharding.selection_problem import InfeasibleError
from autopar.sharding.solve_within_memory import MemoryBudgetError
from autopar.tracing.shared_traces import shared_traces
from autopar.tracing.step_traces import TraceOptions
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
    *,
    suggests: bool = True,
) -> PlannedStep:
    """Trace and plan `fun` with `method`.

    Args:
        method: the planning method, with its options.
        fun: the training step.
        args: its arguments, arrays or ShapeDtypeStructs.
        batch: numbers of the arguments whose arrays have the batch as their first dim.
        target: the hardware to plan for.
        suggests: whether the error of a step that does not fit says if it would with recomputation,
            which takes another plan.

    Raises:
        MemoryBudgetError, NoStagesError: no plan fits on the devices.
        ClusterError: one mesh would span devices of different kinds.
    """
    planned = method.plan_with(_Planning(fun, args, batch, target, suggests))
    return follow_with_first_pass(planned, target.cluster)


@dataclass(frozen=True)
class _Planning:
    """A step and the hardware that it is planned for; `plan_by_method` describes the attributes."""

    fun: Callable[..., Any]
    args: Sequence[Any]
    batch: Sequence[int]
    target: Target
    suggests: bool

    def as_program(self, method: PlanningMethod) -> PlannedStep:
        """Plan the step as one program on the target's mesh."""
        cluster = single_pool(self.target.cluster, type(method).__name__)
        try:
            return self._program(method, cluster)
        except MemoryBudgetError as error:
            if self.suggests and method.remat != "auto":
                with suppress(InfeasibleError, MicrobatchError, TimeoutError):
                    found = self._program(replace(method, remat="auto"), cluster)
                    error.add_note(
                        f'with remat="auto" instead of "{method.remat}" it fits: the backward pass'
                        f" then computes {len(found.plan.recomputed)} equations again"
                    )
            raise

    def _program(self, method: PlanningMethod, cluster: Cluster) -> PlannedStep:
        """Plan the step as one program.

        If not everything that the backward pass reads fits, `remat="auto"` is compared with what
        the step's own `jax.checkpoint` computes again. If one of the two is not planned in time,
        the other is the plan.
        """
        step = self._traced(method)
        if method.remat != "auto":
            return self._traced_program(method, cluster, step)
        found: list[PlannedStep] = []
        errors: list[MemoryBudgetError | TimeoutError] = []
        try:
            found.append(self._traced_program(method, cluster, step))
            if not found[0].plan.memory_limited:
                return found[0]
        except (MemoryBudgetError, TimeoutError) as error:
            errors.append(error)
        keeping = replace(method, remat="keep")
        own = self._traced(keeping)
        if own.fingerprint != step.fingerprint:
            try:
                found.append(self._traced_program(keeping, cluster, own))
            except (MemoryBudgetError, TimeoutError) as error:
                errors.append(error)
        if not found:
            raise min(errors, key=least_bytes)
        return min(found, key=lambda planned: planned.plan.predicted_seconds)

    def _traced(self, method: PlanningMethod) -> StepGraph:
        """Trace the step as one program."""
        with progress_part(0, _TRACING):
            step = trace(
                self.fun,
                self.args,
                self.batch,
                method.num_micro_batches,
                TraceOptions(
                    exactness=method.exactness,
                    keeps_remat=method.remat == "keep",
                    keeps_constraints=method.sharding.mode == "manual",
                ),
            )
            return with_waits(step)

    def _traced_program(
        self, method: PlanningMethod, cluster: Cluster, step: StepGraph
    ) -> PlannedStep:
        with progress_part(_TRACING, 1):
            return plan_offloading(
                lambda step, offloads: make_planned(
                    step,
                    self.target.mesh,
                    cluster,
                    method.sharding_of(step),
                    type(method).__name__,
                    memory_budget=method.memory_budget,
                    remat=method.remat,
                    offloads=offloads,
                ),
                step,
                method.offload,
            )

    def as_pipeline(self, method: PipeshardParallel) -> PlannedStep:
        """Plan the step in stages on the target's devices."""
        without, state, values = Hosted(), Hosted(state=True), Hosted(values=True)
        match method.offload:
            case "none":
                return self._pipeline(method, without)
            case "optimizer":
                return self._pipeline(method, state)
            case "activations":
                return self._fastest_pipeline(method, (without,), (values,))
            case "auto" if method.may_offload_activations:
                both = Hosted(state=True, values=True)
                return self._fastest_pipeline(method, (without,), (state, values), (both,))
            case "auto":
                return self._fastest_pipeline(method, (without,), (state,))

    def _fastest_pipeline(
        self, method: PipeshardParallel, *choices: tuple[Hosted, ...]
    ) -> PlannedStep:
        """Return the fastest plan of the first alternatives among which one fits.

        Args:
            method: the method.
            choices: in order of preference, alternatives of what is in host memory.
        """
        error: MemoryBudgetError | NoStagesError | None = None
        for alternatives in choices:
            found: list[PlannedStep] = []
            for hosted in alternatives:
                try:
                    found.append(self._pipeline(method, hosted))
                except (MemoryBudgetError, NoStagesError) as does_not_fit:
                    error = does_not_fit
            if found:
                return min(found, key=lambda planned: planned.plan.predicted_seconds)
        assert error is not None
        raise error

    def _pipeline(self, method: PipeshardParallel, hosted: Hosted) -> PlannedStep:
        """Return the fastest plan among all combinations of the method's open options."""
        stages = method.stages
        mesh = self.target.mesh
        cluster = self.target.cluster.first_devices(mesh.num_devices)
        devices = self.target.devices
        planning = PipelinePlanning(
            method,
            self.fun,
            self.args,
            self.batch,
            cluster,
            hosted,
            list(devices.values()) if devices else None,
        )
        leaves = [leaf for i in self.batch for leaf in jax.tree.leaves(self.args[i])]
        rows = [leaf.shape[0] for leaf in leaves if getattr(leaf, "shape", ())]
        counts = micro_batch_counts(method.num_micro_batches, rows)
        with shared_traces():
            layers = method.layer_option
            if layers == "auto":
                with progress_part(0, _FIRST_TRACES):
                    own = planning.own_microbatches() if len(counts) > 1 else None
                    layers = planning.layers_of_step(own if own in counts else counts[0])
            pairs = schedules(method.pipeline_schedule, method.chunks)
            space = OptionSpace(
                counts,
                layer_options(layers),
                [pair for pair in pairs if not (hosted.values and splits_backward(pair[0]))],
                _whole_step_meshes(method, cluster, mesh),
            )
            name = type(method).__name__
            with progress_part(_FIRST_TRACES, 1):
                try:
                    step, plan = search(planning, space, stages, name, start_search())
                except (MemoryBudgetError, NoStagesError):
                    if not isinstance(stages, AutoStageOption) or stages.profile:
                        raise
                    planning = replace(planning, room=_LARGEST_ROOM)
                    step, plan = search(planning, space, stages, name, start_search())
                numbers = planning.offloaded_results(plan)
                return PlannedStep(step, plan.model_copy(update={"offloaded_results": numbers}))


_TRACING = 0.4
"""Usual share of tracing in the time of planning a step as one program."""

_LARGEST_ROOM = 1.2
"""Room for automatic stages if none are estimated to fit: estimates may be too large by as much."""

_FIRST_TRACES = 0.1
"""Usual share of the choice of layers in the time of planning a pipeline."""


def _whole_step_meshes(
    method: PipeshardParallel, cluster: AnyCluster, mesh: LogicalMesh
) -> list[LogicalMesh]:
    """Return the meshes on which the step is a candidate as one program.

    They have the shapes that a single stage may have, so that a pipeline of one stage is compared
    with the program that it would be without phases. A `jax.sharding.Mesh` is kept as it is.
    """
    stages = method.stages
    is_open = (
        method.pipeline_schedule == "auto"
        and isinstance(stages, AutoStageOption)
        and not stages.profile
    )
    if not is_open or not isinstance(cluster, Cluster):
        return []
    if isinstance(method.devices, Mesh):
        return [mesh]
    assert isinstance(stages, AutoStageOption)
    whole = Submesh(0, cluster.hosts, cluster.devices_per_host)
    shapes = submesh_shapes(whole, stages.submesh_logical_shape_space)
    return list(dict.fromkeys([mesh, *map(logical_mesh, shapes)]))


def trace_for(
    plan: Plan, fun: Callable[..., Any], args: Sequence[Any], batch_argnums: Sequence[int]
) -> StepGraph:
    """Trace `fun` the way it was traced for `plan`.

    Args:
        plan: a plan for `fun`.
        fun: the training step.
        args: its arguments, arrays or ShapeDtypeStructs.
        batch_argnums: numbers of the arguments whose arrays have the batch as their first dim.

    Raises:
        PlanError: the plan computes equations again, or offloads values, that this step does not
            have.
    """
    schedule = plan.schedule
    marked = not schedule.is_whole_step
    forward = marked and not has_backward(schedule.name)
    count, layers = plan.num_micro_batches, schedule.layer_option
    keeps_remat = plan.remat == "keep"
    exactness = plan.exactness
    step = trace(
        fun,
        args,
        batch_argnums,
        count,
        TraceOptions(
            layers=layers,
            marked=marked,
            forward=forward,
            exactness=exactness,
            keeps_remat=keeps_remat,
            keeps_constraints=plan.options.mode == "manual",
        ),
    )
    step = step if marked else with_waits(step)
    try:
        return recompute(
            offload(step, plan.offloaded), plan.recomputed, plan.offloaded_results, marked
        )
    except (OffloadError, RecomputeError) as error:
        raise PlanError(f"this plan is for another step: {error}; plan the step again") from error


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
