"""The closed-form prediction of a training step: its seconds by part, and its memory."""

from collections.abc import Mapping, Sequence
from math import inf

from simulator.engine.prediction import Prediction
from simulator.hardware.cluster import Cluster
from simulator.hardware.description import ClusterError
from simulator.memory import Footprint
from simulator.transformer.layer import LayerPasses, head_passes, passes_by_kind
from simulator.transformer.layer_kinds import LayerKind
from simulator.transformer.machine import Machine
from simulator.transformer.scenario import Execution
from simulator.transformer.stage_seconds import stage_seconds
from simulator.transformer.stages import Division, division_of
from simulator.transformer.training_memory import (
    DeviceParameters,
    device_parameters,
    memory_of,
    trained_parameters,
)
from simulator.transformer.transformer_sizes import Transformer
from simulator.transformer.zero_communication import (
    NO_COMMUNICATION,
    Communication,
    gradient_synchronization,
    parameter_gathers,
)

_MEMORY_DEVIATION = 0.04
"""Standard deviation of the relative error of memory.

It makes the outcomes of 211 published layouts, half of which ran out of memory, most probable.
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
    stages = stage_seconds(model, execution, machine, layers, division)
    slowest = max(stages, key=lambda stage: stage.seconds)
    sends = _sends(model, execution, machine)
    slots = execution.microbatches
    messages = execution.messages
    steady, bubble = pipeline_seconds(
        [stage.seconds for stage in stages],
        slots,
        execution.interleave,
        sends.total,
        sends.exposed,
        messages,
    )
    gathers = parameter_gathers(model, execution, machine, layers)
    parameters = _trained_parameters(model, execution, division)
    first_layers = division.devices[0].layers
    synchronizations = (
        gradient_synchronization(model, execution, machine, slowest, elements, first_layers)
        for elements in parameters
    )
    gradients = max(synchronizations, key=lambda moved: moved.exposed)
    update = max(_update_seconds(execution, machine, elements) for elements in parameters)
    step_overhead = machine.backend.step_us * 1e-6
    seconds = steady + bubble + update + gradients.exposed + slots * gathers.exposed + step_overhead
    exposed = {
        "tensor": slots * slowest.tensor,
        "pipeline": slots * messages * sends.exposed,
        "data": gradients.exposed + slots * gathers.exposed,
    }
    communication = {
        "tensor": slots * (slowest.tensor + slowest.hidden),
        "pipeline": slots * messages * sends.total,
        "data": gradients.total + slots * gathers.total,
    }
    if model.experts:
        exposed["expert"] = slots * slowest.dispatch
        communication["expert"] = slots * (slowest.dispatch + slowest.hidden_dispatch)
    return Prediction(
        seconds=seconds,
        forward=slots * slowest.forward,
        backward=slots * slowest.backward,
        recompute=slots * slowest.recompute,
        update=update,
        bubble=bubble,
        host=slots * slowest.host + step_overhead,
        exposed=exposed,
        communication=communication,
        memory=memory or footprint(model, execution, machine),
        model_flops=model_flops,
        hardware_flops=model_flops + _recomputed_flops(model, execution, machine, layers),
        peak_flop_per_s=machine.gemms.peak * execution.devices,
        devices=execution.devices,
        tokens=execution.global_batch * model.sequence_tokens,
        software_deviation=machine.backend.deviation,
    )


def _trained_parameters(
    model: Transformer, execution: Execution, division: Division
) -> list[DeviceParameters]:
    """Return the trained parameters of the devices among which the slowest update is."""
    parameters = [
        trained_parameters(model, execution, device_parameters(model, execution, device), device)
        for device, _ in division.first_places
    ]
    if model.experts is None:
        return [max(parameters, key=lambda elements: elements.total)]
    return parameters


def _recomputed_flops(
    model: Transformer,
    execution: Execution,
    machine: Machine,
    layers: Mapping[LayerKind, LayerPasses],
) -> float:
    """Return the FLOP of what all devices recompute in a step."""
    flops = sum(layers[kind].recompute.flops * count for kind, count in model.kind_counts.items())
    if execution.repeats_head:
        forward, _ = head_passes(model, execution, machine)
        flops += (1 + model.prediction_layers) * forward.flops
    return execution.tensor * execution.replicas * execution.microbatches * flops


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
    stages: Sequence[float],
    microbatches: int,
    interleave: int,
    send: float,
    waited: float,
    messages: int = 2,
) -> tuple[float, float]:
    """Return the busy seconds of the slowest stage, and its bubble, under gpipe and 1f1b.

    The sum equals the makespan of `simulator.engine.clock` for these schedules if all stages but
    the last are equal and sends are exposed; stages that differ more fill and drain faster. With
    fewer microbatches than devices, a device also waits for a microbatch to come back for its next
    chunk; the sum is then exact if all stages are equal.

    Args:
        stages: seconds of a microbatch on each device, forward and backward, without sends.
        microbatches: number of microbatches.
        interleave: number of stages of a device.
        send: seconds of a message to the next device, in all chunks together.
        waited: exposed seconds of that message.
        messages: messages of a microbatch that a device waits for, one after the other.
    """
    slowest = max(stages)
    pace = slowest + messages * waited
    others = sum(stages) - slowest + 2 * (len(stages) - 1) * send
    returns = max(0.0, others - (microbatches - 1) * pace)
    bubble = (others + (interleave - 1) * returns) / interleave
    return microbatches * pace, bubble


def _sends(model: Transformer, execution: Execution, machine: Machine) -> Communication:
    """Return the messages of a microbatch between stages, one way, in all chunks of a schedule."""
    if execution.pipeline == 1:
        return NO_COMMUNICATION
    stream = 2.0 * execution.tokens(model) * model.hidden
    divided = execution.sequence_parallel or execution.scatter_sends
    message = stream / (execution.tensor if divided else 1)
    chunk = machine.network.send_seconds(message, execution.tensor * execution.replicas)
    if divided and not execution.sequence_parallel:
        chunk += machine.network.seconds(
            "all_gather", stream, machine.network.ring(execution.tensor)
        )
    total = execution.interleave * chunk
    # a device with one stage and no spare microbatch waits for the result of the next device
    waits = execution.interleave == 1 and not execution.spare_microbatches
    if not execution.overlap_sends or waits:
        return Communication(total, total)
    between_hosts = execution.tensor * execution.replicas >= machine.cluster.devices_per_host
    return Communication(total, machine.exposed_send(total, inf, between_hosts))


def _update_seconds(execution: Execution, machine: Machine, parameters: DeviceParameters) -> float:
    """Return the seconds of the optimizer's pass over the parameters of a device."""
    elements, experts = parameters.layers + parameters.ends, parameters.experts
    if execution.zero:
        elements /= execution.shards
        experts /= execution.expert_replica_shards
    return machine.memory_seconds((elements + experts) * machine.backend.update_bytes, 10)
