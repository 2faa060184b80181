"""The division of layers over the devices of a pipeline."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from simulator.transformer.layer_kinds import LayerKind
from simulator.transformer.scenario import Execution, Transformer


@dataclass(frozen=True, slots=True)
class DeviceLayers:
    """The layers of the devices at one place of a pipeline, in all of their chunks.

    Attributes:
        counts: kinds of layers and how many there are of each, those that predict further tokens
            included.
        embedding: whether the input embedding is there.
        losses: output embeddings with their loss that are there.
        predictions: layers that predict further tokens, each of which has a projection.
    """

    counts: tuple[tuple[LayerKind, int], ...]
    embedding: bool
    losses: int
    predictions: int

    @property
    def layers(self) -> int:
        """Number of layers."""
        return sum(count for _, count in self.counts)


def stage_sizes(layers: int, execution: Execution) -> Sequence[int]:
    """Return the layers of each stage of a pipeline.

    They are `execution.stage_layers` if given. Otherwise stages differ by one layer at most; the
    first and the last, which have the embedding and the loss, are the last to get one more.

    Raises:
        ValueError: there are fewer layers than stages, or the stages that are given have others.
    """
    stages = execution.pipeline * execution.interleave
    if execution.stage_layers is not None:
        given = execution.stage_layers
        if len(given) != stages or sum(given) != layers:
            raise ValueError(
                f"stage_layers: given {len(given)} stages with {sum(given)} layers, expected "
                f"{stages} (pipeline * interleave) with {layers}"
            )
        return given
    embedding = 1 if execution.embedding_as_layer else 0
    loss = 1 if execution.loss_as_layer else 0
    least, more = divmod(layers + embedding + loss, stages)
    sizes = [least] * stages
    order = (*range(1, stages - 1), 0, stages - 1) if stages > 1 else (0,)
    for stage in order[:more]:
        sizes[stage] += 1
    sizes[0] -= embedding
    sizes[-1] -= loss
    if layers < stages or min(sizes) < 0:
        raise ValueError(
            f"{layers} layers are too few for {stages} stages (pipeline * interleave); expected at "
            "least one for each"
        )
    return sizes


def device_layers(model: Transformer, execution: Execution) -> list[DeviceLayers]:
    """Return the layers of each device of a pipeline; device d has stages d, d + pipeline, ..."""
    sizes = stage_sizes(model.layers, execution)
    pipeline = execution.pipeline
    last = pipeline - 1
    kinds = model.kinds
    only = kinds[0] if len(model.kind_counts) == 1 else None
    ends = list(accumulate(sizes))
    devices: list[DeviceLayers] = []
    for device in range(pipeline):
        predictions = model.prediction_layers if device == last else 0
        stages = range(device, len(sizes), pipeline)
        if only is not None:
            counts = {only: sum(sizes[stage] for stage in stages) + predictions}
        else:
            counts: dict[LayerKind, int] = {}
            places = [
                kinds[place]
                for stage in stages
                for place in range(ends[stage] - sizes[stage], ends[stage])
            ]
            for kind in (*places, *kinds[len(kinds) - predictions :]):
                counts[kind] = counts.get(kind, 0) + 1
        losses = 1 + predictions if device == last else 0
        devices.append(DeviceLayers(tuple(counts.items()), device == 0, losses, predictions))
    return devices
