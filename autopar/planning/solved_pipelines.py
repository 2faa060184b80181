"""Pipelines of solved stages: their plan, and their predicted seconds and memory."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from jax.extend.core import Var

from autopar.devices import logical_mesh
from autopar.ir.array_sizes import value_bytes
from autopar.ir.control_flow import OPENING
from autopar.ir.graph import source_line
from autopar.ir.step_graph import StepGraph
from autopar.layering.scan_layers import LAYERS_IN_LOOPS
from autopar.microbatch.exactness import exactness_of
from autopar.pipeline.partition import Partition
from autopar.pipeline.pipeline_schedules import Schedule
from autopar.pipeline.stage_graph import StageGraph
from autopar.pipeline.stage_options import Assignment
from autopar.plan import MemorySplit, PipelineSchedule, Plan, TimeSplit
from autopar.plan_stages import Stage
from autopar.planning.stage_costs import SolvedStage
from autopar.planning.step_planner import coverage_warnings, stage_of
from autopar.planning.transfer_costs import transfer_seconds
from autopar.primitives import is_product
from autopar.recompute.offloading import offloaded_inputs
from autopar.sharding.options import ShardingOptions
from simulator.costs.cost_model import CostModel
from simulator.memory import Role, apportion, sum_roles


@dataclass(frozen=True, slots=True)
class SolvedPipeline:
    """Stages on their devices with their shardings.

    Attributes:
        assignments: layers and devices of each stage.
        graphs: each stage as a step.
        stages: sharding and costs of each stage.
        seconds: predicted time of a step.
        memory: bytes of the fullest device by role.
    """

    assignments: Sequence[Assignment]
    graphs: list[StageGraph]
    stages: list[SolvedStage]
    seconds: float
    memory: Mapping[Role, int]

    def plan(
        self,
        step: StepGraph,
        options: ShardingOptions,
        cluster: str,
        schedule: PipelineSchedule,
        method: str,
        planning_seconds: float,
    ) -> Plan:
        """Return the plan of the pipeline.

        Args:
            step: the whole step. The other arguments are fields of the plan.
            options: limits on shardings.
            cluster: name of the cluster.
            schedule: the order in which the stages run.
            method: name of the method.
            planning_seconds: seconds that planning took.
        """
        shardings = [stage.shardings for stage in self.stages]
        slowest = max(self.stages, key=lambda stage: stage.seconds).shardings
        gaps = [sharding.gap for sharding in shardings if sharding.gap is not None]
        warnings = dict.fromkeys(text for sharding in shardings for text in sharding.warnings)
        planned = zip(self.graphs, self.assignments, self.stages, strict=True)
        return Plan(
            step=step.name,
            fingerprint=step.fingerprint,
            method=method,
            options=options,
            cluster=cluster,
            num_micro_batches=step.num_micro_batches,
            schedule=schedule,
            planning_seconds=planning_seconds,
            stages=tuple(_plan_stage(*parts) for parts in planned),
            predicted_seconds=self.seconds,
            predicted_split=TimeSplit(**slowest.split._asdict()),
            predicted_bytes=sum(self.memory.values()),
            predicted_memory=MemorySplit(**self.memory),
            gap=max(gaps, default=None),
            memory_limited=any(sharding.memory_limited for sharding in shardings),
            **asdict(exactness_of(step)),
            offloaded=offloaded_inputs(step),
            warnings=(*warnings, *_light_stage_warnings(self.graphs), *coverage_warnings(step)),
        )


def _light_stage_warnings(graphs: Sequence[StageGraph]) -> tuple[str, ...]:
    """Return a warning if stages have no matrix product or convolution before the update."""
    light = [number for number, graph in enumerate(graphs) if not _has_product(graph)]
    if not light or len(light) == len(graphs):
        return ()
    listed = ", ".join(map(str, light))
    lines = dict.fromkeys(line for graph in graphs for line in _lines_of_loops(graph))
    loops = f"; each loop is in one layer, at {', '.join(lines)}: {LAYERS_IN_LOOPS}"
    return (
        f"stages without a matrix product or convolution: {listed} of {len(graphs)}; their devices"
        f" do little, so fewer layers and stages are faster{loops if lines else ''}",
    )


def _lines_of_loops(graph: StageGraph) -> list[str]:
    """Return the lines of the loops in the forward tasks of a stage that has a product."""
    if not _has_product(graph):
        return []
    return [
        source_line(eqn)
        for task, eqns in graph.tasks.items()
        if task.phase == "F"
        for _, eqn in eqns
        if eqn.primitive in OPENING
    ]


def _has_product(graph: StageGraph) -> bool:
    return any(
        is_product(eqn)
        for task, eqns in graph.tasks.items()
        if task.phase != "U"
        for _, eqn in eqns
    )


def _plan_stage(graph: StageGraph, assignment: Assignment, solved: SolvedStage) -> Stage:
    stage = stage_of(graph.step, logical_mesh(solved.shape), solved.shardings)
    return stage.model_copy(update={"layers": assignment.layers, "devices": assignment.devices})


def fullest_device(schedule: Schedule, stages: Sequence[SolvedStage]) -> Mapping[Role, int]:
    """Return the bytes of the fullest device by role, if its stages peak at the same time."""
    memory: dict[int, dict[Role, int]] = defaultdict(dict)
    for number, stage in enumerate(stages):
        num_bytes = round(stage.scheduled_bytes(schedule.waiting(number)))
        roles = apportion(stage.shardings.roles_at_peak, num_bytes, "activations")
        mesh = schedule.mesh_of(number)
        memory[mesh] = sum_roles(memory[mesh], roles)
    return max(memory.values(), key=lambda roles: sum(roles.values()))


def makespan(
    schedule: Schedule,
    partition: Partition,
    stages: Sequence[SolvedStage],
    assignments: Sequence[Assignment],
    costs: CostModel,
) -> float:
    """Return the predicted seconds of a step, with the transfers between neighbouring stages."""
    transfers: dict[tuple[int, int], float] = {}
    for (source, destination), num_bytes in _crossing_bytes(partition).items():
        seconds = transfer_seconds(
            costs, num_bytes, assignments[source].devices, assignments[destination].devices
        )
        meshes = schedule.mesh_of(source), schedule.mesh_of(destination)
        transfers[meshes] = max(seconds, transfers.get(meshes, 0.0))
    return schedule.makespan(
        lambda task: stages[task.stage].phases.get(task.phase, 0.0),
        lambda source, destination: transfers.get((source, destination), 0.0),
    )


def _crossing_bytes(partition: Partition) -> Counter[tuple[int, int]]:
    """Return the bytes of one microbatch between neighbouring stages, by source and destination.

    A value is sent to a stage once, however many of its tasks read it.
    """
    crossings: set[tuple[Var, int, int]] = set()
    for task, reads in partition.reads.items():
        if task.phase == "U":
            continue
        for var in reads:
            producer = partition.producers.get(var)
            if producer is None or producer.phase == "U":
                continue
            if abs(producer.stage - task.stage) == 1:
                crossings.add((var, producer.stage, task.stage))
    num_bytes: Counter[tuple[int, int]] = Counter()
    for var, source, destination in crossings:
        num_bytes[source, destination] += value_bytes(var)
    return num_bytes
