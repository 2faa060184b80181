"""Planning a pipeline: which layers form a stage, which devices it gets, and how it is sharded over them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod

from autopar.devices import logical_mesh
from autopar.pipeline.cut import cut_step
from autopar.pipeline.planned import num_layers
from autopar.pipeline.schedules import Pipeline, make_schedule
from autopar.pipeline.stage_graph import StageGraph, stage_graphs
from autopar.plan import PipelineSchedule, Plan, Stage, TimeSplit
from autopar.planning import coverage_warnings, stage_of
from autopar.sharding.options import AUTO, ShardingOptions
from autopar.sharding.planner import Shardings, plan_shardings
from autopar.trace import StepGraph
from simulator.cluster import Cluster
from simulator.costs import ClusterCosts, CostModel


class StageError(ValueError):
    """Layers can't be put on devices as asked."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a stage consists of.

    Attributes:
        layers: its layers, consecutive.
        devices: numbers of its devices in the cluster.
        shapes: logical mesh shapes to choose from.
        options: limits on its shardings.
    """

    layers: tuple[int, ...]
    devices: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    options: ShardingOptions = AUTO


@dataclass(frozen=True, slots=True)
class UniformStageOption:
    """Stages with the same number of devices, and of layers as far as possible.

    Attributes:
        num_stages: how many; by default as many as there are layers.
        submesh_physical_shape: (hosts, devices per host) of each stage; by default the cluster's devices are shared evenly.
        submesh_logical_shape: logical mesh shape of each stage; by default the cheapest is taken.
    """

    num_stages: int | None = None
    submesh_physical_shape: tuple[int, int] | None = None
    submesh_logical_shape: tuple[int, ...] | None = None

    def assign(self, num_layers: int, num_devices: int, options: ShardingOptions, num_chunks: int) -> list[Assignment]:
        """The stages, `num_chunks` on each submesh. Raises StageError when there are too few layers or devices."""
        stages = num_layers if self.num_stages is None else self.num_stages
        if stages < 1 or stages > num_layers:
            raise StageError(f"{stages} stages from {num_layers} layer(s); a stage needs at least one layer")
        if stages % num_chunks:
            raise StageError(f"{stages} stages can't be shared by submeshes with {num_chunks} chunks each")
        count = stages // num_chunks
        each = num_devices // count if self.submesh_physical_shape is None else prod(self.submesh_physical_shape)
        if each < 1 or each * count > num_devices:
            raise StageError(
                f"{count} submeshes of {max(each, 1)} device(s) need {count * max(each, 1)}, there are {num_devices}"
            )
        shapes = logical_shapes(each) if self.submesh_logical_shape is None else (tuple(self.submesh_logical_shape),)
        bounds = [num_layers * s // stages for s in range(stages + 1)]
        devices = [tuple(range(mesh * each, (mesh + 1) * each)) for mesh in range(count)]
        return [
            Assignment(tuple(range(bounds[s], bounds[s + 1])), devices[s % count], shapes, options)
            for s in range(stages)
        ]


@dataclass(frozen=True, slots=True)
class ManualStageOption:
    """Stages as given.

    Attributes:
        forward_stage_layer_ids: the layers of each stage.
        submesh_physical_shapes: (hosts, devices per host) of each stage.
        submesh_logical_shapes: logical mesh shape of each stage.
        submesh_autosharding_option_dicts: for each stage, fields of `ShardingOptions` to replace.
    """

    forward_stage_layer_ids: Sequence[Sequence[int]]
    submesh_physical_shapes: Sequence[tuple[int, int]]
    submesh_logical_shapes: Sequence[tuple[int, ...]]
    submesh_autosharding_option_dicts: Sequence[dict] = field(default_factory=tuple)

    def assign(self, num_layers: int, num_devices: int, options: ShardingOptions, num_chunks: int) -> list[Assignment]:
        """The stages. Raises StageError when they don't fit together."""
        if num_chunks != 1:
            raise StageError("a manual stage option gives each stage a submesh of its own; use a UniformStageOption")
        stages = [tuple(layers) for layers in self.forward_stage_layer_ids]
        count = len(stages)
        if [layer for layers in stages for layer in layers] != list(range(num_layers)):
            raise StageError(f"stages of layers {stages}, expected each of the {num_layers} layers once, in order")
        changes = self.submesh_autosharding_option_dicts or [{}] * count
        given = (self.submesh_physical_shapes, self.submesh_logical_shapes, changes)
        if any(len(each) != count for each in given):
            raise StageError(
                f"{count} stages, but {[len(each) for each in given]} physical shapes, logical shapes and options"
            )
        found, first = [], 0
        for layers, physical, logical, change in zip(stages, *given, strict=True):
            if prod(physical) != prod(logical):
                raise StageError(
                    f"a submesh of {tuple(physical)} devices can't be seen as a mesh of shape {tuple(logical)}"
                )
            devices = tuple(range(first, first + prod(physical)))
            first += len(devices)
            found.append(Assignment(layers, devices, (tuple(logical),), replace(options, **change)))
        if first > num_devices:
            raise StageError(f"the stages need {first} devices, there are {num_devices}")
        return found


