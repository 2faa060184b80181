"""The closed-form prediction of a training step: its seconds by part, and its memory."""

from collections.abc import Mapping, Sequence
from math import ceil, inf
from typing import NamedTuple

from simulator.costs.collective_model import CollectiveModel
from simulator.engine.prediction import Prediction
from simulator.hardware.cluster import Cluster
from simulator.hardware.description import ClusterError
from simulator.hardware.topology import Ring
from simulator.memory import Footprint
from simulator.transformer.layer import (
    LayerPasses,
    embedding_passes,
    head_passes,
    passes_by_kind,
    prediction_passes,
)
from simulator.transformer.layer_kinds import LayerKind
from simulator.transformer.machine import Machine
from simulator.transformer.pass_cost import PassCost
from simulator.transformer.scenario import Execution, Transformer
from simulator.transformer.stages import DeviceLayers, Division, division_of
from simulator.transformer.training_memory import (
    DeviceParameters,
    device_parameters,
    layer_parameters,
    memory_of,
    trained_parameters,
)

_MEMORY_DEVIATION = 0.04
"""Standard deviation of the relative error of memory.

It makes the outcomes of 211 published layouts, half of which ran out of memory, most probable.
"""

_HOST_NORM = 3
"""Exponent of the norm that joins the times of host and device, either of which may wait for the
other.

It would be infinite if one of them were always ahead.
"""


def predict(
    model: Transformer,
    execution: Execution,
    machine: Machine,
    memory: Footprint | None = None,
) -> Prediction:
    """Return the prediction of a training step in closed form.

    Args:
        model: the model that is trained.
        execution: how the step is divided over devices.
        machine: the cluster and the software that drives it. Hosts that the step doesn't need are
            idle.
        memory: the `footprint` of these, where it is known already.

    Raises:
        ClusterError: the cluster has fewer devices than the scenario needs, or no 8-bit products.
        ValueError: degrees of parallelism don't divide the sizes of the model.
    """
    execution.check(model)
    _check_devices(execution, machine.cluster)
    machine = machine.for_devices(execution.devices)
    model_flops = model.flops(execution.global_batch)
    model = execution.on_devices(model)
    layers = passes_by_kind(model, execution, machine)
    division = division_of(model, execution)
    stages = _stages(model, execution, machine, layers, division)
    slowest = max(stages, key=lambda stage: stage.seconds)
    sends = _sends(model, execution, machine)
    slots = execution.microbatches
    steady, bubble = pipeline_seconds(
        [stage.seconds for stage in stages], slots, execution.interleave, sends.total, sends.exposed
    )
    gathers = _parameter_gathers(model, execution, machine, layers)
    parameters = [
        trained_parameters(model, execution, device_parameters(model, execution, device), device)
        for device, _ in division.first_places
    ]
    if model.experts is None:
        parameters = [max(parameters, key=lambda elements: elements.total)]
    first_layers = division.devices[0].layers
    synchronizations = (
        _gradient_synchronization(model, execution, machine, slowest, elements, first_layers)
        for elements in parameters
    )
    gradients = max(synchronizations, key=lambda moved: moved.exposed)
    update = max(_update_seconds(execution, machine, elements) for elements in parameters)
    step_overhead = machine.backend.step_us * 1e-6
    seconds = steady + bubble + update + gradients.exposed + slots * gathers.exposed + step_overhead
    dispatch = {"expert": slots * slowest.dispatch} if model.experts else {}
    dispatched = (
        {"expert": slots * (slowest.dispatch + slowest.hidden_dispatch)} if model.experts else {}
    )
    return Prediction(
        seconds=seconds,
        forward=slots * slowest.forward,
        backward=slots * slowest.backward,
        recompute=slots * slowest.recompute,
        update=update,
        bubble=bubble,
        host=slots * slowest.host + step_overhead,
        exposed={
            "tensor": slots * slowest.tensor,
            "pipeline": slots * 2 * sends.exposed,
            "data": gradients.exposed + slots * gathers.exposed,
            **dispatch,
        },
        communication={
            "tensor": slots * (slowest.tensor + slowest.hidden),
            "pipeline": slots * 2 * sends.total,
            "data": gradients.total + slots * gathers.total,
            **dispatched,
        },
        memory=memory or footprint(model, execution, machine),
        model_flops=model_flops,
        hardware_flops=model_flops + _recomputed_flops(model, execution, layers),
        peak_flop_per_s=machine.gemms.peak * execution.devices,
        devices=execution.devices,
        tokens=execution.global_batch * model.sequence_tokens,
    )


