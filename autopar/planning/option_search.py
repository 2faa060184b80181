"""Search over the options of a pipeline: number of microbatches, schedule, chunks and remat.

Every combination of the open options is planned, and the plan with the least predicted time is
chosen. The step is traced once for each number of microbatches and each remat option; all schedules
share the costs of its layers. Where both schedule and stages are open, the step as one program is a
candidate as well, on each logical mesh that a single stage could have.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from typing import Literal, Protocol

from autopar.ir.spec import LogicalMesh
from autopar.ir.step_graph import MicrobatchError, StepGraph
from autopar.layering.layer_clustering import NoLayersError
from autopar.layering.layers import AutoLayerOption, LayerError, LayerOption, ManualLayerOption
from autopar.pipeline.pipeline_schedules import has_backward, schedule_kind, schedule_names
from autopar.pipeline.schedule_kinds import ScheduleError
from autopar.pipeline.stage_options import (
    AutoStageOption,
    StageError,
    StageOption,
    UniformStageOption,
)
from autopar.plan import WHOLE_STEP, PipelineSchedule, Plan
from autopar.planning.last_results import OptionTrial
from autopar.planning.pipeline_planner import PipelinePlanner
from autopar.planning.stage_problem import NoStagesError
from autopar.progress import log_progress, progress_part
from autopar.sharding.pins import ShardingError
from autopar.sharding.selection_problem import InfeasibleError

CHUNKS = (1, 2, 4)
"""Numbers of stages on each submesh that a search tries."""

_INTERLEAVED = "interleaved_1f1b"


@dataclass(frozen=True, slots=True)
class OptionSpace:
    """The combinations of options that a search tries.

    Attributes:
        micro_batch_counts: numbers of microbatches.
        layer_options: layer options, which say whether layers are rematerialised.
        schedules: names of schedules, with the number of stages on each submesh.
        whole_step_meshes: logical meshes of the candidates that run the step as one program.
    """

    micro_batch_counts: Sequence[int]
    layer_options: Sequence[LayerOption | None]
    schedules: Sequence[tuple[str, int]]
    whole_step_meshes: Sequence[LogicalMesh] = ()

    @property
    def has_choice(self) -> bool:
        """Whether there is more than one combination."""
        return self.num_combinations > 1

    @property
    def num_combinations(self) -> int:
        """Largest number of combinations that a search tries."""
        pipelines = len(self.layer_options) * len(self.schedules)
        return len(self.micro_batch_counts) * (pipelines + len(self.whole_step_meshes))


def micro_batch_counts(given: int | Literal["auto"], rows: Sequence[int]) -> list[int]:
    """Return the numbers of microbatches to try: powers of two that divide every batch.

    Args:
        given: number of microbatches, or "auto".
        rows: number of rows of each batch array.
    """
    if given != "auto":
        return [given]
    counts = [1]
    while rows and all(n % (2 * counts[-1]) == 0 for n in rows):
        counts.append(2 * counts[-1])
    return counts


def layer_options(given: LayerOption | None) -> list[LayerOption | None]:
    """Return the layer options to try: with and without remat if that is open."""
    if isinstance(given, AutoLayerOption | ManualLayerOption) and given.remat_layer == "auto":
        return [replace(given, remat_layer=remat) for remat in (False, True)]
    return [given]


def schedules(name: str, num_chunks: int | Literal["auto"]) -> list[tuple[str, int]]:
    """Return the schedules to try, with the number of stages on each submesh.

    Args:
        name: name of a schedule, or "auto".
        num_chunks: number of stages on each submesh, or "auto".
    """
    is_auto = name == "auto"
    names = [other for other in schedule_names() if has_backward(other)] if is_auto else [name]
    chunks = CHUNKS if num_chunks == "auto" else (num_chunks,)
    pairs = [
        (schedule, count)
        for schedule, count in product(names, chunks)
        if schedule_kind(schedule).num_chunks in (None, count)
    ]
    if not is_auto:
        return pairs
    # With one stage on each submesh, interleaving is 1f1b.
    return [(schedule, count) for schedule, count in pairs if schedule != _INTERLEAVED or count > 1]


class StepPlanning(Protocol):
    """The traces and planners of one function."""

    def trace(self, num_micro_batches: int, layer_option: LayerOption | None) -> StepGraph:
        """Return the step in layers, with its accumulated values marked."""
        ...

    def planner(self, step: StepGraph) -> PipelinePlanner:
        """Return the planner of pipelines for a traced step."""
        ...

    def plan_whole_step(self, num_micro_batches: int, mesh: LogicalMesh) -> tuple[StepGraph, Plan]:
        """Return the step and its plan as one program on a mesh."""
        ...


type _Candidates = tuple[StepGraph, Sequence[Plan]]
"""A traced step, and its plans for one combination of options."""

_PLANNING_ERRORS = (
    MicrobatchError,
    LayerError,
    NoLayersError,
    ScheduleError,
    StageError,
    NoStagesError,
    ShardingError,
    InfeasibleError,
)
"""Errors that mean that there is no plan for a combination."""


def search(
    planning: StepPlanning,
    space: OptionSpace,
    stage_option: StageOption,
    method: str,
    trials: list[OptionTrial],
) -> tuple[StepGraph, Plan]:
    """Return the traced step and the plan with the least predicted time.

    Args:
        planning: traces and plans the function.
        space: combinations of options to try.
        stage_option: layers and devices of the stages.
        method: name of the method, for the plan.
        trials: list to which every combination is appended with its outcome.

    Raises:
        ValueError: the error of the first combination, if there is no plan for any.
    """
    candidates: list[tuple[StepGraph, Plan]] = []
    planning_seconds = 0.0
    errors: list[ValueError] = []
    for count, schedule, mesh, attempt in _attempts(planning, space, stage_option, method):
        done = len(trials) / space.num_combinations
        try:
            with progress_part(done, done + 1 / space.num_combinations):
                step, plans = attempt()
        except _PLANNING_ERRORS as error:
            errors.append(error)
            trials.append(OptionTrial(count, schedule, None, str(error), mesh=mesh))
        else:
            best = min(plans, key=lambda plan: plan.predicted_seconds)
            seconds, num_bytes = best.predicted_seconds, best.predicted_bytes
            trials.append(OptionTrial(count, schedule, seconds, "", num_bytes, mesh))
            planning_seconds += sum(plan.planning_seconds for plan in plans)
            candidates.append((step, best))
        if space.has_choice:
            log_progress(str(trials[-1]), len(trials), space.num_combinations)
    if not candidates:
        raise errors[0]
    step, plan = min(candidates, key=lambda candidate: candidate[1].predicted_seconds)
    return step, plan.model_copy(update={"planning_seconds": planning_seconds})


def _attempts(
    planning: StepPlanning, space: OptionSpace, stage_option: StageOption, method: str
) -> Iterator[tuple[int, PipelineSchedule, LogicalMesh | None, Callable[[], _Candidates]]]:
    """Yield the options of each combination, and its planning.

    The options are the number of microbatches, the schedule, and the mesh of a step that runs as
    one program.
    """
    for mesh in space.whole_step_meshes:
        seconds: list[float] = []
        for count in space.micro_batch_counts:
            # Microbatches make one program faster only where memory limits its shardings.
            if len(seconds) < 2 or seconds[-1] < seconds[-2]:
                attempt = partial(_plan_whole_step, planning, count, mesh, seconds)
                yield count, WHOLE_STEP, mesh, attempt
    for count, option in product(space.micro_batch_counts, space.layer_options):
        planner = cache(partial(_planner, planning, count, option))  # one for all schedules
        for name, chunks in space.schedules:
            schedule = PipelineSchedule(name=name, num_chunks=chunks, layer_option=option)
            yield count, schedule, None, partial(_plans, planner, stage_option, schedule, method)


def _planner(planning: StepPlanning, count: int, option: LayerOption | None) -> PipelinePlanner:
    return planning.planner(planning.trace(count, option))


def _plan_whole_step(
    planning: StepPlanning, count: int, mesh: LogicalMesh, seconds: list[float]
) -> _Candidates:
    """Return the step and its plan, whose predicted time is appended to `seconds`."""
    step, plan = planning.plan_whole_step(count, mesh)
    seconds.append(plan.predicted_seconds)
    return step, [plan]


def _plans(
    planner_of_step: Callable[[], PipelinePlanner],
    stage_option: StageOption,
    schedule: PipelineSchedule,
    method: str,
) -> _Candidates:
    """Return the plans of one schedule.

    There is one plan, unless stages are to be found for several chunks on each submesh. Stage
    construction does not apply there; the plans have even stages on each number of submeshes that
    layers and devices allow.
    """
    with progress_part(0, _TRACING):
        planner = planner_of_step()
    with progress_part(_TRACING, 1):
        return planner.step, _plans_of_planner(planner, stage_option, schedule, method)


_TRACING = 0.2
"""Usual share of tracing in the time of planning a pipeline."""


def _plans_of_planner(
    planner: PipelinePlanner, stage_option: StageOption, schedule: PipelineSchedule, method: str
) -> Sequence[Plan]:
    """Return the plans of one schedule, see `_plans`."""
    if not isinstance(stage_option, AutoStageOption) or schedule.num_chunks == 1:
        return [planner.plan(stage_option, schedule, method)]
    num_layers, num_devices = planner.num_layers, planner.cluster.num_devices
    chunks = schedule.num_chunks
    plans: list[Plan] = []
    errors: list[ValueError] = []
    for num_meshes in range(2, num_devices + 1):
        if num_devices % num_meshes or num_layers < num_meshes * chunks:
            continue
        uniform = UniformStageOption(num_meshes * chunks)
        try:
            plans.append(planner.plan(uniform, schedule, method))
        except (ScheduleError, StageError, ShardingError, InfeasibleError) as error:
            errors.append(error)
    if plans:
        return plans
    if errors:
        raise errors[0]
    raise StageError(
        f"{num_layers} layer(s) are too few for {chunks} stages on each of several submeshes of"
        f" {num_devices} device(s)"
    )
