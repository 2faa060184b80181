"""The division of layers over the devices of a pipeline."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from simulator.transformer.layer_kinds import LayerKind
from simulator.transformer.scenario import Execution
from simulator.transformer.transformer_sizes import Transformer


@dataclass(frozen=True, slots=True)
class DeviceLayers:
    """The layers of the devices at one place of a pipeline, in all of their chunks.

    Attributes:
        counts: number of layers of each kind, with the layers that predict further tokens.
        embedding: whether the input embedding is there.
        losses: output embeddings with their loss that are there.
        predictions: layers that predict further tokens; each has a projection.
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
        ValueError: there are fewer layers than stages, or `execution.stage_layers` has others.
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
    ends_may_be_empty = sizes[1:-1] if embedding and loss else sizes
    if min(sizes) < 0 or 0 in ends_may_be_empty:
        raise ValueError(
            f"{layers} layers are too few for {stages} stages (pipeline * interleave); expected at "
            "least one for each"
        )
    return sizes


@dataclass(frozen=True, slots=True)
class Division:
    """The layers of each device of a pipeline; device d has stages d, d + pipeline, ...

    Attributes:
        devices: layers of each device.
        first_places: the distinct elements of `devices`, each with the place of its first device.
    """

    devices: tuple[DeviceLayers, ...]
    first_places: tuple[tuple[DeviceLayers, int], ...]


def division_of(model: Transformer, execution: Execution) -> Division:
    """Return the division of the layers over the devices of a pipeline.

    Raises:
        ValueError: layers don't divide as `stage_sizes` says.
    """
    key = (
        execution.pipeline,
        execution.interleave,
        execution.stage_layers,
        execution.embedding_as_layer,
        execution.loss_as_layer,
    )
    if key not in model.known_divisions:
        devices = _divided(model.kinds, model.prediction_layers, execution.pipeline, execution)
        places: dict[DeviceLayers, int] = {}
        for place, device in enumerate(devices):
            places.setdefault(device, place)
        model.known_divisions[key] = Division(devices, tuple(places.items()))
    return model.known_divisions[key]


def _divided(
    kinds: Sequence[LayerKind], predictions: int, pipeline: int, execution: Execution
) -> tuple[DeviceLayers, ...]:
    """Return the layers of each device.

    Args:
        kinds: kinds of all layers; those that predict further tokens are the last.
        predictions: layers that predict further tokens, all of them on the last device.
        pipeline: number of devices.
        execution: the execution.
    """
    layers = len(kinds) - predictions
    sizes = stage_sizes(layers, execution)
    ends = list(accumulate(sizes))
    devices = []
    for device in range(pipeline):
        counts: Counter[LayerKind] = Counter()
        for stage in range(device, len(sizes), pipeline):
            counts.update(kinds[ends[stage] - sizes[stage] : ends[stage]])
        last = device == pipeline - 1
        if last:
            counts.update(kinds[layers:])
        devices.append(
            DeviceLayers(
                tuple(counts.items()),
                embedding=device == 0,
                losses=1 + predictions if last else 0,
                predictions=predictions if last else 0,
            )
        )
    return tuple(devices)
