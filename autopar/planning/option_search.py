"""Search over the options of a pipeline: number of microbatches, schedule, chunks and remat.

The plan with the least predicted time of all combinations of the open options is chosen. No
combination is planned whose lower bound rules it out; bounds take the work of layers and the
bubbles of stages, but no solves of shardings. The step is traced once for each number of
microbatches and each remat option that is not ruled out before, and all schedules share the costs
of its layers. Where both schedule and stages are open, the step as one program is a candidate as
well, on each logical mesh that a single stage could have.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import inf
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
    found = _Search(planning, space, stage_option, method, trials)
    found.try_whole_steps()
    found.try_pipelines()
    return found.result()


@dataclass(frozen=True, slots=True)
class _Pipeline:
    """A combination of options of a pipeline.

    Attributes:
        number: number of the combination, in the order of the options.
        count: number of microbatches.
        schedule: the schedule, with its layer option.
    """

    number: int
    count: int
    schedule: PipelineSchedule

    @property
    def option(self) -> LayerOption | None:
        """The layer option."""
        return self.schedule.layer_option


class _Search:
    """A search in progress; see `search` for the arguments.

    Attributes:
        best: the fastest plan so far with its step and the number of its combination.
        planning_seconds: seconds of all plans.
        errors: errors of combinations without a plan, by number.
    """

    def __init__(
        self,
        planning: StepPlanning,
        space: OptionSpace,
        stage_option: StageOption,
        method: str,
        trials: list[OptionTrial],
    ) -> None:
        self.planning = planning
        self.space = space
        if space.whole_step_meshes and isinstance(stage_option, AutoStageOption):
            # A pipeline of one stage is the step as one program.
            min_stages = max(2, stage_option.min_stages)
            stage_option = replace(stage_option, min_stages=min_stages)
        self.stage_option = stage_option
        self.method = method
        self.trials = trials
        self.best: tuple[StepGraph, Plan, int] | None = None
        self.planning_seconds = 0.0
        self.errors: dict[int, ValueError] = {}
        self._bounds: dict[tuple[_Pipeline, int], float] = {}
        self._solved: set[tuple[_Pipeline, int]] = set()
        self._planners: dict[tuple[int, LayerOption | None], PipelinePlanner | ValueError] = {}

    @property
    def best_seconds(self) -> float:
        """Seconds of the fastest plan so far; infinite if there is none."""
        return self.best[1].predicted_seconds if self.best else inf

    def result(self) -> tuple[StepGraph, Plan]:
        """Return the step and the plan of the fastest combination.

        Raises:
            ValueError: the error of the first combination, if there is no plan for any.
        """
        if self.best is None:
            raise self.errors[min(self.errors)]
        step, plan, _ = self.best
        return step, plan.model_copy(update={"planning_seconds": self.planning_seconds})

    def try_whole_steps(self) -> None:
        """Plan the step as one program on each mesh.

        Microbatches make one program faster only where memory limits its shardings. So their number
        grows as long as the mesh that was the fastest one becomes faster.
        """
        meshes = list(self.space.whole_step_meshes)
        seconds = dict.fromkeys(meshes, inf)
        number = -len(meshes) * len(self.space.micro_batch_counts)
        for count in self.space.micro_batch_counts:
            fewer, seconds = seconds, dict.fromkeys(meshes, inf)
            for mesh in sorted(meshes, key=lambda mesh: fewer[mesh]):
                plan = partial(self.planning.plan_whole_step, count, mesh)
                found = self._try(number, count, WHOLE_STEP, plan, mesh)
                seconds[mesh] = found.predicted_seconds if found else inf
                number += 1
                if inf > seconds[mesh] >= min(fewer.values()):
                    return

    def try_pipelines(self) -> None:
        """Plan the pipelines, those with the least lower bounds first, until a bound is too slow.

        The bounds of a step in microbatches take its trace. Until there is one, the bounds are
        those of the largest number of microbatches below it that is traced.
        """
        space = self.space
        pairs = product(space.micro_batch_counts, space.layer_options)
        left = [
            _Pipeline(0, count, PipelineSchedule(name=name, num_chunks=chunks, layer_option=option))
            for (count, option), (name, chunks) in product(pairs, space.schedules)
        ]
        left = [replace(pipeline, number=number) for number, pipeline in enumerate(left)]
        if len(left) == 1:
            self._plan_pipeline(left[0])
            return
        for option in space.layer_options:
            self._trace(space.micro_batch_counts[0], option)
        while left:
            best = min(left, key=lambda pipeline: (self._bound(pipeline), pipeline.number))
            if self.best is not None and self._bound(best) >= self.best_seconds:
                break
            if not self._is_solved(best):
                self._solve_bound(best)
            elif (best.count, best.option) in self._planners:
                self._plan_pipeline(best)
                left.remove(best)
            else:
                near = [
                    other.count
                    for other in left
                    if (other.option, other.schedule) == (best.option, best.schedule)
                    and self._anchor(other) == self._anchor(best)
                    and (self.best is None or self._bound(other) < self.best_seconds)
                ]
                self._trace(near[len(near) // 2], best.option)
        for pipeline in left:
            reason = f"takes at least {self._bound(pipeline):.4g} s, by its work and bubbles"
            if self._bound(pipeline) == inf:
                reason = "does not fit in memory"
            self._record(OptionTrial(pipeline.count, pipeline.schedule, None, reason))

    def _trace(self, count: int, option: LayerOption | None) -> None:
        """Trace the step in microbatches, and keep its planner or the error."""
        done = len(self.trials) / self.space.num_combinations
        try:
            with progress_part(done, done):
                step = self.planning.trace(count, option)
                self._planners[count, option] = self.planning.planner(step)
        except _PLANNING_ERRORS as error:
            self._planners[count, option] = error

    def _anchor(self, pipeline: _Pipeline) -> int:
        """Return the largest traced number of microbatches that is not above a pipeline's."""
        return max(
            count
            for count, option in self._planners
            if option == pipeline.option and count <= pipeline.count
        )

    def _bound(self, pipeline: _Pipeline) -> float:
        """Return the best known lower bound of the seconds of a pipeline."""
        anchor = self._anchor(pipeline)
        if (pipeline, anchor) not in self._bounds:
            self._bounds[pipeline, anchor] = self._bound_from(anchor, pipeline, solves=False)
        return self._bounds[pipeline, anchor]

    def _is_solved(self, pipeline: _Pipeline) -> bool:
        return (pipeline, self._anchor(pipeline)) in self._solved

    def _solve_bound(self, pipeline: _Pipeline) -> None:
        """Replace a lower bound by one that takes rough solves of layers."""
        anchor = self._anchor(pipeline)
        self._solved.add((pipeline, anchor))
        bound = self._bound_from(anchor, pipeline, solves=True)
        self._bounds[pipeline, anchor] = max(self._bound(pipeline), bound)

    def _bound_from(self, anchor: int, pipeline: _Pipeline, *, solves: bool) -> float:
        planner = self._planners[anchor, pipeline.option]
        if not isinstance(planner, PipelinePlanner):
            return 0.0
        option, schedule, count = self.stage_option, pipeline.schedule, pipeline.count
        bound = planner.bound(option, schedule, count, solves=solves)
        return bound if anchor == count else _SLACK * bound

    def _plan_pipeline(self, pipeline: _Pipeline) -> None:
        """Plan a pipeline, if it may be faster than the best plan so far."""

        def plan() -> tuple[StepGraph, Plan]:
            if (pipeline.count, pipeline.option) not in self._planners:
                with progress_part(0, _TRACING):
                    self._trace(pipeline.count, pipeline.option)
            planner = self._planners[pipeline.count, pipeline.option]
            if not isinstance(planner, PipelinePlanner):
                raise planner
            with progress_part(_TRACING, 1):
                plans = _plans(
                    planner, self.stage_option, pipeline.schedule, self.method, self.best_seconds
                )
            self.planning_seconds += sum(plan.planning_seconds for plan in plans)
            return planner.step, min(plans, key=lambda plan: plan.predicted_seconds)

        self._try(pipeline.number, pipeline.count, pipeline.schedule, plan)

    def _try(
        self,
        number: int,
        count: int,
        schedule: PipelineSchedule,
        attempt: Callable[[], tuple[StepGraph, Plan]],
        mesh: LogicalMesh | None = None,
    ) -> Plan | None:
        """Plan a combination, record the outcome, and return the plan if there is one."""
        done = len(self.trials) / self.space.num_combinations
        try:
            with progress_part(done, done + 1 / self.space.num_combinations):
                step, plan = attempt()
        except _PLANNING_ERRORS as error:
            self.errors[number] = error
            self._record(OptionTrial(count, schedule, None, str(error), mesh=mesh))
            return None
        seconds, num_bytes = plan.predicted_seconds, plan.predicted_bytes
        self._record(OptionTrial(count, schedule, seconds, "", num_bytes, mesh))
        if mesh is not None:
            self.planning_seconds += plan.planning_seconds
        if self.best is None or (seconds, number) < (self.best_seconds, self.best[2]):
            self.best = step, plan, number
        return plan

    def _record(self, trial: OptionTrial) -> None:
        self.trials.append(trial)
        if self.space.has_choice:
            log_progress(str(trial), len(self.trials), self.space.num_combinations)


_SLACK = 0.99
"""Least work of an example in smaller microbatches, as a share of that in larger ones.

Smaller kernels are less efficient, but a number of rows may divide into tiles more evenly.
"""

_TRACING = 0.2
"""Usual share of tracing in the time of planning a pipeline."""


def _plans(
    planner: PipelinePlanner,
    stage_option: StageOption,
    schedule: PipelineSchedule,
    method: str,
    limit: float,
) -> Sequence[Plan]:
    """Return the plans of one schedule.

    There is one plan, unless stages are to be found for several chunks on each submesh. Stage
    construction does not apply there; the plans have even stages on each number of submeshes that
    layers and devices allow.
    """
    if not isinstance(stage_option, AutoStageOption) or schedule.num_chunks == 1:
        return [planner.plan(stage_option, schedule, method, limit)]
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
