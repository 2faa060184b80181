"""Seconds of a microbatch in a stage: computation, exposed communication, and the host."""

from collections.abc import Mapping
from itertools import repeat
from operator import add, mul
from typing import NamedTuple

from simulator.transformer.layer import (
    LayerPasses,
    embedding_passes,
    head_passes,
    prediction_passes,
)
from simulator.transformer.layer_kinds import LayerKind
from simulator.transformer.machine import Machine
from simulator.transformer.pass_cost import (
    BothPasses,
    PassCost,
)
from simulator.transformer.scenario import Execution
from simulator.transformer.stages import DeviceLayers, Division
from simulator.transformer.transformer_sizes import Transformer

_HOST_NORM = 3
"""Exponent of the norm that joins the times of host and device, either of which may wait for the
other.

It would be infinite if one of them were always ahead.
"""


class StageSeconds(NamedTuple):
    """Seconds of one microbatch on one device, in all of its stages.

    Attributes:
        forward: computation of the forward pass.
        backward: computation of the backward pass.
        recompute: computation of what is recomputed.
        tensor: exposed communication over the tensor axis.
        host: waits for the host.
        hidden: communication over the tensor axis that overlaps with computation.
        dispatch: exposed dispatch of tokens to experts.
        hidden_dispatch: dispatch that overlaps with computation.
        backward_host: the part of `host` in the backward pass and what is recomputed.
    """

    forward: float = 0.0
    backward: float = 0.0
    recompute: float = 0.0
    tensor: float = 0.0
    host: float = 0.0
    hidden: float = 0.0
    dispatch: float = 0.0
    hidden_dispatch: float = 0.0
    backward_host: float = 0.0

    @property
    def windows(self) -> tuple[float, float]:
        """Seconds of the forward and backward pass that communication of other axes overlaps with.

        It also overlaps with waits for the host.
        """
        return (
            self.forward + self.host - self.backward_host,
            self.backward + self.recompute + self.backward_host,
        )

    @property
    def seconds(self) -> float:
        """Seconds of the stage."""
        computed = self.forward + self.backward + self.recompute
        return computed + self.tensor + self.host + self.dispatch

    def slowed(self, factor: float) -> "StageSeconds":
        """Return the stage on a device that computes more slowly; nothing else changes."""
        return self._replace(
            forward=self.forward * factor,
            backward=self.backward * factor,
            recompute=self.recompute * factor,
        )

    def __add__(self, other: "StageSeconds") -> "StageSeconds":  # pyright: ignore[reportIncompatibleMethodOverride]
        return StageSeconds(*map(add, self, other))

    def __mul__(self, count: int) -> "StageSeconds":  # pyright: ignore[reportIncompatibleMethodOverride]
        return StageSeconds(*map(mul, self, repeat(count)))


def stage_seconds(
    model: Transformer,
    execution: Execution,
    machine: Machine,
    layers: Mapping[LayerKind, LayerPasses],
    division: Division,
) -> list[StageSeconds]:
    """Return the seconds of each device's stages; embedding and loss are at the pipeline's ends.

    All devices are as slow as the slowest one, which limits the pace of the step.
    """
    slowdown = machine.slowest_of(execution.devices)
    by_kind = {
        kind: _layer(passes, execution, machine).slowed(slowdown) for kind, passes in layers.items()
    }
    embedding = _end(embedding_passes(model, execution, machine), machine).slowed(slowdown)
    head = _end(head_passes(model, execution, machine), machine).slowed(slowdown)
    prediction = StageSeconds()
    if model.prediction_layers:
        passes = prediction_passes(model, execution, machine)
        prediction = _end(passes, machine).slowed(slowdown)

    def stage(device: DeviceLayers) -> StageSeconds:
        total = sum((by_kind[kind] * count for kind, count in device.counts), StageSeconds())
        if device.embedding:
            total += embedding
        if device.losses:
            total = total + head * device.losses + prediction * device.predictions
        return total

    by_device = {device: stage(device) for device, _ in division.first_places}
    return [by_device[device] for device in division.devices]


def _layer(layer: LayerPasses, execution: Execution, machine: Machine) -> StageSeconds:
    """Return what a layer adds to its stage."""
    passes = (layer.forward, layer.backward, layer.recompute)
    dispatch = sum(cost.dispatch for cost in passes)
    part = exposed_dispatch(layer, execution, machine)
    waits = [host_wait(cost, machine, part * cost.dispatch) for cost in passes]
    return StageSeconds(
        layer.forward.compute,
        layer.backward.compute,
        layer.recompute.compute,
        sum(cost.communication for cost in passes),
        sum(waits),
        sum(cost.hidden for cost in passes),
        part * dispatch,
        (1 - part) * dispatch,
        sum(waits[1:]),
    )


def exposed_dispatch(layer: LayerPasses, execution: Execution, machine: Machine) -> float:
    """Return the exposed part of the seconds in which tokens get to experts and back.

    The forward pass of a microbatch overlaps with the backward pass of another one. Forward passes
    before the first backward pass, and as many backward passes after the last forward pass, overlap
    with nothing (combined_1f1b.py in github.com/NVIDIA/Megatron-LM,
    megatron/core/pipeline_parallel).
    """
    passes = (layer.forward, layer.backward, layer.recompute)
    dispatch = sum(cost.dispatch for cost in passes)
    if not execution.overlap_dispatch or not dispatch:
        return 1.0
    far = execution.expert * execution.expert_shards > machine.cluster.devices_per_host
    compute = sum(cost.compute for cost in passes)
    alone = execution.in_flight(0) / execution.microbatches
    overlapped = machine.exposed_seconds(dispatch, compute, far) / dispatch
    return alone + (1 - alone) * overlapped


def _end(passes: BothPasses, machine: Machine) -> StageSeconds:
    """Return what the embedding or the loss adds to its stage."""
    forward, backward = passes
    backward_wait = host_wait(backward, machine)
    return StageSeconds(
        forward=forward.compute,
        backward=backward.compute,
        tensor=forward.communication + backward.communication,
        host=host_wait(forward, machine) + backward_wait,
        backward_host=backward_wait,
    )


def host_wait(cost: PassCost, machine: Machine, exposed: float = 0.0) -> float:
    """Return the seconds that the device waits for the host.

    The host launches kernels one by one, and gets ahead only where they are long.

    Args:
        cost: the pass.
        machine: the machine.
        exposed: seconds of exposed communication beside that of the tensor axis.
    """
    host = cost.kernels * machine.backend.kernel_us * 1e-6
    busy = cost.compute + cost.communication + exposed
    return (host**_HOST_NORM + busy**_HOST_NORM) ** (1 / _HOST_NORM) - busy