def _recomputed_flops(
    model: Transformer, execution: Execution, layers: Mapping[LayerKind, LayerPasses]
) -> float:
    """Return the FLOP of what all devices recompute in a step."""
    device_passes = execution.tensor * execution.replicas * execution.microbatches
    return device_passes * sum(
        layers[kind].recompute.flops * count for kind, count in model.kind_counts.items()
    )


def _check_devices(execution: Execution, cluster: Cluster) -> None:
    if execution.devices > cluster.num_devices:
        raise ClusterError(
            f"the scenario needs {execution.devices} devices (tensor {execution.tensor} * context "
            f"{execution.context} * data {execution.data} * pipeline {execution.pipeline}), "
            f"{cluster.name!r} has {cluster.num_devices}; choose smaller degrees or more hosts"
        )


def footprint(model: Transformer, execution: Execution, machine: Machine) -> Footprint:
    """Return the memory of the device that needs most, and the capacity of a device.

    Raises:
        ValueError: degrees of parallelism don't divide the sizes of the model.
    """
    device = machine.cluster.device
    memory = memory_of(model, execution)
    allocated_in_layers = memory.activations + memory.temporaries
    return Footprint(
        memory._asdict(),
        reserve=1e9 * device.reserve_gb,
        capacity=device.memory_bytes,
        fragmentation=machine.backend.fragmentation * allocated_in_layers,
        deviation=_MEMORY_DEVIATION * memory.total,
    )


def pipeline_seconds(
    stages: Sequence[float], microbatches: int, interleave: int, send: float, waited: float
) -> tuple[float, float]:
    """Return the busy seconds of the slowest stage, and its bubble, under gpipe and 1f1b.

    The sum is exactly that of `simulator.engine.clock` for these schedules where all stages but the
    last are equal and sends are exposed; stages that differ more fill and drain faster. With fewer
    microbatches than devices, a device also waits for a microbatch to come back for its next chunk;
    the sum is then exact where all stages are equal.

    Args:
        stages: seconds of a microbatch on each device, forward and backward, without sends.
        microbatches: number of microbatches.
        interleave: number of stages of a device.
        send: seconds of a message to the next device, in all chunks together.
        waited: exposed seconds of that message.
    """
    slowest = max(stages)
    others = sum(stages) - slowest + 2 * (len(stages) - 1) * send
    returns = max(0.0, others - (microbatches - 1) * (slowest + 2 * waited))
    bubble = (others + (interleave - 1) * returns) / interleave
    return microbatches * (slowest + 2 * waited), bubble


class _Stage(NamedTuple):
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
    """

    forward: float = 0.0
    backward: float = 0.0
    recompute: float = 0.0
    tensor: float = 0.0
    host: float = 0.0
    hidden: float = 0.0
    dispatch: float = 0.0
    hidden_dispatch: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of the stage."""
        computed = self.forward + self.backward + self.recompute
        return computed + self.tensor + self.host + self.dispatch

    def slowed(self, factor: float) -> "_Stage":
        """Return the stage on a device that computes more slowly; nothing else changes."""
        return self._replace(
            forward=self.forward * factor,
            backward=self.backward * factor,
            recompute=self.recompute * factor,
        )

    def __add__(self, other: "_Stage") -> "_Stage":  # pyright: ignore[reportIncompatibleMethodOverride]
        return _Stage(
            self.forward + other.forward,
            self.backward + other.backward,
            self.recompute + other.recompute,
            self.tensor + other.tensor,
            self.host + other.host,
            self.hidden + other.hidden,
            self.dispatch + other.dispatch,
            self.hidden_dispatch + other.hidden_dispatch,
        )

    def __mul__(self, count: int) -> "_Stage":  # pyright: ignore[reportIncompatibleMethodOverride]
        return _Stage(
            self.forward * count,
            self.backward * count,
            self.recompute * count,
            self.tensor * count,
            self.host * count,
            self.hidden * count,
            self.dispatch * count,
            self.hidden_dispatch * count,
        )


