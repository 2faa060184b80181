"""Costs of the passes over a layer, the embedding and the loss.

A pass has matrix products, memory traffic, kernel launches, and collectives over the tensor axis.
Elementwise traffic is that of Megatron-LM's fused kernels, in elements of the residual stream
(tokens * hidden), of the scores, or of the MLP's inner width. In formulas `w` is the bytes of an
element; a mask of dropout is a byte.
"""

from dataclasses import dataclass

from simulator.transformer.machine import Machine
from simulator.transformer.scenario import Execution, Transformer

_COLLECTIVE_LAUNCHES = 2
"""Launches of the host per collective: the collective, and the event that the next kernel waits
for."""


@dataclass(frozen=True, slots=True)
class PassCost:
    """The cost of one pass over a layer on one device.

    Attributes:
        compute: seconds of kernels.
        kernels: number of kernels.
        communication: seconds of exposed collectives over the tensor axis.
        flops: FLOP of the matrix products.
        hidden: seconds of collectives over the tensor axis that overlap with computation.
    """

    compute: float = 0.0
    kernels: int = 0
    communication: float = 0.0
    flops: float = 0.0
    hidden: float = 0.0

    def __add__(self, other: "PassCost") -> "PassCost":
        return PassCost(
            self.compute + other.compute,
            self.kernels + other.kernels,
            self.communication + other.communication,
            self.flops + other.flops,
            self.hidden + other.hidden,
        )


@dataclass(frozen=True, slots=True)
class LayerPasses:
    """The passes over a layer: forward, backward, and what is recomputed of the forward pass."""

    forward: PassCost
    backward: PassCost
    recompute: PassCost


def layer_passes(model: Transformer, execution: Execution, machine: Machine) -> LayerPasses:
    """Return the passes of one microbatch over one layer."""
    attention = _attention(model, execution, machine)
    dense = _dense(model, execution, machine)
    linear = _linear(model, execution, machine)
    collectives = _collectives(model, execution, machine)
    exchange = _sequence_exchange(model, execution, machine)
    forward = attention[0] + dense[0] + linear[0] + collectives[0] + exchange
    backward = attention[1] + dense[1] + linear[1] + collectives[1] + exchange
    match execution.recompute:
        case "none":
            recompute = PassCost()
        case "selective":
            recompute = attention[0] if model.attention == "naive" else PassCost()
        case "full":
            recompute = forward
    return LayerPasses(forward, backward, recompute)


