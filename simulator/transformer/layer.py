"""Kernels of one layer, of the embedding and of the loss: products, bytes through memory, launches, and collectives over the tensor axis.

Elementwise traffic is counted as Megatron-LM's fused kernels do it, in elements of the residual stream (tokens * hidden), of the scores,
or of the MLP's inner width; `w` is the width of an element, masks of dropout are a byte.
"""

from dataclasses import dataclass

from simulator.transformer.machine import Machine
from simulator.transformer.scenario import Execution, Transformer

_COLLECTIVE_LAUNCHES = 2  # of the host: the collective and the event that the next kernel waits for


@dataclass(frozen=True, slots=True)
class Phase:
    """One pass over a layer on one device.

    Attributes:
        compute: seconds of kernels.
        kernels: how many there are.
        communication: seconds of waiting for collectives over the tensor axis.
        hidden: seconds of such collectives that nobody waits for.
        flops: of the matrix products.
    """

    compute: float = 0.0
    kernels: int = 0
    communication: float = 0.0
    flops: float = 0.0
    hidden: float = 0.0

    def __add__(self, other: "Phase") -> "Phase":
        return Phase(
            self.compute + other.compute,
            self.kernels + other.kernels,
            self.communication + other.communication,
            self.flops + other.flops,
            self.hidden + other.hidden,
        )


@dataclass(frozen=True, slots=True)
class LayerPhases:
    """Forward, backward, and what of the forward pass is computed again before the backward pass."""

    forward: Phase
    backward: Phase
    recompute: Phase


def layer_phases(model: Transformer, plan: Execution, machine: Machine) -> LayerPhases:
    """One layer and one microbatch."""
    attention = _attention(model, plan, machine)
    dense = _dense(model, plan, machine)
    linear = _linear(model, plan, machine)
    collectives = _collectives(model, plan, machine)
    exchange = _sequence_exchange(model, plan, machine)
    forward = attention[0] + dense[0] + linear[0] + collectives[0] + exchange
    backward = attention[1] + dense[1] + linear[1] + collectives[1] + exchange
    match plan.recompute:
        case "none":
            again = Phase()
        case "selective":
            again = attention[0] if model.attention == "naive" else Phase()
        case "full":
            again = forward
    return LayerPhases(forward, backward, again)