def _stages(
    model: Transformer,
    execution: Execution,
    machine: Machine,
    layers: Mapping[LayerKind, LayerPasses],
    division: Division,
) -> list[_Stage]:
    """Return the stages of the devices of a pipeline; the embedding and the loss are at its ends.

    Each is on the slowest of all devices, which limits the pace of the step.
    """
    slowdown = machine.slowest_of(execution.devices)
    by_kind = {
        kind: _layer(passes, execution, machine).slowed(slowdown) for kind, passes in layers.items()
    }
    embedding = _end(embedding_passes(model, execution, machine), machine).slowed(slowdown)
    head = _end(head_passes(model, execution, machine), machine).slowed(slowdown)
    prediction = _Stage()
    if model.prediction_layers:
        passes = prediction_passes(model, execution, machine)
        prediction = _end(passes, machine).slowed(slowdown)

    def stage(device: DeviceLayers) -> _Stage:
        total = sum((by_kind[kind] * count for kind, count in device.counts), _Stage())
        if device.embedding:
            total += embedding
        if device.losses:
            total = total + head * device.losses + prediction * device.predictions
        return total

    by_device = {device: stage(device) for device, _ in division.first_places}
    return [by_device[device] for device in division.devices]


def _layer(layer: LayerPasses, execution: Execution, machine: Machine) -> _Stage:
    """Return what a layer adds to its stage."""
    passes = (layer.forward, layer.backward, layer.recompute)
    dispatch = sum(cost.dispatch for cost in passes)
    part = _exposed_dispatch(layer, execution, machine)
    return _Stage(
        layer.forward.compute,
        layer.backward.compute,
        layer.recompute.compute,
        sum(cost.communication for cost in passes),
        sum(_host_wait(cost, machine, part * cost.dispatch) for cost in passes),
        sum(cost.hidden for cost in passes),
        part * dispatch,
        (1 - part) * dispatch,
    )


def _exposed_dispatch(layer: LayerPasses, execution: Execution, machine: Machine) -> float:
    """Return the exposed part of the seconds in which tokens get to experts and back."""
    passes = (layer.forward, layer.backward, layer.recompute)
    dispatch = sum(cost.dispatch for cost in passes)
    if not execution.overlap_dispatch or not dispatch:
        return 1.0
    far = execution.expert * execution.expert_shards > machine.cluster.devices_per_host
    compute = sum(cost.compute for cost in passes)
    return machine.exposed_seconds(dispatch, compute, far) / dispatch


def _end(passes: tuple[PassCost, PassCost], machine: Machine) -> _Stage:
    """Return what the embedding or the loss adds to its stage."""
    forward, backward = passes
    return _Stage(
        forward=forward.compute,
        backward=backward.compute,
        tensor=forward.communication + backward.communication,
        host=_host_wait(forward, machine) + _host_wait(backward, machine),
    )


def _host_wait(cost: PassCost, machine: Machine, exposed: float = 0.0) -> float:
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


class _Communication(NamedTuple):
    """Seconds of communication, and the exposed part of them."""

    total: float
    exposed: float


_NO_COMMUNICATION = _Communication(0.0, 0.0)


def _sends(model: Transformer, execution: Execution, machine: Machine) -> _Communication:
    """Return the messages of a microbatch between stages, one way, in all chunks of a schedule."""
    if execution.pipeline == 1:
        return _NO_COMMUNICATION
    stream = 2.0 * execution.tokens(model) * model.hidden
    divided = execution.sequence_parallel or execution.scatter_sends
    message = stream / (execution.tensor if divided else 1)
    chunk = machine.network.send_seconds(message, execution.tensor * execution.replicas)
    if divided and not execution.sequence_parallel:
        chunk += machine.network.seconds(
            "all_gather", stream, machine.network.ring(execution.tensor)
        )
    total = execution.interleave * chunk
    # a device with one stage waits for the result of the next device, so overlap gains nothing
    if not execution.overlap_sends or execution.interleave == 1:
        return _Communication(total, total)
    between_hosts = execution.tensor * execution.replicas >= machine.cluster.devices_per_host
    return _Communication(total, machine.exposed_send(total, inf, between_hosts))


