"""Search over the options of a pipeline: number of microbatches, schedule, chunks and remat.

The plan with the least predicted time of all combinations of the open options is chosen. No
combination is planned whose lower bound rules it out; bounds take the work and memory of layers,
the bubbles of stages, and rough solves of the shardings of one layer. The step is traced once for
each number of microbatches and each remat option that is not ruled out before, and all schedules
share the costs of its layers. Where both schedule and stages are open, the step as one program is a
candidate as well, on each logical mesh that a single stage could have.
"""

import traceback
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import ceil, inf

from autopar.ir.spec import LogicalMesh
from autopar.ir.step_graph import MicrobatchError, StepGraph
from autopar.layering.layer_clustering import NoLayersError
from autopar.layering.layer_options import LayerError, LayerOption
from autopar.pipeline.schedule_kinds import ScheduleError
from autopar.pipeline.stage_options import (
    AutoStageOption,
    StageError,
    StageOption,
    UniformStageOption,
)
from autopar.plan import PipelineSchedule, Plan
from autopar.planning.chunked_stages import even_mesh_counts
from autopar.planning.last_results import OptionTrial
from autopar.planning.option_space import Combination, OptionSpace, holds_as_much
from autopar.planning.pipeline_planner import BOUND_EFFORTS, BoundEffort, PipelinePlanner
from autopar.planning.pipeline_planning import PipelinePlanning
from autopar.planning.stage_problem import NoStagesError
from autopar.progress import log_progress, progress_part
from autopar.sharding.pins import ShardingError
from autopar.sharding.selection_problem import InfeasibleError, NoFasterError
from autopar.sharding.solve_within_memory import MemoryBudgetError

_PLANNING_ERRORS = (
    MicrobatchError,
    LayerError,
    NoLayersError,
    ScheduleError,
    StageError,
    NoStagesError,
    ShardingError,
    InfeasibleError,
    TimeoutError,
)
"""Errors that mean that there is no plan for a combination, or none was found in time."""


