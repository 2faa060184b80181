"""Choosing how a pipeline runs: the number of microbatches, the schedule, chunks, and whether layers are computed again.

Every combination of what is left to choose is planned, and the plan with the least predicted time wins. A step is traced once for
each number of microbatches and each way to keep activations; all schedules share what is known of its layers. Where schedule and
stages are both left to choose, the step as one program is a candidate, too.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from typing import Literal

from autopar.ir.step_graph import MicrobatchError, StepGraph
from autopar.layering.layers import AutoLayerOption, LayerError, LayerOption, ManualLayerOption
from autopar.pipeline.pipeline_schedules import (
    ScheduleError,
    has_backward,
    schedule_kind,
    schedule_names,
)
from autopar.pipeline.stage_options import (
    AutoStageOption,
    StageError,
    StageOption,
    UniformStageOption,
)
from autopar.plan import WHOLE_STEP, PipelineSchedule, Plan
from autopar.planning.pipeline_planner import PipelinePlanner
from autopar.planning.stage_problem import NoStagesError
from autopar.progress import log_progress
from autopar.sharding.pins import ShardingError
from autopar.sharding.selection_problem import InfeasibleError

CHUNKS = (1, 2, 4)
"""Stages on each submesh that are tried."""

_INTERLEAVED = "interleaved_1f1b"


@dataclass(frozen=True, slots=True)
class OptionTrial:
    """One way to run a pipeline.

    Attributes:
        seconds: predicted time of a step; None if it can't be planned, for what `reason` says.
    """

    num_micro_batches: int
    schedule: PipelineSchedule
    seconds: float | None
    reason: str = ""

    def __str__(self) -> str:
        again = self.schedule.layer_option is not None and self.schedule.layer_option.remat_layer
        chunks = f" x {self.schedule.num_chunks} chunks" if self.schedule.num_chunks > 1 else ""
        found = f"{self.seconds:.4g} s" if self.seconds is not None else self.reason
        return f"{self.num_micro_batches} microbatches, {self.schedule.name}{chunks}{', remat' if again else ''}: {found}"


_last: list[OptionTrial] = []


def get_last_search_result() -> tuple[OptionTrial, ...]:
    """All that the last search in this process tried."""
    return tuple(_last)


def micro_batch_counts(given: int | Literal["auto"], rows: Sequence[int]) -> list[int]:
    """Numbers of microbatches to try for batches of so many rows: powers of two that divide them all."""
    if given != "auto":
        return [given]
    counts = [1]
    while rows and all(n % (2 * counts[-1]) == 0 for n in rows):
        counts.append(2 * counts[-1])
    return counts


def layer_options(given: LayerOption | None) -> list[LayerOption | None]:
    """The layer options to try."""
    if isinstance(given, AutoLayerOption | ManualLayerOption) and given.remat_layer == "auto":
        return [replace(given, remat_layer=remat) for remat in (False, True)]
    return [given]


def schedules(name: str, num_chunks: int | Literal["auto"]) -> list[tuple[str, int]]:
    """Return the schedules to try, with the stages on each submesh."""
    names = [each for each in schedule_names() if has_backward(each)] if name == "auto" else [name]
    chunks = CHUNKS if num_chunks == "auto" else (num_chunks,)
    pairs = [
        (each, count)
        for each, count in product(names, chunks)
        if schedule_kind(each).num_chunks in (None, count)
    ]
    # With one stage on each submesh interleaving is 1f1b.
    return [
        (each, count)
        for each, count in pairs
        if name != "auto" or each != _INTERLEAVED or count > 1
    ]


type _Found = tuple[StepGraph, Sequence[Plan]]
"""A traced step, and its plans for one choice."""

_REFUSED = (
    MicrobatchError,
    LayerError,
    ScheduleError,
    StageError,
    NoStagesError,
    ShardingError,
    InfeasibleError,
)
"""Why there may be no plan for a choice."""


def search(
    trace: Callable[[int, LayerOption | None], StepGraph],
    planner: Callable[[StepGraph], PipelinePlanner],
    counts: Sequence[int],
    layers: Sequence[LayerOption | None],
    kinds: Sequence[tuple[str, int]],
    stage_option: StageOption,
    method: str,
    whole_step: Callable[[int], tuple[StepGraph, Plan]] | None = None,
) -> tuple[StepGraph, Plan]:
    """Return the traced step and the plan with the least predicted time, of all combinations.

    Args:
        trace: (number of microbatches, layer option) -> the step, in layers and marked.
        kinds: schedules, with the stages on each submesh.
        whole_step: number of microbatches -> the step and its plan as one program, if that may be chosen.

    Raises:
        What the first combination raised, if there is no plan for any.
    """

    def attempts() -> Iterator[tuple[int, PipelineSchedule, Callable[[], _Found]]]:
        """What to try: microbatches, a schedule, and what plans it."""
        for count, plan_whole_step in product(counts, [whole_step] if whole_step else []):
            yield count, WHOLE_STEP, partial(_alone, plan_whole_step, count)
        for count, layer_option in product(counts, layers):
            known = cache(lambda count=count, option=layer_option: planner(trace(count, option)))
            for name, chunks in kinds:
                schedule = PipelineSchedule(name=name, num_chunks=chunks, layer_option=layer_option)
                yield count, schedule, partial(_plans, known, stage_option, schedule, method)

    _last.clear()
    found: list[tuple[StepGraph, Plan]] = []
    spent = 0.0
    refused: list[ValueError] = []
    several = len(counts) * len(layers) * len(kinds) > 1 or whole_step is not None
    for count, schedule, attempt in attempts():
        try:
            step, plans = attempt()
        except _REFUSED as error:
            refused.append(error)
            _last.append(OptionTrial(count, schedule, None, str(error)))
        else:
            best = min(plans, key=lambda plan: plan.predicted_seconds)
            _last.append(OptionTrial(count, schedule, best.predicted_seconds))
            spent += sum(each.planning_seconds for each in plans)
            found.append((step, best))
        if several:
            log_progress(str(_last[-1]))
    if not found:
        raise refused[0]
    step, plan = min(found, key=lambda each: each[1].predicted_seconds)
    return step, plan.model_copy(update={"planning_seconds": spent})


def _alone(plan_whole_step: Callable[[int], tuple[StepGraph, Plan]], count: int) -> _Found:
    step, plan = plan_whole_step(count)
    return step, [plan]


def _plans(
    known: Callable[[], PipelinePlanner],
    stage_option: StageOption,
    schedule: PipelineSchedule,
    method: str,
) -> _Found:
    """The plan of a schedule.

    If stages are to be found and several are on each submesh, plans of even ones, of each number that layers and devices allow.
    """
    planner = known()
    if not isinstance(stage_option, AutoStageOption) or schedule.num_chunks == 1:
        return planner.step, [planner.plan(stage_option, schedule, method)]
    layers, devices, chunks = planner.num_layers, planner.cluster.num_devices, schedule.num_chunks
    meshes = [n for n in range(2, devices + 1) if devices % n == 0 and layers >= n * chunks]
    plans: list[Plan] = []
    errors: list[ValueError] = []
    for count in meshes:
        try:
            plans.append(planner.plan(UniformStageOption(count * chunks), schedule, method))
        except (ScheduleError, StageError, ShardingError, InfeasibleError) as error:
            errors.append(error)
    if not plans:
        raise (
            errors[0]
            if errors
            else StageError(
                f"{layers} layer(s) are too few for {chunks} stages on each of several submeshes of {devices} device(s)"
            )
        )
    return planner.step, plans
