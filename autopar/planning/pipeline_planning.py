"""The traces of a step and the planners of its pipelines, as the search over options needs them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from autopar.devices import Device
from autopar.ir.spec import LogicalMesh
from autopar.ir.step_graph import StepGraph
from autopar.layering.layer_clustering import NoLayersError
from autopar.layering.layer_options import AutoLayerOption, LayerError, LayerOption
from autopar.layering.layer_scopes import has_light_layers, num_layers
from autopar.methods import PipeshardParallel
from autopar.pipeline.pipeline_schedules import has_backward
from autopar.pipeline.stage_options import UniformStageOption
from autopar.plan import Plan
from autopar.planning.pipeline_planner import PipelinePlanner
from autopar.planning.step_planner import make_planned
from autopar.recompute.offloading import offload, offloadable
from autopar.recompute.rewriting import recompute, results_saved_in_layers, with_waits
from autopar.tracing.step_traces import TraceOptions
from autopar.tracing.trace import own_microbatches, trace
from simulator.hardware.cluster import Cluster
from simulator.hardware.heterogeneous import AnyCluster


@dataclass(frozen=True, slots=True)
class Hosted:
    """What a pipeline keeps in host memory.

    Attributes:
        state: all state that only the update reads.
        values: all values of forward passes that only the backward pass of the same layer reads.
    """

    state: bool = False
    values: bool = False


_AUTO_LAYERS = (AutoLayerOption(8), AutoLayerOption(4), AutoLayerOption(2))
"""Layers of `layer_option="auto"` without decorators, in the order in which they are tried."""


@dataclass(frozen=True)
class PipelinePlanning:
    """Traces and planners of a function for one PipeshardParallel.

    Attributes:
        method: the method, with its options.
        fun: the training step.
        args: its arguments, arrays or ShapeDtypeStructs.
        batch: numbers of the arguments whose arrays have the batch as their first dim.
        cluster: the devices of the pipeline.
        hosted: what the pipeline keeps in host memory.
        devices: devices of this process by their number in the cluster, on which stages can be
            measured; None if the cluster is elsewhere.
        room: bytes that automatic stages may be estimated to need, divided by those of a device.
    """

    method: PipeshardParallel
    fun: Callable[..., Any]
    args: Sequence[Any]
    batch: Sequence[int]
    cluster: AnyCluster
    hosted: Hosted
    devices: Sequence[Device] | None = None
    room: float = 1.0

    def trace(self, num_micro_batches: int, layer_option: LayerOption | None) -> StepGraph:
        """Return the step in layers, with accumulated values marked and activations offloaded."""
        step = self._traced(num_micro_batches, layer_option)
        if not self.hosted.values:
            return step
        return recompute(step, (), results_saved_in_layers(step), in_layers=True)

    def offloaded_results(self, plan: Plan) -> tuple[int, ...]:
        """Return the numbers of the equations whose results a plan keeps in host memory."""
        if plan.schedule.is_whole_step or not self.hosted.values:
            return plan.offloaded_results
        step = self._traced(plan.num_micro_batches, plan.schedule.layer_option)
        return results_saved_in_layers(step)

    def _traced(self, num_micro_batches: int, layer_option: LayerOption | None) -> StepGraph:
        """Return the step in layers, with accumulated values marked and its state offloaded."""
        schedule = self.method.pipeline_schedule
        forward = schedule != "auto" and not has_backward(schedule)
        step = trace(
            self.fun,
            self.args,
            self.batch,
            num_micro_batches,
            TraceOptions(
                layers=layer_option, marked=True, forward=forward, exactness=self.method.exactness
            ),
        )
        return self._offloading(step)

    def _offloading(self, step: StepGraph) -> StepGraph:
        """Return the step with its state in host memory, if the pipeline keeps it there."""
        return offload(step, offloadable(step)) if self.hosted.state else step

    def planner(self, step: StepGraph) -> PipelinePlanner:
        """Return the planner of pipelines for a traced step."""
        return PipelinePlanner(
            step,
            self.cluster,
            self.method.sharding_of(step),
            self.method.memory_budget,
            devices=self.devices,
            room=self.room,
        )

    def own_microbatches(self) -> int | None:
        """Return the number of chunks whose gradients the step accumulates, if it does."""
        return own_microbatches(self.fun, self.args, self.batch, self.method.exactness)

    def layers_of_step(self, num_micro_batches: int) -> LayerOption | None:
        """Return None if decorators make layers, else the first option with no light layer."""
        if num_layers(self.trace(num_micro_batches, None).jaxpr):
            return None
        *options, last = self._auto_layers()
        for option in options:
            try:
                step = self.trace(num_micro_batches, option)
            except (LayerError, NoLayersError):
                continue
            if not has_light_layers(step.jaxpr):
                return option
        return last

    def _auto_layers(self) -> Sequence[AutoLayerOption]:
        """Return the options of `_AUTO_LAYERS` for which there are enough devices.

        There are as many uniform stages as layers, unless the number of stages is given.
        """
        stages, chunks = self.method.stages, self.method.chunks
        if not isinstance(stages, UniformStageOption) or stages.num_stages is not None:
            return _AUTO_LAYERS
        num_submeshes = self.cluster.num_devices // prod(stages.submesh_physical_shape or (1,))
        most = num_submeshes * (chunks if isinstance(chunks, int) else 1)
        return [option for option in _AUTO_LAYERS if option.layer_num <= most] or _AUTO_LAYERS[-1:]

    def plan_whole_step(
        self, num_micro_batches: int, mesh: LogicalMesh, limit: float
    ) -> tuple[StepGraph, Plan]:
        """Return the step and its plan as one program on a mesh.

        Args:
            num_micro_batches: number of microbatches.
            mesh: the logical mesh.
            limit: seconds of a known plan; see `make_planned`.
        """
        name = type(self.method).__name__
        exactness = self.method.exactness
        step = trace(
            self.fun, self.args, self.batch, num_micro_batches, TraceOptions(exactness=exactness)
        )
        step = self._offloading(with_waits(step))
        assert isinstance(self.cluster, Cluster), "one program spans one pool of hosts"
        options = self.method.sharding_of(step)
        budget = self.method.memory_budget
        planned = make_planned(
            step,
            mesh,
            self.cluster,
            options,
            name,
            memory_budget=budget,
            offloads=self.hosted.values,
            limit=limit,
        )
        return planned.step, planned.plan
