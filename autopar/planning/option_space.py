"""The combinations of options of a pipeline that a search tries."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import inf
from typing import Literal

from autopar.ir.spec import LogicalMesh
from autopar.layering.layer_options import AutoLayerOption, LayerOption, ManualLayerOption
from autopar.pipeline.pipeline_schedules import (
    has_backward,
    schedule_kind,
    schedule_names,
    splits_backward,
)
from autopar.pipeline.schedule_kinds import Pipeline, ScheduleError
from autopar.plan import WHOLE_STEP, PipelineSchedule
from autopar.planning.stage_problem import in_flight_of

CHUNKS = (1, 2, 4)
"""Numbers of stages on each submesh that a search tries."""

_INTERLEAVED = "interleaved_1f1b"


_FEW_MESHES = 4
"""Number of meshes at which the memory of schedules is compared to order them."""


@dataclass(frozen=True, slots=True)
class Combination:
    """A combination of options.

    Attributes:
        number: number of the combination, in the order of the options.
        count: number of microbatches.
        schedule: the schedule, with its layer option.
        option: layer option of the traces that bounds are taken from.
        mesh: logical mesh of a step that runs as one program; None for pipelines.
    """

    number: int
    count: int
    schedule: PipelineSchedule
    option: LayerOption | None
    mesh: LogicalMesh | None

    @property
    def is_composed(self) -> bool:
        """Whether stage construction finds stages whose backward pass is in one piece."""
        schedule = self.schedule
        return self.mesh is None and schedule.num_chunks == 1 and not splits_backward(schedule.name)

    @property
    def leanness(self) -> tuple[bool, bool, float]:
        """A key that is the smaller, the less memory the combination needs for activations.

        Its parts are whether the backward pass is split, whether layers save their values, and the
        share of the batch in flight.
        """
        if self.mesh is not None:
            return False, True, 1.0
        name, option = self.schedule.name, self.option
        pipeline = Pipeline(_FEW_MESHES, self.count, self.schedule.num_chunks)
        try:
            held = schedule_kind(name).in_flight(0, pipeline) / (self.count * pipeline.num_chunks)
        except ScheduleError:  # the schedule needs more microbatches
            held = inf
        return splits_backward(name), not (option and option.remat_layer), held


@dataclass(frozen=True, slots=True)
class OptionSpace:
    """The combinations of options that a search tries.

    Attributes:
        micro_batch_counts: numbers of microbatches.
        layer_options: layer options, which say whether layers are rematerialized.
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

    def combinations(self) -> list[Combination]:
        """Return all combinations: the step as one program, then the pipelines."""
        plain = [
            option for option in self.layer_options if option is None or not option.remat_layer
        ]
        whole = [
            (count, WHOLE_STEP, plain[0] if plain else None, mesh)
            for count, mesh in product(self.micro_batch_counts, self.whole_step_meshes)
        ]
        pairs = product(self.micro_batch_counts, self.layer_options)
        pipelines = [
            (
                count,
                PipelineSchedule(name=name, num_chunks=chunks, layer_option=option),
                option,
                None,
            )
            for (count, option), (name, chunks) in product(pairs, self.schedules)
        ]
        return [Combination(number, *entry) for number, entry in enumerate(whole + pipelines)]


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
    if not isinstance(given, AutoLayerOption | ManualLayerOption) or given.remat_layer != "auto":
        return [given]
    recomputing = replace(given, remat_layer=True)
    if isinstance(recomputing, AutoLayerOption) and recomputing.remat_parts is None:
        recomputing = replace(recomputing, remat_parts="auto")
    return [replace(given, remat_layer=False), recomputing]


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


@cache
def holds_as_much(schedule: str, other: str, count: int, num_layers: int) -> bool:
    """Return whether all stages hold at least as many microbatches as in another schedule.

    Args:
        schedule: name of a schedule with one stage on each mesh.
        other: name of the other one.
        count: number of microbatches.
        num_layers: largest number of stages.
    """
    held, least = in_flight_of(schedule, count), in_flight_of(other, count)
    return all(
        held(later, stages) >= least(later, stages)
        for stages in range(1, num_layers + 1)
        for later in range(stages)
    )
