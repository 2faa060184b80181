"""Seconds of a training step, and where they go."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import inf

from simulator.engine.prediction import Prediction
from simulator.hardware.description import ClusterError
from simulator.memory import Footprint
from simulator.transformer.layer import (
    LayerPhases,
    Phase,
    embedding_phases,
    head_phases,
    layer_phases,
)
from simulator.transformer.machine import Machine
from simulator.transformer.scenario import Execution, Transformer
from simulator.transformer.training_memory import memory_of, stage_parameters

_HOST_NORM = 3  # of host and device, which take turns in keeping each other waiting: infinite where one always leads


def predict(model: Transformer, plan: Execution, machine: Machine) -> Prediction:
    """A step of `model` under `plan`; a cluster with fewer devices than the plan needs, or odd divisions: `ValueError`."""
    plan.check(model)
    cluster = machine.cluster
    if plan.devices > cluster.num_devices:
        raise ClusterError(
            f"the plan needs {plan.devices} devices (tensor {plan.tensor} * context {plan.context} * data {plan.data} * pipeline {plan.pipeline}), "
            f"{cluster.name!r} has {cluster.num_devices}; choose smaller degrees or more hosts"
        )
    layer = layer_phases(model, plan, machine)
    ends = _Ends.of(model, plan, machine)
    depth = model.layers // plan.pipeline
    gathers = _ParameterGathers.of(model, plan, machine, layer)
    # the slowest stage sets the pace; at the ends of the pipeline the embedding and the loss come on top
    slow = machine.slowest_of(plan.devices)
    middle = _stage(layer, depth, machine).slowed(slow)
    first, last = middle + ends.first.slowed(slow), middle + ends.last.slowed(slow)
    stages = [middle] * plan.pipeline
    if plan.pipeline == 1:
        stages = [first + ends.last.slowed(slow)]
    else:
        stages[0], stages[-1] = first, last
    slowest = max(stages, key=lambda stage: stage.seconds)
    send = _send_seconds(model, plan, machine)
    far = plan.tensor * plan.replicas >= cluster.devices_per_host
    # with one stage a device, what comes back from the next one is waited for, whatever goes on beside the sends
    waited = machine.beside(send, inf, far) if plan.overlap_sends and plan.interleave > 1 else send
    slots = plan.microbatches
    steady, bubble = pipeline_seconds(
        [stage.seconds for stage in stages], slots, plan.interleave, send, waited
    )
    data = _DataAxis.of(model, plan, machine, slowest.forward, slowest.backward)
    update = _update_seconds(model, plan, machine)
    host = slots * slowest.host + machine.backend.step_us * 1e-6
    exposed = {
        "tensor": slots * slowest.tensor,
        "pipeline": slots * 2 * waited,
        "data": data.exposed + slots * gathers.exposed,
    }
    communication = {
        "tensor": slots * (slowest.tensor + slowest.hidden),
        "pipeline": slots * 2 * send,
        "data": data.total + slots * gathers.total,
    }
    seconds = (
        steady
        + bubble
        + update
        + data.exposed
        + slots * gathers.exposed
        + machine.backend.step_us * 1e-6
    )
    model_flops = model.flops(plan.global_batch)
    again = layer.recompute.flops * model.layers * plan.tensor * plan.context * slots * plan.data
    return Prediction(
        seconds=seconds,
        forward=slots * slowest.forward,
        backward=slots * slowest.backward,
        recompute=slots * slowest.recompute,
        update=update,
        bubble=bubble,
        host=host,
        exposed=exposed,
        communication=communication,
        memory=Footprint(
            asdict(memory_of(model, plan)),
            1e9 * cluster.device.reserve_gb,
            cluster.device.memory_bytes,
        ),
        model_flops=model_flops,
        hardware_flops=model_flops + again,
        peak_flop_per_s=machine.gemms.peak * plan.devices,
        devices=plan.devices,
        tokens=plan.global_batch * model.seq,
    )


def pipeline_seconds(
    stages: Sequence[float], microbatches: int, interleave: int, send: float, waited: float
) -> tuple[float, float]:
    """Seconds that the slowest stage is busy, and that it waits for the others, under gpipe and (interleaved) 1f1b.

    It is exactly what `simulator.engine.clock` finds for these schedules where all stages but the last are alike and devices wait for their
    sends; stages that differ more fill and drain faster.

    Args:
        stages: seconds of a microbatch on each device, forward and backward, sends left out.
        send: seconds of a message to the next device, in all chunks together.
        waited: the part of it during which devices don't compute.
    """
    slowest = max(stages)
    bubble = sum(stages) - slowest + 2 * (len(stages) - 1) * send
    return microbatches * (slowest + 2 * waited), bubble / interleave


@dataclass(frozen=True, slots=True)
class _Stage:
    """Seconds of one microbatch in one stage; `hidden` is communication that runs beside the others."""

    forward: float
    backward: float
    recompute: float
    tensor: float
    host: float
    hidden: float

    @property
    def seconds(self) -> float:
        return self.forward + self.backward + self.recompute + self.tensor + self.host

    def slowed(self, by: float) -> "_Stage":
        """The same on a slower device; collectives and the host are as fast as ever."""
        return replace(
            self,
            forward=self.forward * by,
            backward=self.backward * by,
            recompute=self.recompute * by,
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


def _stage(layer: LayerPhases, depth: int, machine: Machine) -> _Stage:
    phases = (layer.forward, layer.backward, layer.recompute)
    return _Stage(
        depth * layer.forward.compute,
        depth * layer.backward.compute,
        depth * layer.recompute.compute,
        depth * sum(phase.communication for phase in phases),
        depth * sum(_waiting(phase, machine) for phase in phases),
        depth * sum(phase.hidden for phase in phases),
    )


def _waiting(phase: Phase, machine: Machine) -> float:
    """Seconds that the device waits for the host, which launches kernels one by one and runs ahead only where they are long."""
    host, busy = (
        phase.kernels * machine.backend.kernel_us * 1e-6,
        phase.compute + phase.communication,
    )
    return (host**_HOST_NORM + busy**_HOST_NORM) ** (1 / _HOST_NORM) - busy


@dataclass(frozen=True, slots=True)
class _Ends:
    """What the first and the last stage do beside their layers."""

    first: _Stage
    last: _Stage

    @classmethod
    def of(cls, model: Transformer, plan: Execution, machine: Machine) -> "_Ends":
        both = (embedding_phases(model, plan, machine), head_phases(model, plan, machine))
        first, last = (
            _Stage(
                forward.compute,
                backward.compute,
                0.0,
                forward.communication + backward.communication,
                _waiting(forward, machine) + _waiting(backward, machine),
                0.0,
            )
            for forward, backward in both
        )
        return cls(first, last)


def _send_seconds(model: Transformer, plan: Execution, machine: Machine) -> float:
    """Seconds that a microbatch spends between stages, one way, all chunks of an interleaved schedule."""
    if plan.pipeline == 1:
        return 0.0
    stream = 2.0 * plan.tokens(model) * model.hidden
    divided = plan.sequence_parallel or plan.scatter_sends
    message = stream / (plan.tensor if divided else 1)
    one = machine.network.send_seconds(message, plan.tensor * plan.replicas)
    if divided and not plan.sequence_parallel:
        one += machine.network.seconds("all_gather", stream, machine.network.ring(plan.tensor))
    return plan.interleave * one


@dataclass(frozen=True, slots=True)
class _DataAxis:
    """Gradients over the data axis, at the end of the step."""

    total: float
    exposed: float

    @classmethod
    def of(
        cls, model: Transformer, plan: Execution, machine: Machine, forward: float, backward: float
    ) -> "_DataAxis":
        network = machine.network
        ring = machine.data_ring(plan.replicas, plan.tensor)
        elements = sum(stage_parameters(model, plan))
        gradient = elements * plan.sent_gradient_bytes
        if plan.zero == 3:  # with the parameters, layer by layer
            return cls(0.0, 0.0)
        if plan.zero:
            reduced = network.seconds("reduce_scatter", gradient, ring)
            gathered = network.seconds("all_gather", 2.0 * elements, ring)
        else:
            reduced, gathered = network.seconds("all_reduce", gradient, ring), 0.0
        tied = 0.0
        if (
            model.tied and plan.pipeline > 1
        ):  # first and last stage sum the gradients of their copies of the embedding
            table = model.vocab * model.hidden / plan.tensor * plan.sent_gradient_bytes
            tied = network.send_seconds(table, plan.tensor * plan.replicas * (plan.pipeline - 1))
        if not plan.overlap_gradients:
            return cls(reduced + gathered + tied, reduced + gathered + tied)
        # all but the first layer's gradients, the last to be ready, can hide behind the last microbatch's backward pass; likewise its
        # parameters, the first that are needed, behind the first's forward pass
        part = 1 - 1 / max(2, model.layers // plan.pipeline)
        pairs = ((reduced, backward), (gathered, forward))
        exposed = sum(
            moved * (1 - part) + machine.beside(moved * part, compute, ring.hosts > 1)
            for moved, compute in pairs
        )
        return cls(reduced + gathered + tied, exposed + tied)


@dataclass(frozen=True, slots=True)
class _ParameterGathers:
    """ZeRO-3: parameters gathered before each layer, forward and backward, gradients scattered after it; per microbatch."""

    total: float
    exposed: float

    @classmethod
    def of(
        cls, model: Transformer, plan: Execution, machine: Machine, layer: LayerPhases
    ) -> "_ParameterGathers":
        if plan.zero < 3:
            return cls(0.0, 0.0)
        network = machine.network
        ring = machine.data_ring(plan.replicas, plan.tensor)
        elements = (model.layer_matrices + model.layer_vectors) / plan.tensor
        gather = network.seconds("all_gather", 2.0 * elements, ring)
        scatter = network.seconds("reduce_scatter", plan.sent_gradient_bytes * elements, ring)
        forward = layer.forward.compute + layer.forward.communication
        backward = layer.backward.compute + layer.recompute.compute
        again = gather if machine.backend.regathers and plan.recompute == "full" else 0.0
        exposed = 0.0
        for compute, moved in ((forward, gather), (backward, again + gather + scatter)):
            exposed += machine.beside(
                moved, compute, ring.hosts > 1
            )  # fetched while the previous layer computes
        return cls(model.layers * (2 * gather + again + scatter), model.layers * exposed + gather)


def _update_seconds(model: Transformer, plan: Execution, machine: Machine) -> float:
    """The optimizer's pass over the parameters of the first stage."""
    elements = sum(stage_parameters(model, plan)) / (plan.replicas if plan.zero else 1)
    return machine.memory_seconds(elements * machine.backend.update_bytes, 10)