def _gradient_synchronization(
    model: Transformer,
    execution: Execution,
    machine: Machine,
    stage: _Stage,
    parameters: DeviceParameters,
    layers: int,
) -> _Communication:
    """Return the communication of gradients, and of updated parameters, at the end of the step.

    Args:
        model: the model.
        execution: the execution.
        machine: the machine.
        stage: the stage of the slowest device.
        parameters: trained parameters of a device.
        layers: layers of the first device.
    """
    if execution.zero == 3:  # layer by layer, with the parameters
        return _NO_COMMUNICATION
    network = machine.network
    width = machine.gathered_as(model.precision).parameter_width
    reduced, gathered, far = 0.0, 0.0, False
    for part in _replicated(parameters, execution, machine):
        far = far or part.hosts > 1
        gradient = part.elements * execution.sent_gradient_bytes
        sharded = execution.zero > 0 and not execution.all_reduces_gradients
        sums = 1
        if execution.combined_bytes:
            sums = max(1, ceil(gradient / execution.combined_bytes))
        reduced += sums * part.reduce_seconds(gradient / sums, network, sharded)
        if execution.zero:
            gathered += part.gather_seconds(width * part.elements, network, execution.broadcasts)
    tied = 0.0
    if model.tied and execution.pipeline > 1 and model.adapters is None:
        # the first and the last stage sum the gradients of their copies of the embedding
        table = model.vocab * model.hidden / execution.tensor * execution.sent_gradient_bytes
        tied = network.send_seconds(
            table, execution.tensor * execution.replicas * (execution.pipeline - 1)
        )
    total = reduced + gathered + tied
    if not execution.overlap_gradients:
        return _Communication(total, total)
    # Gradients of all layers but the first, which are ready last, overlap with the backward pass of
    # the last microbatch; parameters of all layers but the first, which are needed first, overlap
    # with the forward pass of the first microbatch.
    part = 1 - 1 / max(2, layers)
    pairs = ((reduced, stage.backward), (gathered, stage.forward))
    exposed = sum(
        moved * (1 - part) + machine.exposed_seconds(moved * part, compute, far)
        for moved, compute in pairs
    )
    return _Communication(total, exposed + tied)


class _Replicated(NamedTuple):
    """Parameters that devices have copies of, which ZeRO shards within groups of them.

    Attributes:
        elements: number of parameters.
        ring: all devices with copies.
        shards: devices of a group.
        copies: devices with the same shard, in different groups; None if there is one group.
    """

    elements: float
    ring: Ring
    shards: Ring
    copies: Ring | None

    @property
    def hosts(self) -> int:
        """Hosts with copies."""
        return self.ring.hosts

    def reduce_seconds(self, num_bytes: float, network: CollectiveModel, sharded: bool) -> float:
        """Return the seconds of the sum of gradients, of which a device keeps its shard.

        Args:
            num_bytes: bytes of the gradients.
            network: costs of collectives.
            sharded: whether it keeps its shard alone.
        """
        if not sharded:
            return network.seconds("all_reduce", num_bytes, self.ring)
        seconds = network.seconds("reduce_scatter", num_bytes, self.shards)
        if self.copies is not None:
            shard = num_bytes / self.shards.size
            seconds += network.seconds("all_reduce", shard, self.copies)
        return seconds

    def gather_seconds(self, num_bytes: float, network: CollectiveModel, broadcasts: bool) -> float:
        """Return the seconds in which devices get all parameters of their group.

        Args:
            num_bytes: bytes of the parameters.
            network: costs of collectives.
            broadcasts: whether devices broadcast their shards one after the other.
        """
        seconds = network.seconds("all_gather", num_bytes, self.shards)
        if broadcasts:
            seconds += (self.shards.size - 1) * network.seconds("all_gather", 0.0, self.shards)
        return seconds


def _replicated(
    parameters: DeviceParameters, execution: Execution, machine: Machine
) -> list[_Replicated]:
    """Return the parameters outside and inside of experts, with the groups that have copies."""

    def part(elements: float, replicas: int, shards: int, stride: int) -> _Replicated:
        copies = replicas // shards
        return _Replicated(
            elements,
            machine.data_ring(replicas, stride),
            machine.data_ring(shards, stride),
            machine.data_ring(copies, stride * shards) if copies > 1 else None,
        )

    whole = parameters.layers + parameters.ends
    parts = [part(whole, execution.replicas, execution.shards, execution.tensor)]
    if parameters.experts:
        stride = execution.expert * execution.expert_shards
        parts.append(
            part(
                parameters.experts,
                execution.expert_replicas,
                execution.expert_replica_shards,
                stride,
            )
        )
    return parts