type StageOption = UniformStageOption | ManualStageOption


def make_pipeline_plan(
    step: StepGraph,
    cluster: Cluster,
    stage_option: StageOption,
    options: ShardingOptions,
    schedule: PipelineSchedule,
    method: str,
    memory_budget: float | None = None,
    costs: CostModel | None = None,
) -> Plan:
    """The cheapest plan for `step`, traced in layers and marked, on the devices of `cluster`.

    Raises:
        StageError: the step has no layers, or they can't be put on the devices as asked.
        MemoryBudgetError: a stage does not fit.
    """
    layers = num_layers(step)
    if layers == 0:
        raise StageError(
            "the step has no layers: decorate the loss function with autopar.manual_layer_construction or"
            " autopar.automatic_layer_construction, or give the method a layer_option, and differentiate with autopar.grad"
        )
    assigned = stage_option.assign(layers, cluster.num_devices, options, schedule.num_chunks)
    pipeline = Pipeline(len(assigned) // schedule.num_chunks, step.num_micro_batches, schedule.num_chunks)
    phases = make_schedule(schedule.name, pipeline).phases
    cut = cut_step(step, [s for s, each in enumerate(assigned) for _ in each.layers], "W" in phases)
    budget = cluster.device.usable_bytes if memory_budget is None else memory_budget
    stages = [
        _plan_stage(found, each, cluster, costs or ClusterCosts(cluster), budget)
        for found, each in zip(stage_graphs(cut), assigned, strict=True)
    ]
    seconds = [found.seconds for _, found in stages]
    count = step.num_micro_batches
    slowest = stages[seconds.index(max(seconds))][1]
    return Plan(
        step=step.name,
        fingerprint=step.fingerprint,
        method=method,
        options=options,
        cluster=cluster.name,
        num_micro_batches=count,
        stages=tuple(stage for stage, _ in stages),
        pipeline=schedule,
        predicted_seconds=(sum(seconds) + (count - 1) * max(seconds)) / count,
        predicted_split=TimeSplit(**slowest.split._asdict()),
        predicted_bytes=round(max(found.peak_bytes for _, found in stages)),
        gap=max((found.gap for _, found in stages if found.gap is not None), default=None),
        planning_seconds=sum(found.solve_seconds for _, found in stages),
        warnings=(*dict.fromkeys(w for _, found in stages for w in found.warnings), *coverage_warnings(step)),
    )


def _plan_stage(
    found: StageGraph, assigned: Assignment, cluster: Cluster, costs: CostModel, budget: float
) -> tuple[Stage, Shardings]:
    """The cheapest of the logical mesh shapes."""
    plans = []
    for shape in assigned.shapes:
        mesh = logical_mesh(shape)
        shardings = plan_shardings(found.step, mesh, costs, assigned.options, budget)
        plans.append((shardings.seconds, shape, mesh, shardings))
    _, _, mesh, shardings = min(plans, key=lambda each: each[:2])
    stage = stage_of(found.step, mesh, shardings)
    return stage.model_copy(update={"layers": assigned.layers, "devices": assigned.devices}), shardings


def logical_shapes(num_devices: int) -> tuple[tuple[int, ...], ...]:
    """Shapes of a logical mesh of so many devices with at most two axes."""
    pairs = [(a, num_devices // a) for a in range(2, num_devices) if num_devices % a == 0 and a <= num_devices // a]
    return ((num_devices,), *pairs)
