"""Passes over attention: its projections, its core, and the exchange of long sequences.

Elementwise traffic is that of Megatron-LM's fused kernels. In formulas `w` is the bytes of an
element; a mask of dropout is a byte.
"""

from simulator.transformer.machine import Machine
from simulator.transformer.pass_cost import (
    COLLECTIVE_LAUNCHES,
    PartPasses,
    PassCost,
    linear_passes,
    residual_passes,
    tensor_collectives,
)
from simulator.transformer.scenario import Execution, Transformer


def attention_passes(model: Transformer, execution: Execution, machine: Machine) -> PartPasses:
    """Return the passes of one microbatch over the attention of a layer."""
    t, h = execution.tensor, model.hidden
    columns = model.qkv_width // t
    rows = model.attention_width // t
    linear = linear_passes(((columns, h), (h, rows)), model, execution, machine)
    core = _core(model, execution, machine)
    elementwise = _elementwise(model, execution, machine)
    collectives = tensor_collectives(columns, rows, model, execution, machine)
    exchange = _sequence_exchange(model, execution, machine)
    forward = core[0] + elementwise[0] + linear[0] + collectives[0] + exchange
    backward = core[1] + elementwise[1] + linear[1] + collectives[1] + exchange
    return PartPasses(forward, backward, core[0] if model.attention == "naive" else PassCost())


def _elementwise(
    model: Transformer, execution: Execution, machine: Machine
) -> tuple[PassCost, PassCost]:
    """Return the passes of the norm, the residual sum, dropout, rotations and copies."""
    tokens, t, w = execution.tokens(model), execution.tensor, 2
    heads = 2.0 * w * tokens * model.attention_width / t  # their concatenation
    columns = w * tokens * model.qkv_width / t
    rotation = 0.0 if model.learned_positions else 2 * columns
    forward, backward = residual_passes(
        model, execution, machine, heads + rotation, heads + 3 * columns
    )
    return forward + PassCost(kernels=1), backward


def _core(model: Transformer, execution: Execution, machine: Machine) -> tuple[PassCost, PassCost]:
    """Return the passes of the core of attention, between the projections."""
    heads = model.heads // (execution.tensor * execution.context) * execution.microbatch
    size = model.head_width
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


def _sequence_exchange(model: Transformer, execution: Execution, machine: Machine) -> PassCost:
    """Return the exchange of heads for tokens around attention, which needs complete sequences.

    The context axis divides sequences.
    """
    if execution.context == 1:
        return PassCost()
    ring = machine.network.ring(execution.context, execution.tensor)
    tokens = execution.tokens(model)
    queries = model.attention_width
    keys = (model.qkv_width - queries) // 2
    seconds = sum(
        machine.network.seconds("all_to_all", 2.0 * tokens * width / execution.tensor, ring)
        for width in (queries, keys, keys, queries)
    )
    moved = 2.0 * tokens * (model.qkv_width + queries) / execution.tensor
    # packed before and unpacked after, each read and written
    return PassCost(machine.memory_seconds(4 * moved, 8), 4 * (1 + COLLECTIVE_LAUNCHES), seconds)
