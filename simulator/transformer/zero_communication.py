"""Communication of gradients and parameters over the data axis, with and without ZeRO."""

from collections.abc import Mapping
from math import ceil
from typing import NamedTuple

from simulator.costs.collective_model import CollectiveModel
from simulator.hardware.topology import Ring
from simulator.transformer.layer import LayerPasses
from simulator.transformer.layer_kinds import LayerKind
from simulator.transformer.machine import Machine
from simulator.transformer.scenario import Execution
from simulator.transformer.stage_seconds import StageSeconds, exposed_dispatch, host_wait
from simulator.transformer.training_memory import DeviceParameters, layer_parameters
from simulator.transformer.transformer_sizes import Transformer


class Communication(NamedTuple):
    """Seconds of communication, and the exposed part of them."""

    total: float
    exposed: float


NO_COMMUNICATION = Communication(0.0, 0.0)


def gradient_synchronization(
    model: Transformer,
    execution: Execution,
    machine: Machine,
    stage: StageSeconds,
    parameters: DeviceParameters,
    layers: int,
) -> Communication:
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
        return NO_COMMUNICATION
    network = machine.network
    width = _gathered_width(model, execution, machine)
    reduced, gathered, copied, far = 0.0, 0.0, 0.0, False
    for part in _replicated(parameters, execution, machine):
        far = far or part.hosts > 1
        gradient = part.elements * execution.sent_gradient_bytes
        sharded = execution.zero > 0 and not execution.all_reduces_gradients
        sums = 1
        if execution.combined_bytes:
            sums = max(1, ceil(gradient / execution.combined_bytes))
        reduced += sums * part.reduce_seconds(gradient / sums, network, sharded)
        if execution.gradient_copy_bytes and part.ring.size > 1:
            copied += machine.memory_seconds(execution.gradient_copy_bytes * part.elements, 2)
        if execution.zero:
            gathered += part.gather_seconds(width * part.elements, network, execution.broadcasts)
    tied = 0.0
    if model.tied and execution.pipeline > 1 and model.adapters is None:
        # the first and the last stage sum the gradients of their copies of the embedding
        table = model.vocab * model.hidden / execution.tensor * execution.sent_gradient_bytes
        tied = network.send_seconds(
            table, execution.tensor * execution.replicas * (execution.pipeline - 1)
        )
    total = reduced + gathered + tied + copied
    if not execution.overlap_gradients:
        return Communication(total, total)
    # Gradients of all layers but the first, which are ready last, overlap with the backward pass of
    # the last microbatch; parameters of all layers but the first, which are needed first, overlap
    # with the forward pass of the first microbatch.
    part = 1 - 1 / max(2, layers)
    forward, backward = stage.windows
    pairs = ((reduced, backward), (gathered, forward))
    exposed = sum(
        moved * (1 - part) + machine.exposed_seconds(moved * part, compute, far)
        for moved, compute in pairs
    )
    return Communication(total, exposed + tied + copied)


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
        """Return the seconds of summing gradients, after which a device keeps its shard.

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


def parameter_gathers(
    model: Transformer,
    execution: Execution,
    machine: Machine,
    layers: Mapping[LayerKind, LayerPasses],
) -> Communication:
    """Return the communication of ZeRO-3 per microbatch.

    Parameters are gathered before each layer, in either pass, and gradients scattered after it.
    Those of the embeddings are gathered once: of the input embedding before everything else, and
    its gradient scattered after it, so that both are exposed; of the output embedding beside the
    last layer. Adapters are small: their gradients are not counted.
    """
    if execution.zero < 3:
        return NO_COMMUNICATION
    total, all_exposed, first = 0.0, 0.0, 0.0
    for kind, count in model.kind_counts.items():
        layer = layers[kind]
        moved = _sharded(layer_parameters(model, execution, kind), model, execution, machine)
        backward = layer.backward + layer.recompute
        regather = (
            moved.gather if machine.backend.regathers and execution.recompute == "full" else 0.0
        )
        dispatched = exposed_dispatch(layer, execution, machine)
        # the parameters of a layer are fetched while the layer before it computes
        exposed = moved.copies
        for cost, compute, seconds in (
            (layer.forward, layer.forward.compute + layer.forward.communication, moved.gather),
            (backward, backward.compute, regather + moved.gather + moved.scatter),
        ):
            more = machine.exposed_seconds(seconds, compute, moved.between_hosts)
            others = dispatched * cost.dispatch
            waits = (host_wait(cost, machine, others + each) for each in (0.0, more))
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
    return Communication(total, all_exposed + first)


def _gathered_width(model: Transformer, execution: Execution, machine: Machine) -> float:
    """Return the bytes of a parameter as devices gather it."""
    return 4.0 if execution.autocast else machine.gathered_as(model.precision).parameter_width


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
    width = _gathered_width(model, execution, machine)
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
