"""Choosing how a pipeline runs: the number of microbatches, the schedule, chunks, and whether layers are computed again.

Every combination of what is left to choose is planned, and the plan with the least predicted time wins. A step is traced once for
each number of microbatches and each way to keep activations; all schedules share what is known of its layers. Where schedule and
stages are both left to choose, the step as one program is a candidate, too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from autopar.ir.layers import AutoLayerOption, LayerError, LayerOption, ManualLayerOption
from autopar.ir.step_graph import MicrobatchError, StepGraph
from autopar.pipeline.pipeline_schedules import ScheduleError, has_backward, schedule_kind, schedule_names
from autopar.pipeline.stage_options import AutoStageOption, StageError, StageOption, UniformStageOption
from autopar.plan import WHOLE_STEP, PipelineSchedule, Plan
from autopar.planning.pipeline_planner import PipelinePlanner
from autopar.planning.stage_problem import NoStagesError
from autopar.progress import tell
from autopar.sharding.pins import ShardingError
from autopar.sharding.selection_problem import InfeasibleError

CHUNKS = (1, 2, 4)
"""Stages on each submesh that are tried."""

_INTERLEAVED = "interleaved_1f1b"


@dataclass(frozen=True, slots=True)
class Choice:
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
        return (
            f"{self.num_micro_batches} microbatches, {self.schedule.name}{chunks}{', remat' if again else ''}: {found}"
        )


_last: list[Choice] = []


def get_last_search_result() -> tuple[Choice, ...]:
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
    pairs = [(each, count) for each, count in product(names, chunks) if schedule_kind(each).num_chunks in (None, count)]
    # With one stage on each submesh interleaving is 1f1b.
    return [(each, count) for each, count in pairs if name != "auto" or each != _INTERLEAVED or count > 1]


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
    _last.clear()
    best: tuple[StepGraph, Plan] | None = None
    spent = 0.0
    first: ValueError | None = None
    several = len(counts) * len(layers) * len(kinds) > 1
    for count, plan_whole_step in product(counts, [whole_step] if whole_step else []):
        try:
            found = plan_whole_step(count)
        except (MicrobatchError, ShardingError, InfeasibleError) as error:
            _last.append(Choice(count, WHOLE_STEP, None, str(error)))
        else:
            _last.append(Choice(count, WHOLE_STEP, found[1].predicted_seconds))
            spent += found[1].planning_seconds
            if best is None or found[1].predicted_seconds < best[1].predicted_seconds:
                best = found
        tell(str(_last[-1]))
    for count, layer_option in product(counts, layers):
        known: PipelinePlanner | None = None
        for name, chunks in kinds:
            schedule = PipelineSchedule(name=name, num_chunks=chunks, layer_option=layer_option)
            try:
                known = known or planner(trace(count, layer_option))
                plans = _plans(known, stage_option, schedule, method)
            except (
                MicrobatchError,
                LayerError,
                ScheduleError,
                StageError,
                NoStagesError,
                ShardingError,
                InfeasibleError,
            ) as error:
                first = first or error
                _last.append(Choice(count, schedule, None, str(error)))
            else:
                plan = min(plans, key=lambda plan: plan.predicted_seconds)
                _last.append(Choice(count, schedule, plan.predicted_seconds))
                spent += sum(each.planning_seconds for each in plans)
                if best is None or plan.predicted_seconds < best[1].predicted_seconds:
                    best = known.step, plan
            if several:
                tell(str(_last[-1]))
    if best is None:
        assert first is not None
        raise first
    step, plan = best
    return step, plan.model_copy(update={"planning_seconds": spent})


def _plans(planner: PipelinePlanner, stage_option: StageOption, schedule: PipelineSchedule, method: str) -> list[Plan]:
    """The plan; if stages are to be found and several are on each submesh, those of even ones, of each number that layers and devices allow."""
    if not isinstance(stage_option, AutoStageOption) or schedule.num_chunks == 1:
        return [planner.plan(stage_option, schedule, method)]
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
    return plans