def head_passes(
    model: Transformer, execution: Execution, machine: Machine
) -> tuple[PassCost, PassCost]:
    """Return the forward and backward pass of the output embedding and the loss."""
    tokens = execution.tokens(model)
    columns = -(-model.vocab // execution.tensor)
    gemms = machine.gemms
    logits = tokens * columns
    flops = 2.0 * tokens * columns * model.hidden
    # bytes per logit and kernels, of each pass. Unfused: f32 logits, their maximum, difference,
    # exponential, sum and quotient; the gradient scaled and cast back. Fused: two reads, one write
    if execution.fused_loss:
        forward_traffic, backward_traffic = (4.0, 1), (2.0, 1)
    else:
        forward_traffic, backward_traffic = (38.0, 7), (22.0, 4)
    forward = gemms.seconds(tokens, columns, model.hidden) + machine.memory_seconds(
        forward_traffic[0] * logits, forward_traffic[1]
    )
    backward = gemms.seconds(tokens, model.hidden, columns) + gemms.seconds(
        model.hidden, columns, tokens
    )
    backward += machine.memory_seconds(
        backward_traffic[0] * logits, backward_traffic[1]
    ) + _accumulation(columns * model.hidden, execution, machine)
    stream = 2.0 * tokens * model.hidden
    ring = machine.network.ring(execution.tensor)
    kind = "reduce_scatter" if execution.sequence_parallel else "all_reduce"
    return (
        PassCost(forward + machine.memory_seconds(4 * tokens * model.hidden, 1), 9, 0.0, flops),
        PassCost(
            backward + machine.memory_seconds(6 * tokens * model.hidden, 2),
            8,
            machine.network.seconds(kind, stream, ring),
            2 * flops,
        ),
    )


def embedding_passes(
    model: Transformer, execution: Execution, machine: Machine
) -> tuple[PassCost, PassCost]:
    """Return the forward and backward pass of the input embedding.

    Forward: a gather, a sum with the positions, and dropout. Backward: scatters of the gradient.
    """
    stream = execution.tokens(model) * model.hidden
    ring = machine.network.ring(execution.tensor)
    kind = "reduce_scatter" if execution.sequence_parallel else "all_reduce"
    table = model.vocab // execution.tensor * model.hidden
    zeros = machine.memory_seconds(2.0 * table, 1)  # the target of the scatter
    backward = (
        machine.memory_seconds(16.0 * stream, 4) + zeros + _accumulation(table, execution, machine)
    )
    return (
        PassCost(
            machine.memory_seconds(15.0 * stream, 4),
            4,
            machine.network.seconds(kind, 2.0 * stream, ring),
        ),
        PassCost(backward, 6),
    )


def _accumulation(elements: float, execution: Execution, machine: Machine) -> float:
    """Return the seconds by which a product is slower that adds a weight gradient to its sum.

    It reads and writes the sum over microbatches instead of writing a gradient.
    """
    if not execution.accumulates:
        return 0.0
    return (
        machine.memory_seconds((2.0 * execution.gradient_bytes - 2.0) * elements, 1)
        - machine.launch_seconds
    )


def _linear(
    model: Transformer, execution: Execution, machine: Machine
) -> tuple[PassCost, PassCost]:
    """Return the passes of the four linear layers, with two products each in the backward pass."""
    tokens = execution.tokens(model)
    t, h = execution.tensor, model.hidden
    up = (2 if model.gated else 1) * model.ffn_width
    shapes = (
        (model.qkv_width // t, h),
        (h, h // t),
        (up // t, h),
        (h, model.ffn_width // t),
    )  # (out, in)
    gemms = machine.linear_f8 if model.precision == "f8" else machine.gemms
    forward = sum(gemms.seconds(tokens, out, inner) for out, inner in shapes)
    backward = sum(
        gemms.seconds(tokens, inner, out) + gemms.seconds(out, inner, tokens)
        for out, inner in shapes
    )
    if model.precision == "f8":  # casts, with a transposed copy, of what each product reads
        cast = sum(4.0 * tokens * inner + 4.0 * out * inner for out, inner in shapes)
        forward += machine.memory_seconds(cast, 8)
        backward += machine.memory_seconds(sum(4.0 * tokens * out for out, _ in shapes), 4)
    backward += sum(_accumulation(out * inner, execution, machine) for out, inner in shapes)
    flops = sum(2.0 * tokens * out * inner for out, inner in shapes)
    return PassCost(forward, 4, 0.0, flops), PassCost(backward, 8, 0.0, 2 * flops)


def _attention(
    model: Transformer, execution: Execution, machine: Machine
) -> tuple[PassCost, PassCost]:
    """Return the passes of the core of attention, between the projections."""
    heads = model.heads // (execution.tensor * execution.context) * execution.microbatch
    size = model.hidden // model.heads
    s, w = model.seq, 2
    flops = 4.0 * heads * s * s * size
    if model.attention != "naive":
        causal_flops = flops / 2
        forward_rate, backward_rate = machine.flash(model.attention)
        moved = 4.0 * w * heads * s * size
        return (
            PassCost(
                max(causal_flops / forward_rate, moved / machine.gemms.bandwidth)
                + machine.launch_seconds,
                1,
                0.0,
                flops,
            ),
            PassCost(
                max(2.5 * causal_flops / backward_rate, 2 * moved / machine.gemms.bandwidth)
                + 3 * machine.launch_seconds,
                3,
                0.0,
                2 * flops,
            ),
        )
    gemms = machine.gemms
    scores = gemms.seconds(s, s, size, heads)
    context = gemms.seconds(s, size, s, heads)
    saved = (2 * w + 1) if model.dropout else 0
    forward = (
        scores
        + context
        + machine.memory_seconds((2.0 * w + saved) * heads * s * s, 2 if model.dropout else 1)
    )
    backward = (
        2 * scores
        + 2 * context
        + machine.memory_seconds((3.0 * w + saved) * heads * s * s, 2 if model.dropout else 1)
    )
    return PassCost(forward, 4, 0.0, flops), PassCost(backward, 6, 0.0, 2 * flops)


def _dense(model: Transformer, execution: Execution, machine: Machine) -> tuple[PassCost, PassCost]:
    """Return the passes of norms, residual sums, dropout, activations and copies."""
    tokens = execution.tokens(model)
    t, w = execution.tensor, 2
    stream = tokens * model.hidden / (t if execution.sequence_parallel else 1)
    mask = 1 if model.dropout else 0
    inner = tokens * model.ffn_width / t
    columns = tokens * model.qkv_width / t
    gate = 3 if model.gated else 2  # read one or two, write one
    forward = 2 * 2 * w * stream  # norms
    forward += 2 * (3 * w + mask) * stream  # bias, dropout, residual
    forward += gate * w * inner  # activation
    forward += 2 * w * tokens * model.hidden / t  # concatenation of heads
    if not model.learned_positions:
        forward += 2 * w * columns  # rotation of queries and keys
    backward = 2 * 3 * w * stream + 2 * 3 * w * stream  # norms, sums with the residual's gradient
    backward += 2 * (2 * w + mask + (w if model.biases else 0)) * stream
    backward += (2 * gate - 1 + (1 if model.biases else 0)) * w * inner
    backward += 3 * w * columns + 2 * w * tokens * model.hidden / t
    return (
        PassCost(machine.memory_seconds(forward, 6), 9),
        PassCost(machine.memory_seconds(backward, 16), 16),
    )


def _collectives(
    model: Transformer, execution: Execution, machine: Machine
) -> tuple[PassCost, PassCost]:
    """Return the waits of both passes for collectives over the tensor axis.

    A pass has two all_reduces, or two all_gathers and two reduce_scatters with sequence
    parallelism, whose backward pass gathers the inputs once more. In the backward pass these
    gathers, and the sums of the gradients of inputs, can overlap with the products of weight
    gradients.
    """
    if execution.tensor == 1:
        return PassCost(), PassCost()
    network = machine.network
    ring = network.ring(execution.tensor)
    tokens = execution.tokens(model)
    t, h = execution.tensor, model.hidden
    # widths of the outputs of layers that are split by column, and of the inputs of those split by
    # row
    outputs_by_column = model.qkv_width // t, (2 if model.gated else 1) * model.ffn_width // t
    inputs_by_row = (h // t, model.ffn_width // t)
    stream = 2.0 * tokens * h
    if execution.sequence_parallel:
        gather = network.seconds("all_gather", stream, ring)
        scatter = network.seconds("reduce_scatter", stream, ring)
    else:
        gather = 0.0
        scatter = network.seconds("all_reduce", stream, ring)
    # pairs of a collective and the product that it can overlap with
    gathers = [(gather, machine.gemms.seconds(tokens, out, h)) for out in outputs_by_column]
    forward = gathers + [
        (scatter, machine.gemms.seconds(tokens, h, inner)) for inner in inputs_by_row
    ]
    weights = [
        (gather + scatter, machine.gemms.seconds(out, h, tokens)) for out in outputs_by_column
    ]
    outputs = [(gather, machine.gemms.seconds(tokens, inner, h)) for inner in inputs_by_row]
    launches = _COLLECTIVE_LAUNCHES * (4 if execution.sequence_parallel else 2)
    overlap_weights = execution.overlap_tensor != "none"
    overlap_all = execution.overlap_tensor == "all"
    return (
        _overlapped(forward, overlap_all, launches, machine, ring.hosts > 1),
        _overlapped(weights, overlap_weights, launches, machine, ring.hosts > 1)
        + _overlapped(outputs, overlap_all, 0, machine, ring.hosts > 1),
    )


def _overlapped(
    pairs: list[tuple[float, float]],
    overlap: bool,
    launches: int,
    machine: Machine,
    between_hosts: bool,
) -> PassCost:
    """Return the wait for collectives, each of which may overlap with a product."""
    total = sum(moved for moved, _ in pairs)
    if not overlap:
        return PassCost(kernels=launches, communication=total)
    exposed = sum(
        machine.exposed_seconds(moved, compute, between_hosts) for moved, compute in pairs
    )
    return PassCost(kernels=launches, communication=exposed, hidden=total - exposed)


def _sequence_exchange(model: Transformer, execution: Execution, machine: Machine) -> PassCost:
    """Return the exchange of heads for tokens around attention, which needs complete sequences.

    The context axis divides sequences.
    """
    if execution.context == 1:
        return PassCost()
    ring = machine.network.ring(execution.context, execution.tensor)
    tokens = execution.tokens(model)
    widths = (
        model.hidden,
        (model.qkv_width - model.hidden) // 2,
        (model.qkv_width - model.hidden) // 2,
        model.hidden,
    )
    seconds = sum(
        machine.network.seconds("all_to_all", 2.0 * tokens * width / execution.tensor, ring)
        for width in widths
    )
    moved = 2.0 * tokens * (model.qkv_width + model.hidden) / execution.tensor
    # packed before and unpacked after, each read and written
    return PassCost(machine.memory_seconds(4 * moved, 8), 4 * (1 + _COLLECTIVE_LAUNCHES), seconds)