def head_phases(model: Transformer, plan: Execution, machine: Machine) -> tuple[Phase, Phase]:
    """Forward and backward of the output embedding and the loss."""
    tokens, columns = plan.tokens(model), -(-model.vocab // plan.tensor)
    gemms = machine.gemms
    logits, flops = tokens * columns, 2.0 * tokens * columns * model.hidden
    # f32 logits, their maximum, difference, exponential, sum and quotient; the gradient scaled and cast back. Fused: read twice, write once
    there, back = ((4.0, 1), (2.0, 1)) if plan.fused_loss else ((38.0, 7), (22.0, 4))
    forward = gemms.seconds(tokens, columns, model.hidden) + machine.memory_seconds(
        there[0] * logits, there[1]
    )
    backward = gemms.seconds(tokens, model.hidden, columns) + gemms.seconds(
        model.hidden, columns, tokens
    )
    backward += machine.memory_seconds(back[0] * logits, back[1]) + _accumulation(
        columns * model.hidden, plan, machine
    )
    stream = 2.0 * tokens * model.hidden
    ring = machine.network.ring(plan.tensor)
    kind = "reduce_scatter" if plan.sequence_parallel else "all_reduce"
    return (
        Phase(forward + machine.memory_seconds(4 * tokens * model.hidden, 1), 9, 0.0, flops),
        Phase(
            backward + machine.memory_seconds(6 * tokens * model.hidden, 2),
            8,
            machine.network.seconds(kind, stream, ring),
            2 * flops,
        ),
    )


def embedding_phases(model: Transformer, plan: Execution, machine: Machine) -> tuple[Phase, Phase]:
    """Forward and backward of the input embedding: a gather, a sum with the positions, dropout; scatters of the gradient."""
    stream = plan.tokens(model) * model.hidden
    ring = machine.network.ring(plan.tensor)
    kind = "reduce_scatter" if plan.sequence_parallel else "all_reduce"
    table = model.vocab // plan.tensor * model.hidden
    zeros = machine.memory_seconds(2.0 * table, 1)  # to scatter into
    backward = (
        machine.memory_seconds(16.0 * stream, 4) + zeros + _accumulation(table, plan, machine)
    )
    return (
        Phase(
            machine.memory_seconds(15.0 * stream, 4),
            4,
            machine.network.seconds(kind, 2.0 * stream, ring),
        ),
        Phase(backward, 6),
    )


def _accumulation(elements: float, plan: Execution, machine: Machine) -> float:
    """Seconds of summing a weight gradient over microbatches, beside writing it: its product reads and writes the sum instead."""
    if not plan.accumulates:
        return 0.0
    return (
        machine.memory_seconds((2.0 * plan.gradient_bytes - 2.0) * elements, 1)
        - machine.launch_seconds
    )


def _linear(model: Transformer, plan: Execution, machine: Machine) -> tuple[Phase, Phase]:
    """The four linear layers; their gradients are two products each."""
    tokens, t, h = plan.tokens(model), plan.tensor, model.hidden
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
    backward += sum(_accumulation(out * inner, plan, machine) for out, inner in shapes)
    flops = sum(2.0 * tokens * out * inner for out, inner in shapes)
    return Phase(forward, 4, 0.0, flops), Phase(backward, 8, 0.0, 2 * flops)


def _attention(model: Transformer, plan: Execution, machine: Machine) -> tuple[Phase, Phase]:
    """The core of attention, between the projections."""
    heads, size = (
        model.heads // (plan.tensor * plan.context) * plan.microbatch,
        model.hidden // model.heads,
    )
    s, w = model.seq, 2
    flops = 4.0 * heads * s * s * size
    if model.attention != "naive":
        done, (fast, slow) = flops / 2, machine.flash(model.attention)
        moved = 4.0 * w * heads * s * size
        return (
            Phase(
                max(done / fast, moved / machine.gemms.bandwidth) + machine.launch_seconds,
                1,
                0.0,
                flops,
            ),
            Phase(
                max(2.5 * done / slow, 2 * moved / machine.gemms.bandwidth)
                + 3 * machine.launch_seconds,
                3,
                0.0,
                2 * flops,
            ),
        )
    gemms = machine.gemms
    scores, context = gemms.seconds(s, s, size, heads), gemms.seconds(s, size, s, heads)
    kept = (2 * w + 1) if model.dropout else 0
    forward = (
        scores
        + context
        + machine.memory_seconds((2.0 * w + kept) * heads * s * s, 2 if model.dropout else 1)
    )
    backward = (
        2 * scores
        + 2 * context
        + machine.memory_seconds((3.0 * w + kept) * heads * s * s, 2 if model.dropout else 1)
    )
    return Phase(forward, 4, 0.0, flops), Phase(backward, 6, 0.0, 2 * flops)


def _dense(model: Transformer, plan: Execution, machine: Machine) -> tuple[Phase, Phase]:
    """Norms, residual sums, dropout, activations and copies."""
    tokens, t, w = plan.tokens(model), plan.tensor, 2
    stream = tokens * model.hidden / (t if plan.sequence_parallel else 1)
    mask = 1 if model.dropout else 0
    inner, columns = tokens * model.ffn_width / t, tokens * model.qkv_width / t
    gate = 3 if model.gated else 2  # read one or two, write one
    forward = 2 * 2 * w * stream  # norms
    forward += 2 * (3 * w + mask) * stream  # bias, dropout, residual
    forward += gate * w * inner  # activation
    forward += 2 * w * tokens * model.hidden / t  # heads put together again
    if not model.learned_positions:
        forward += 2 * w * columns  # queries and keys rotated
    backward = 2 * 3 * w * stream + 2 * 3 * w * stream  # norms, sums with the residual's gradient
    backward += 2 * (2 * w + mask + (w if model.biases else 0)) * stream
    backward += (2 * gate - 1 + (1 if model.biases else 0)) * w * inner
    backward += 3 * w * columns + 2 * w * tokens * model.hidden / t
    return (
        Phase(machine.memory_seconds(forward, 6), 9),
        Phase(machine.memory_seconds(backward, 16), 16),
    )


def _collectives(model: Transformer, plan: Execution, machine: Machine) -> tuple[Phase, Phase]:
    """Two all_reduces a pass, or as many all_gathers and reduce_scatters with sequence parallelism, whose backward pass gathers the inputs
    once more. In the backward pass these, and what sums the gradients of inputs, can run beside the products of weight gradients.
    """
    if plan.tensor == 1:
        return Phase(), Phase()
    network, ring = machine.network, machine.network.ring(plan.tensor)
    tokens, t, h = plan.tokens(model), plan.tensor, model.hidden
    # outputs of the layers that are split by column
    wide = model.qkv_width // t, (2 if model.gated else 1) * model.ffn_width // t
    narrow = (h // t, model.ffn_width // t)  # inputs of the layers that are split by row
    stream = 2.0 * tokens * h
    if plan.sequence_parallel:
        gather, scatter = (
            network.seconds(kind, stream, ring) for kind in ("all_gather", "reduce_scatter")
        )
    else:
        gather, scatter = 0.0, network.seconds("all_reduce", stream, ring)
    # pairs of a collective and the product it can run beside
    gathers = [(gather, machine.gemms.seconds(tokens, out, h)) for out in wide]
    forward = gathers + [(scatter, machine.gemms.seconds(tokens, h, inner)) for inner in narrow]
    weights = [(gather + scatter, machine.gemms.seconds(out, h, tokens)) for out in wide]
    outputs = [(gather, machine.gemms.seconds(tokens, inner, h)) for inner in narrow]
    launches = _COLLECTIVE_LAUNCHES * (4 if plan.sequence_parallel else 2)
    backward_too, forward_too = plan.overlap_tensor != "none", plan.overlap_tensor == "all"
    return (
        _beside(forward, forward_too, launches, machine, ring.hosts > 1),
        _beside(weights, backward_too, launches, machine, ring.hosts > 1)
        + _beside(outputs, forward_too, 0, machine, ring.hosts > 1),
    )


def _beside(
    pairs: list[tuple[float, float]], overlap: bool, launches: int, machine: Machine, far: bool
) -> Phase:
    """Waiting for collectives, each of which runs beside a product if they overlap; both are slower then."""
    total = sum(moved for moved, _ in pairs)
    if not overlap:
        return Phase(kernels=launches, communication=total)
    waited = sum(machine.beside(moved, compute, far) for moved, compute in pairs)
    return Phase(kernels=launches, communication=waited, hidden=total - waited)


def _sequence_exchange(model: Transformer, plan: Execution, machine: Machine) -> Phase:
    """With the sequence divided over the context axis, attention needs whole sequences: heads are exchanged for tokens and back."""
    if plan.context == 1:
        return Phase()
    ring, tokens = machine.network.ring(plan.context, plan.tensor), plan.tokens(model)
    widths = (
        model.hidden,
        (model.qkv_width - model.hidden) // 2,
        (model.qkv_width - model.hidden) // 2,
        model.hidden,
    )
    seconds = sum(
        machine.network.seconds("all_to_all", 2.0 * tokens * width / plan.tensor, ring)
        for width in widths
    )
    moved = 2.0 * tokens * (model.qkv_width + model.hidden) / plan.tensor
    # packed before and unpacked after, each read and written
    return Phase(machine.memory_seconds(4 * moved, 8), 4 * (1 + _COLLECTIVE_LAUNCHES), seconds)
