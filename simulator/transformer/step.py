"""Seconds of a training step, and their breakdown."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import inf

from simulator.engine.prediction import Prediction
from simulator.hardware.cluster import Cluster
from simulator.hardware.description import ClusterError
from simulator.memory import Footprint
from simulator.transformer.layer import (
    LayerPasses,
    embedding_passes,
    head_passes,
    layer_passes,
)
from simulator.transformer.machine import Machine
from simulator.transformer.pass_cost import PassCost
from simulator.transformer.scenario import Execution, Transformer
from simulator.transformer.training_memory import memory_of, stage_parameters

_HOST_NORM = 3
"""Exponent of the norm that joins the times of host and device, either of which may wait for the
other.

It would be infinite if one of them were always ahead.
"""


def predict(model: Transformer, execution: Execution, machine: Machine) -> Prediction:
    """Return the prediction of a training step in closed form.

    Args:
        model: the model that is trained.
        execution: how the step is divided over devices.
        machine: the cluster and the software that drives it.

    Raises:
        ClusterError: the cluster has fewer devices than the scenario needs, or no 8-bit products.
        ValueError: degrees of parallelism don't divide the sizes of the model.
    """
    execution.check(model)
    _check_devices(execution, machine.cluster)
    layer = layer_passes(model, execution, machine)
    stages = _stages(model, execution, machine, layer)
    slowest = max(stages, key=lambda stage: stage.seconds)
    sends = _sends(model, execution, machine)
    slots = execution.microbatches
    steady, bubble = pipeline_seconds(
        [stage.seconds for stage in stages], slots, execution.interleave, sends.total, sends.exposed
    )
    gathers = _parameter_gathers(model, execution, machine, layer)
    gradients = _gradient_synchronization(model, execution, machine, slowest)
    update = _update_seconds(model, execution, machine)
    step_overhead = machine.backend.step_us * 1e-6
    seconds = steady + bubble + update + gradients.exposed + slots * gathers.exposed + step_overhead
    model_flops = model.flops(execution.global_batch)
    device_passes = execution.tensor * execution.context * slots * execution.data
    recomputed_flops = layer.recompute.flops * model.layers * device_passes
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
        },
        communication={
            "tensor": slots * (slowest.tensor + slowest.hidden),
            "pipeline": slots * 2 * sends.total,
            "data": gradients.total + slots * gathers.total,
        },
        memory=_footprint(model, execution, machine.cluster),
        model_flops=model_flops,
        hardware_flops=model_flops + recomputed_flops,
        peak_flop_per_s=machine.gemms.peak * execution.devices,
        devices=execution.devices,
        tokens=execution.global_batch * model.seq,
    )


def _check_devices(execution: Execution, cluster: Cluster) -> None:
    if execution.devices > cluster.num_devices:
        raise ClusterError(
            f"the scenario needs {execution.devices} devices (tensor {execution.tensor} * context "
            f"{execution.context} * data {execution.data} * pipeline {execution.pipeline}), "
            f"{cluster.name!r} has {cluster.num_devices}; choose smaller degrees or more hosts"
        )


def _footprint(model: Transformer, execution: Execution, cluster: Cluster) -> Footprint:
    roles = asdict(memory_of(model, execution))
    return Footprint(roles, 1e9 * cluster.device.reserve_gb, cluster.device.memory_bytes)


def pipeline_seconds(
    stages: Sequence[float], microbatches: int, interleave: int, send: float, waited: float
) -> tuple[float, float]:
    """Return the busy seconds of the slowest stage, and its bubble, under gpipe and 1f1b.

    The sum is exactly that of `simulator.engine.clock` for these schedules where all stages but the
    last are equal and sends are exposed; stages that differ more fill and drain faster.

    Args:
        stages: seconds of a microbatch on each device, forward and backward, without sends.
        microbatches: number of microbatches.
        interleave: number of stages of a device.
        send: seconds of a message to the next device, in all chunks together.
        waited: exposed seconds of that message.
    """
    slowest = max(stages)
    bubble = sum(stages) - slowest + 2 * (len(stages) - 1) * send
    return microbatches * (slowest + 2 * waited), bubble / interleave


@dataclass(frozen=True, slots=True)
class _Stage:
    """Seconds of one microbatch in one stage.

    Attributes:
        forward: computation of the forward pass.
        backward: computation of the backward pass.
        recompute: computation of what is recomputed.
        tensor: exposed communication over the tensor axis.
        host: waits for the host.
        hidden: communication over the tensor axis that overlaps with computation.
    """

    forward: float
    backward: float
    recompute: float
    tensor: float
    host: float
    hidden: float

    @property
    def seconds(self) -> float:
        """Seconds of the stage."""
        return self.forward + self.backward + self.recompute + self.tensor + self.host

    def slowed(self, factor: float) -> "_Stage":
        """Return the stage on a device that computes more slowly; nothing else changes."""
        return replace(
            self,
            forward=self.forward * factor,
            backward=self.backward * factor,
            recompute=self.recompute * factor,
        )

    def __add__(self, other: "_Stage") -> "_Stage":
        return _Stage(
            self.forward + other.forward,
            self.backward + other.backward,
            self.recompute + other.recompute,
            self.tensor + other.tensor,
            self.host + other.host,
            self.hidden + other.hidden,
        )


def _stages(
    model: Transformer, execution: Execution, machine: Machine, layer: LayerPasses
) -> list[_Stage]:
    """Return the stages of the devices of a pipeline; the embedding and the loss are at its ends.

    Each is on the slowest of all devices, which limits the pace of the step.
    """
    slowdown = machine.slowest_of(execution.devices)
    layers = _stage(layer, model.layers // execution.pipeline, machine).slowed(slowdown)
    embedding = _end(embedding_passes(model, execution, machine), machine).slowed(slowdown)
    head = _end(head_passes(model, execution, machine), machine).slowed(slowdown)
    if execution.pipeline == 1:
        return [layers + embedding + head]
    return [layers + embedding, *[layers] * (execution.pipeline - 2), layers + head]


def _stage(layer: LayerPasses, depth: int, machine: Machine) -> _Stage:
    """Return a stage of `depth` layers."""
    passes = (layer.forward, layer.backward, layer.recompute)
    return _Stage(
        depth * layer.forward.compute,
        depth * layer.backward.compute,
        depth * layer.recompute.compute,
        depth * sum(cost.communication for cost in passes),
        depth * sum(_host_wait(cost, machine) for cost in passes),
        depth * sum(cost.hidden for cost in passes),
    )


def _end(passes: tuple[PassCost, PassCost], machine: Machine) -> _Stage:
    """Return what the embedding or the loss adds to its stage."""
    forward, backward = passes
    return _Stage(
        forward.compute,
        backward.compute,
        0.0,
        forward.communication + backward.communication,
        _host_wait(forward, machine) + _host_wait(backward, machine),
        0.0,
    )


def _host_wait(cost: PassCost, machine: Machine) -> float:
    """Return the seconds that the device waits for the host.

    The host launches kernels one by one, and gets ahead only where they are long.
    """
    host = cost.kernels * machine.backend.kernel_us * 1e-6
    busy = cost.compute + cost.communication
    return (host**_HOST_NORM + busy**_HOST_NORM) ** (1 / _HOST_NORM) - busy


@dataclass(frozen=True, slots=True)
class _Communication:
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
    return _Communication(total, machine.exposed_seconds(total, inf, between_hosts))


def _gradient_synchronization(
    model: Transformer, execution: Execution, machine: Machine, stage: _Stage
) -> _Communication:
    """Return the communication of gradients, and of updated parameters, at the end of the step."""
    if execution.zero == 3:  # layer by layer, with the parameters
        return _NO_COMMUNICATION
    network = machine.network
    ring = machine.data_ring(execution.replicas, execution.tensor)
    elements = sum(stage_parameters(model, execution))
    gradient = elements * execution.sent_gradient_bytes
    if execution.zero:
        reduced = network.seconds("reduce_scatter", gradient, ring)
        gathered = network.seconds("all_gather", 2.0 * elements, ring)
    else:
        reduced = network.seconds("all_reduce", gradient, ring)
        gathered = 0.0
    tied = 0.0
    if model.tied and execution.pipeline > 1:
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
    part = 1 - 1 / max(2, model.layers // execution.pipeline)
    pairs = ((reduced, stage.backward), (gathered, stage.forward))
    exposed = sum(
        moved * (1 - part) + machine.exposed_seconds(moved * part, compute, ring.hosts > 1)
        for moved, compute in pairs
    )
    return _Communication(total, exposed + tied)


def _parameter_gathers(
    model: Transformer, execution: Execution, machine: Machine, layer: LayerPasses
) -> _Communication:
    """Return the communication of ZeRO-3 per microbatch.

    Parameters are gathered before each layer, in either pass, and gradients scattered after it.
    """
    if execution.zero < 3:
        return _NO_COMMUNICATION
    network = machine.network
    ring = machine.data_ring(execution.replicas, execution.tensor)
    elements = (model.layer_matrices + model.layer_vectors) / execution.tensor
    gather = network.seconds("all_gather", 2.0 * elements, ring)
    scatter = network.seconds("reduce_scatter", execution.sent_gradient_bytes * elements, ring)
    forward = layer.forward.compute + layer.forward.communication
    backward = layer.backward.compute + layer.recompute.compute
    regather = gather if machine.backend.regathers and execution.recompute == "full" else 0.0
    # the parameters of a layer are fetched while the layer before it computes
    exposed = 0.0
    for compute, moved in ((forward, gather), (backward, regather + gather + scatter)):
        exposed += machine.exposed_seconds(moved, compute, ring.hosts > 1)
    return _Communication(
        model.layers * (2 * gather + regather + scatter), model.layers * exposed + gather
    )


def _update_seconds(model: Transformer, execution: Execution, machine: Machine) -> float:
    """Return the seconds of the optimizer's pass over the parameters of the first stage."""
    elements = sum(stage_parameters(model, execution)) / (
        execution.replicas if execution.zero else 1
    )
    return machine.memory_seconds(elements * machine.backend.update_bytes, 10)
