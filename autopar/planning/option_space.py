"""The combinations of options of a pipeline that a search tries."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from autopar.ir.spec import LogicalMesh
from autopar.layering.layer_options import AutoLayerOption, LayerOption, ManualLayerOption
from autopar.pipeline.pipeline_schedules import has_backward, schedule_kind, schedule_names

CHUNKS = (1, 2, 4)
"""Numbers of stages on each submesh that a search tries."""

_INTERLEAVED = "interleaved_1f1b"


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