def _parameter_gathers(
    model: Transformer,
    execution: Execution,
    machine: Machine,
    layers: Mapping[LayerKind, LayerPasses],
) -> _Communication:
    """Return the communication of ZeRO-3 per microbatch.

    Parameters are gathered before each layer, in either pass, and gradients scattered after it.
    Those of the embeddings are gathered once: of the input embedding before everything else, and
    its gradient scattered after it, so that both are exposed; of the output embedding beside the
    last layer. Adapters are small: their gradients are not counted.
    """
    if execution.zero < 3:
        return _NO_COMMUNICATION
    total, all_exposed, first = 0.0, 0.0, 0.0
    for kind, count in model.kind_counts.items():
        layer = layers[kind]
        moved = _sharded(layer_parameters(model, execution, kind), model, execution, machine)
        backward = layer.backward + layer.recompute
        regather = (
            moved.gather if machine.backend.regathers and execution.recompute == "full" else 0.0
        )
        dispatched = _exposed_dispatch(layer, execution, machine)
        # the parameters of a layer are fetched while the layer before it computes
        exposed = moved.copies
        for cost, compute, seconds in (
            (layer.forward, layer.forward.compute + layer.forward.communication, moved.gather),
            (backward, backward.compute, regather + moved.gather + moved.scatter),
        ):
            more = machine.exposed_seconds(seconds, compute, moved.between_hosts)
            others = dispatched * cost.dispatch
            waits = (_host_wait(cost, machine, others + each) for each in (0.0, more))
            exposed += more - (next(waits) - next(waits))
        total += count * (2 * moved.gather + regather + moved.scatter + moved.copies)
        all_exposed += count * exposed
        first = first or moved.gather
    table = DeviceParameters(model.embedding / execution.tensor, 0.0)
    ends = _sharded(table, model, execution, machine)
    total += ends.gather + ends.scatter + ends.copies
    first += ends.gather + ends.scatter + ends.copies
    if not model.tied:
        last = layers[model.kinds[-1]]
        table = DeviceParameters(model.vocab * model.hidden / execution.tensor, 0.0)
        ends = _sharded(table, model, execution, machine)
        total += ends.gather + ends.scatter + ends.copies
        all_exposed += ends.copies
        for compute, seconds in (
            (last.forward.compute, ends.gather),
            (last.backward.compute, ends.scatter),
        ):
            all_exposed += machine.exposed_seconds(seconds, compute, ends.between_hosts)
    return _Communication(total, all_exposed + first)


class _Sharded(NamedTuple):
    """Seconds of the communication of parameters that ZeRO-3 shards.

    Attributes:
        gather: an all_gather of the parameters.
        scatter: the sum of their gradients.
        copies: copies from and to the buffers of these, in both passes.
        between_hosts: whether the communication is between hosts.
    """

    gather: float
    scatter: float
    copies: float
    between_hosts: bool


def _sharded(
    parameters: DeviceParameters, model: Transformer, execution: Execution, machine: Machine
) -> _Sharded:
    """Return the communication of parameters of a device that ZeRO-3 shards.

    Copies read and write the gathered parameters in both passes, and read a gradient to write it in
    the type that is communicated.
    """
    gather, scatter, far, copied = 0.0, 0.0, False, 0.0
    width = machine.gathered_as(model.precision).parameter_width
    for part in _replicated(parameters, execution, machine):
        far = far or part.hosts > 1
        gather += part.gather_seconds(width * part.elements, machine.network, broadcasts=False)
        copied += 2 * 2 * width * part.elements
        if model.adapters is None:
            gradient = execution.sent_gradient_bytes * part.elements
            scatter += part.reduce_seconds(gradient, machine.network, sharded=True)
            copied += 2.0 * part.elements + gradient
    copies = machine.memory_seconds(copied, 3) if execution.copies_shards and copied else 0.0
    return _Sharded(gather, scatter, copies, far)


def _update_seconds(execution: Execution, machine: Machine, parameters: DeviceParameters) -> float:
    """Return the seconds of the optimizer's pass over the parameters of a device."""
    elements, experts = parameters.layers + parameters.ends, parameters.experts
    if execution.zero:
        elements /= execution.shards
        experts /= execution.expert_replica_shards
    return machine.memory_seconds((elements + experts) * machine.backend.update_bytes, 10)