def search(
    planning: PipelinePlanning,
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
        trials: list to which combinations are appended with their outcomes, but for those of the
            step as one program that fewer microbatches rule out.

    Raises:
        ValueError, TimeoutError: no combination has a plan. It is the error of the first one that
            does not fit in memory, or of the first one if all fail otherwise.
    """
    found = _Search(planning, space, stage_option, method, trials)
    found.run()
    return found.result()


class _Search:
    """A search in progress; see `search` for the arguments.

    Attributes:
        best: the fastest plan so far with its step and the number of its combination.
        planning_seconds: seconds of all plans.
        errors: errors of combinations without a plan, by number.
    """

    def __init__(
        self,
        planning: PipelinePlanning,
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
        self.errors: dict[int, Exception] = {}
        self._bounds: dict[Combination, float] = {}
        self._refusals: dict[Combination, Exception] = {}
        self._whole_step_seconds: dict[LogicalMesh, dict[int, float]] = {}
        self._least_counts: dict[LogicalMesh, float] = {}
        self._enough_counts: dict[LogicalMesh, int] = {}
        self._too_large: list[tuple[Combination, int]] = []
        self._slow: set[Combination] = set()
        self._failed: set[tuple[bool, bool]] = set()
        self._computed: set[tuple[Combination, int, BoundEffort]] = set()
        self._planners: dict[tuple[int, LayerOption | None], PipelinePlanner | Exception] = {}

    @property
    def best_seconds(self) -> float:
        """Seconds of the fastest plan so far; infinite if there is none."""
        return self.best[1].predicted_seconds if self.best else inf

    def result(self) -> tuple[StepGraph, Plan]:
        """Return the step and the plan of the fastest combination.

        Raises:
            ValueError, TimeoutError: no combination has a plan; see `search`.
        """
        if self.best is None:
            errors = [error for _, error in sorted(self.errors.items())]
            too_large = (e for e in errors if isinstance(e, MemoryBudgetError | NoStagesError))
            raise next(too_large, errors[0])
        step, plan, _ = self.best
        return step, plan.model_copy(update={"planning_seconds": self.planning_seconds})

    def run(self) -> None:
        """Plan the combinations, those with the least lower bounds first, until one is too slow.

        The bounds of a step in microbatches take its trace. Until there is one, the bounds are
        those of the largest number of microbatches below it that is traced. A bound is made closer
        only where it is the least one of all.
        """
        left = self.space.combinations()
        if len(left) == 1:
            self._plan(left[0])
            return
        for option in self.space.layer_options:
            self._trace(self.space.micro_batch_counts[0], option)
        while left:
            next_ = self._next(left)
            if self._is_ruled_out(next_):
                break
            if self._raise_bound(next_):
                continue
            if next_.mesh is not None or (next_.count, next_.option) in self._planners:
                if not self._plan(next_):
                    continue
                left.remove(next_)
                left = [entry for entry in left if not self._is_slower_in_microbatches(entry)]
            else:
                self._trace(self._count_to_trace(next_), next_.option)
            self._drop_planners(left)
        for entry in left:
            reason = f"takes at least {self._bound(entry):.4g} s, by its work and bubbles"
            if error := self._refusal(entry):
                reason = str(error)
                self.errors[entry.number] = error
            self._record(OptionTrial(entry.count, entry.schedule, None, reason, mesh=entry.mesh))

    def _next(self, left: Sequence[Combination]) -> Combination:
        """Return the combination with the least lower bound.

        While no plan is known, a combination is preferred that needs less memory for activations:
        its plan rules out others. It is one of those with the same microbatches and layers whose
        bounds are near the least. If combinations have failed, only those of the kind that needs
        least count; if one of this kind has failed too, it is the one that needs least. One program
        in more microbatches than need be comes last, as only memory makes it faster.
        """
        open_ = [entry for entry in left if not self._is_ruled_out(entry)]
        if self.best is not None or not open_:
            return min(left, key=self._rank)
        fewest = self.space.micro_batch_counts[0]
        open_ = [entry for entry in open_ if not entry.mesh or entry.count == fewest] or open_
        if self.errors or self._slow:
            lean = min(entry.leanness[:2] for entry in open_)
            open_ = [entry for entry in open_ if entry.leanness[:2] == lean]
            if lean in self._failed:
                return min(open_, key=self._lean_rank)
        least = min(open_, key=self._rank)
        if least.mesh is not None:
            return least
        near = [
            entry
            for entry in open_
            if (entry.count, entry.option, entry.mesh) == (least.count, least.option, None)
            and self._bound(entry) <= _NEAR * self._bound(least)
        ]
        return min(near, key=self._lean_rank)

    def _lean_rank(self, entry: Combination) -> tuple[float, ...]:
        return *entry.leanness, *self._rank(entry)

    def _rank(self, entry: Combination) -> tuple[float, int]:
        return self._bound(entry), entry.number

    def _is_ruled_out(self, entry: Combination) -> bool:
        bound = self._bound(entry)
        return bound == inf or (self.best is not None and bound >= self.best_seconds)

    def _is_slower_in_microbatches(self, entry: Combination) -> bool:
        """Whether fewer microbatches are faster for the step as one program, as far as is known.

        Microbatches make one program faster only where memory limits its shardings. So a mesh whose
        shardings are not limited needs no more of them. On a mesh where more of them have made the
        step slower, even more are assumed to do so too; that is a heuristic.
        """
        if entry.mesh is None:
            return False
        if entry.count > self._enough_counts.get(entry.mesh, inf):
            return True
        planned = sorted(self._whole_step_seconds.get(entry.mesh, {}).items())
        seconds = [seconds for count, seconds in planned if count < entry.count]
        return any(fewer <= more for fewer, more in pairwise(seconds))

    def _trace(self, count: int, option: LayerOption | None) -> None:
        """Trace the step in microbatches, and keep its planner or the error."""
        done = len(self.trials) / self.space.num_combinations
        try:
            with progress_part(done, done):
                step = self.planning.trace(count, option)
                self._planners[count, option] = self.planning.planner(step)
        except _PLANNING_ERRORS as error:
            _clear_frames(error)
            self._planners[count, option] = error

    def _drop_planners(self, left: Sequence[Combination]) -> None:
        """Drop the traces and costs that no combination needs, but for the first of each option."""
        open_ = (entry for entry in left if not self._is_ruled_out(entry))
        needed = {(self._anchor(entry), entry.option) for entry in open_ if self._has_bound(entry)}
        first = self.space.micro_batch_counts[0]
        for key in [key for key in self._planners if key not in needed and key[0] != first]:
            del self._planners[key]

    def _count_to_trace(self, entry: Combination) -> int:
        """Return the number of microbatches to trace next for the bound of an entry, or its plan.

        Bounds from one microbatch leave out the accumulation of gradients. So the least number with
        accumulation is traced before any other one: its bounds may rule out many of them.
        """
        if self._anchor(entry) > 1:
            return entry.count
        return min(count for count in self.space.micro_batch_counts if count > 1)

    def _anchor(self, entry: Combination) -> int:
        """Return the largest traced number of microbatches that is not above that of an entry."""
        return max(
            count
            for count, option in self._planners
            if option == entry.option and count <= entry.count
        )

    def _bound(self, entry: Combination) -> float:
        """Return the best known lower bound of the seconds of a combination."""
        return inf if self._refusal(entry) else self._bounds.get(entry, 0.0)

    def _refusal(self, entry: Combination) -> Exception | None:
        """Return why there is no plan for a combination; None if there may be one."""
        least = self._least_counts.get(entry.mesh, 1) if entry.mesh is not None else 1
        if entry.count < least:
            return NoStagesError(
                f"one program on this mesh needs at least {ceil(least)} microbatches to fit in"
                " memory; use more microbatches, more devices or remat"
            )
        for other, num_layers in self._too_large:
            if (entry.count, entry.option) == (other.count, other.option) and entry.is_composed:
                names = entry.schedule.name, other.schedule.name
                if holds_as_much(*names, entry.count, num_layers):
                    return NoStagesError(
                        f"{other.schedule.name}, which holds no more microbatches, has no stages:"
                        f" {self.errors[other.number]}"
                    )
        return self._refusals.get(entry)

    def _has_bound(self, entry: Combination) -> bool:
        """Whether the step is traced with the layers of an entry.

        It is not if all layers recompute, while the step as one program does not.
        """
        return any(option == entry.option for _, option in self._planners)

    def _raise_bound(self, entry: Combination) -> bool:
        """Compute a closer lower bound of a combination; return whether there is one to compute."""
        if not self._has_bound(entry):
            return False
        anchor = self._anchor(entry)
        for effort in BOUND_EFFORTS:
            if (entry, anchor, effort) not in self._computed:
                self._computed.add((entry, anchor, effort))
                bound = self._bound_from(anchor, entry, effort)
                self._bounds[entry] = max(self._bounds.get(entry, 0.0), bound)
                return True
        return False

    def _bound_from(self, anchor: int, entry: Combination, effort: BoundEffort) -> float:
        planner = self._planners[anchor, entry.option]
        if not isinstance(planner, PipelinePlanner):
            return 0.0
        shape = entry.mesh.shape if entry.mesh else None
        option, schedule, count = self.stage_option, entry.schedule, entry.count
        slack = 1.0 if anchor == count else _SLACK
        limit = _ENOUGH * self.best_seconds / slack
        try:
            return slack * planner.bound(option, schedule, count, shape, effort, limit)
        except (NoStagesError, StageError, ScheduleError) as error:
            self._refusals[entry] = error
            return inf

    def _plan(self, entry: Combination) -> bool:
        """Plan a combination, and record the outcome.

        While no plan is known, stages are first looked for only near the lower bound.

        Returns:
            Whether there is an outcome. If not, there are no stages near the lower bound.
        """
        done = len(self.trials) / self.space.num_combinations
        count, schedule, mesh = entry.count, entry.schedule, entry.mesh
        limit = self.best_seconds
        is_first = self.best is None and entry not in self._slow and self._finds_stages(entry)
        if is_first:
            limit = _FIRST_LIMIT * self._bound(entry) or inf
        try:
            with progress_part(done, done + 1 / self.space.num_combinations):
                if mesh is not None:
                    step, plan = self.planning.plan_whole_step(count, mesh, limit)
                    of_mesh = self._whole_step_seconds.setdefault(mesh, {})
                    of_mesh[count] = plan.predicted_seconds
                    if not plan.memory_limited:
                        self._set_enough(mesh, count)
                    plans = [plan]
                else:
                    step, plans = self._pipelines(entry, limit)
        except _PLANNING_ERRORS as error:
            _clear_frames(error)
            self._failed.add(entry.leanness[:2])
            if is_first and limit < inf and isinstance(error, NoStagesError):
                self._slow.add(entry)
                return False
            self.errors[entry.number] = error
            self._record(OptionTrial(count, schedule, None, str(error), mesh=mesh))
            planner = self._planners.get((count, entry.option))
            if (
                isinstance(error, NoStagesError)
                and isinstance(planner, PipelinePlanner)
                and self.best is None
                and entry.is_composed
            ):
                self._too_large.append((entry, planner.num_layers))
            if mesh is not None and isinstance(error, NoFasterError) and not error.is_limited:
                self._set_enough(mesh, count)
            if mesh is not None and isinstance(error, MemoryBudgetError):
                # A part of a microbatch needs at least that part of the memory.
                least = count * error.least / error.budget
                self._least_counts[mesh] = max(least, self._least_counts.get(mesh, 1))
            return True
        self.planning_seconds += sum(plan.planning_seconds for plan in plans)
        plan = min(plans, key=lambda plan: plan.predicted_seconds)
        seconds, num_bytes = plan.predicted_seconds, plan.predicted_bytes
        self._record(OptionTrial(count, schedule, seconds, "", num_bytes, mesh))
        if self.best is None or (seconds, entry.number) < (self.best_seconds, self.best[2]):
            self.best = step, plan, entry.number
        return True

    def _finds_stages(self, entry: Combination) -> bool:
        """Whether stage construction finds the stages of a combination."""
        is_auto = isinstance(self.stage_option, AutoStageOption)
        return is_auto and entry.mesh is None and entry.schedule.num_chunks == 1

    def _set_enough(self, mesh: LogicalMesh, count: int) -> None:
        """Record that memory does not limit the step on a mesh in `count` microbatches."""
        self._enough_counts[mesh] = min(count, self._enough_counts.get(mesh, count))

    def _pipelines(self, entry: Combination, limit: float) -> tuple[StepGraph, Sequence[Plan]]:
        """Return the step and the plans of a pipeline; slower ones than `limit` may be left out."""
        if (entry.count, entry.option) not in self._planners:
            with progress_part(0, _TRACING):
                self._trace(entry.count, entry.option)
        planner = self._planners[entry.count, entry.option]
        if not isinstance(planner, PipelinePlanner):
            raise planner
        with progress_part(_TRACING, 1):
            plans = _plans(planner, self.stage_option, entry.schedule, self.method, limit)
        return planner.step, plans

    def _record(self, trial: OptionTrial) -> None:
        self.trials.append(trial)
        if self.space.has_choice:
            log_progress(str(trial), len(self.trials), self.space.num_combinations)


def _clear_frames(error: BaseException) -> None:
    """Clear the local variables that an error keeps alive, such as a whole selection problem.

    An error keeps the frames of its traceback, and the error that was handled when it was raised.
    """
    earlier: BaseException | None = error
    while earlier is not None:
        traceback.clear_frames(earlier.__traceback__)
        earlier = earlier.__context__


_NEAR = 1.05
"""Largest ratio of bounds at which the combination that needs less memory comes first."""

_FIRST_LIMIT = 1.25
"""Step time up to which stages are looked for first, as a multiple of the lower bound."""

_ENOUGH = 1.001
"""Bound that rules a combination out whatever the rounding, as a multiple of the best plan."""

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
    errors: list[Exception] = []
    for num_meshes in even_mesh_counts(num_layers, num_devices, chunks):
        uniform = UniformStageOption(num_meshes * chunks)
        try:
            plans.append(planner.plan(uniform, schedule, method))
        except (ScheduleError, StageError, ShardingError, InfeasibleError, TimeoutError) as error:
            errors.append(error)
    if not plans:
        raise errors[0]
    return plans
