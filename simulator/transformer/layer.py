"""Costs of the forward and backward passes over a layer, the embedding and the loss."""

from math import ceil
from typing import NamedTuple, assert_never

from simulator.transformer.attention_passes import attention_passes
from simulator.transformer.experts import expert_passes
from simulator.transformer.layer_kinds import DECODER_LAYER, LayerKind
from simulator.transformer.machine import Machine
from simulator.transformer.mamba import mamba_passes
from simulator.transformer.mlp_passes import mlp_passes
from simulator.transformer.pass_cost import (
    NO_COST,
    BothPasses,
    PartPasses,
    PassCost,
    accumulation_seconds,
    linear_passes,
)
from simulator.transformer.scenario import Execution
from simulator.transformer.transformer_sizes import Transformer


class LayerPasses(NamedTuple):
    """The passes over a layer: forward, backward, and the recomputed part of the forward pass."""

    forward: PassCost
    backward: PassCost
    recompute: PassCost


def layer_passes(
    model: Transformer, execution: Execution, machine: Machine, kind: LayerKind = DECODER_LAYER
) -> LayerPasses:
    """Return the passes of one microbatch over one layer of a kind."""
    model = model.of(kind)
    mixer = _mixer(model, execution, machine, kind)
    return _of_parts(mixer, _mlp(model, execution, machine, kind), execution)


def passes_by_kind(
    model: Transformer, execution: Execution, machine: Machine
) -> dict[LayerKind, LayerPasses]:
    """Return the passes of one microbatch over one layer of each kind.

    Kinds with the same mixer share its passes, which are computed once.
    """
    passes = _passes_by_kind(model, execution, machine)
    if not model.layers_in_16_bits:
        return passes
    part = min(1.0, model.layers_in_16_bits / model.layers)
    in_16_bits = model.model_copy(update={"precision": "bf16", "layers_in_16_bits": 0})
    others = _passes_by_kind(in_16_bits, execution, machine)
    return {
        kind: LayerPasses(
            *(one.mixed(other, part) for one, other in zip(passes[kind], others[kind], strict=True))
        )
        for kind in passes
    }


def _passes_by_kind(
    model: Transformer, execution: Execution, machine: Machine
) -> dict[LayerKind, LayerPasses]:
    """Return the passes of layers that all have the precision of the model."""
    mixers: dict[tuple[str | None, str], PartPasses] = {}
    passes: dict[LayerKind, LayerPasses] = {}
    for kind in model.kind_counts:
        stack, key = model.of(kind), (kind.mixer, kind.stack)
        if key not in mixers:
            mixers[key] = _mixer(stack, execution, machine, kind)
        mlp = _mlp(stack, execution, machine, kind)
        passes[kind] = _of_parts(mixers[key], mlp, execution)
    return passes


def _of_parts(mixer: PartPasses, mlp: PartPasses, execution: Execution) -> LayerPasses:
    """Return the passes over a layer with a mixer and an MLP."""
    forward = mixer.forward + mlp.forward
    backward = mixer.backward + mlp.backward
    match execution.recompute:
        case "none":
            recompute = NO_COST
        case "unsaved" | "modules":
            recompute = mixer.unsaved + mlp.unsaved
        case "selective":
            recompute = mixer.scores + mlp.scores
        case "mlp":
            recompute = mixer.scores + mlp.forward
        case "full":
            recompute = forward
    return LayerPasses(forward, backward, recompute)


def _mixer(
    model: Transformer, execution: Execution, machine: Machine, kind: LayerKind
) -> PartPasses:
    passes = _mixer_passes(model, execution, machine, kind)
    if kind.mixer is None or "mixer" not in machine.backend.captured:
        return passes
    return passes._replace(
        forward=passes.forward._replace(kernels=1), backward=passes.backward._replace(kernels=1)
    )


def _mixer_passes(
    model: Transformer, execution: Execution, machine: Machine, kind: LayerKind
) -> PartPasses:
    match kind.mixer:
        case "attention" | "window" | "cross":
            return attention_passes(model, execution, machine, kind.mixer)
        case "mamba":
            return mamba_passes(model, execution, machine)
        case None:
            return PartPasses()
        case _:
            assert_never(kind.mixer)


def _mlp(model: Transformer, execution: Execution, machine: Machine, kind: LayerKind) -> PartPasses:
    match kind.mlp:
        case "dense":
            return mlp_passes(model, execution, machine)
        case "experts":
            return expert_passes(model, execution, machine)
        case None:
            return PartPasses()
        case _:
            assert_never(kind.mlp)


def head_passes(model: Transformer, execution: Execution, machine: Machine) -> BothPasses:
    """Return the forward and backward pass of the output embedding and the loss."""
    tokens = execution.tokens(model)
    columns = _tokens_per_device(model, execution)
    gemms = machine.gemms
    logits = tokens * (model.vocab if execution.gathered_logits else columns)
    flops = 2.0 * tokens * columns * model.hidden
    forward_traffic, backward_traffic = _loss_traffic(execution)
    forward = gemms.seconds(tokens, columns, model.hidden) + machine.memory_seconds(
        forward_traffic[0] * logits, forward_traffic[1]
    )
    backward = gemms.seconds(tokens, model.hidden, columns)
    backward += machine.memory_seconds(backward_traffic[0] * logits, backward_traffic[1])
    if model.adapters is None:
        backward += gemms.seconds(model.hidden, columns, tokens)
        backward += accumulation_seconds(columns * model.hidden, execution, machine)
    stream = 2.0 * tokens * model.hidden
    ring, network = machine.network.ring(execution.tensor), machine.network
    if execution.sequence_parallel:
        gather = network.seconds("all_gather", stream, ring)
        summed = network.seconds("reduce_scatter", stream, ring)
    else:
        gather, summed = 0.0, network.seconds("all_reduce", stream, ring)
    again = 0.0 if execution.saves_gathered else gather
    if execution.gathered_logits:
        gather += network.seconds("all_gather", 2.0 * logits, ring)
    forward += machine.memory_seconds(4 * tokens * model.hidden, 1)
    backward += machine.memory_seconds(6 * tokens * model.hidden, 2)
    passes = BothPasses(
        PassCost(forward, 9, gather, flops),
        PassCost(backward, 8, again + summed, (model.products_of_weights - 1) * flops),
    )
    if execution.repeats_head:
        return passes + BothPasses(backward=passes.forward._replace(flops=0.0))
    return passes


def _tokens_per_device(model: Transformer, execution: Execution) -> int:
    """Return the size of the vocabulary on one device, which is padded to divide evenly."""
    return ceil(model.vocab / execution.tensor)


def _loss_traffic(execution: Execution) -> tuple[tuple[float, int], tuple[float, int]]:
    """Return the bytes per logit and the kernels of the loss, in the forward and backward pass.

    Compiled kernels are those of megatron/core/fusions/fused_cross_entropy.py
    (github.com/NVIDIA/Megatron-LM): torch.compile writes the exponential, which the same graph
    sums, and the gradient at the targets to arrays of their own and copies these back.
    """
    if execution.fused_loss:  # two reads, one write
        return (4.0, 1), (2.0, 1)
    if execution.compiled_loss:
        # f32 logits, maximum 6, exponential 8, copy 8, quotient 8; gradient 8, scaled and cast 10
        return (30.0, 4), (18.0, 2)
    if execution.log_softmax_loss and execution.loss_in_16_bits:
        # maximum 2, sum 2, log_softmax 4; gradients 2, sum 2, of logits 6
        return (8.0, 1), (10.0, 3)
    if execution.log_softmax_loss:
        # f32 logits 6, maximum 4, sum 4, log_softmax 8; gradients 4, sum 4, of logits 12, cast 6
        return (22.0, 3), (26.0, 4)
    if execution.loss_in_16_bits:
        # maximum, exponential of the difference, sum, quotient; the gradient in place of it
        return (12.0, 4), (4.0, 1)
    # f32 logits, maximum, difference, exponential, sum, quotient; the gradient scaled, cast back
    return (38.0, 7), (22.0, 4)


def prediction_passes(model: Transformer, execution: Execution, machine: Machine) -> BothPasses:
    """Return the passes of the projection before a layer that predicts a further token.

    It joins the stream with the embedding of the next token, both of which are normalized.
    """
    shape = (model.hidden // execution.tensor, 2 * model.hidden)
    stream = 2.0 * execution.stream(model)
    return linear_passes((shape,), model, execution, machine) + BothPasses(
        PassCost(machine.memory_seconds(6 * stream, 3), 3),
        PassCost(machine.memory_seconds(8 * stream, 3), 3),
    )


def embedding_passes(model: Transformer, execution: Execution, machine: Machine) -> BothPasses:
    """Return the forward and backward pass of the input embedding.

    Forward: a gather, a sum with the positions, and dropout. Backward: scatters of the gradient,
    unless the embedding is frozen. An encoder has the same embedding.
    """
    passes = _embedding_passes(model, execution, machine)
    if model.encoder is None:
        return passes
    return passes + _embedding_passes(model.encoder_model, execution, machine)


def _embedding_passes(model: Transformer, execution: Execution, machine: Machine) -> BothPasses:
    """Return the passes of the input embedding of a decoder or an encoder."""
    stream = execution.tokens(model) * model.hidden
    ring = machine.network.ring(execution.tensor)
    table = _tokens_per_device(model, execution) * model.hidden
    kind = "reduce_scatter" if execution.sequence_parallel else "all_reduce"
    summed = machine.network.seconds(kind, 2.0 * stream, ring)
    gather = 0.0
    if execution.sequence_parallel and model.adapters is None:
        gather = machine.network.seconds("all_gather", 2.0 * stream, ring)
    forward = PassCost(machine.memory_seconds(15.0 * stream, 4), 4, summed)
    if execution.embedding_products:
        products = _embedding_products(forward, model, execution, machine)
        return products + BothPasses(backward=PassCost(communication=gather))
    if model.adapters is not None:
        return BothPasses(forward)
    zeros = machine.memory_seconds(2.0 * table, 1)  # the target of the scatter
    backward = (
        machine.memory_seconds(16.0 * stream, 4)
        + zeros
        + accumulation_seconds(table, execution, machine)
    )
    return BothPasses(forward, PassCost(backward, 6, gather))


def _embedding_products(
    gathered: PassCost, model: Transformer, execution: Execution, machine: Machine
) -> BothPasses:
    """Return the passes of an input embedding that is a product with one-hot rows.

    They are written and read in 16 bits, once per pass. Positions are looked up in the same way.

    Args:
        gathered: the forward pass with a gather.
        model: the model.
        execution: the execution.
        machine: the machine.
    """
    tokens, gemms = execution.tokens(model), machine.gemms
    tables = [_tokens_per_device(model, execution)]
    if model.learned_positions:
        tables.append(model.seq)
    one_hot = machine.memory_seconds(2.0 * tokens * sum(tables), len(tables))
    forward = one_hot + sum(gemms.seconds(tokens, model.hidden, rows) for rows in tables)
    if model.adapters is not None:
        return BothPasses(gathered + PassCost(forward, 2 * len(tables)))
    backward = one_hot + sum(gemms.seconds(rows, model.hidden, tokens) for rows in tables)
    flops = 2.0 * tokens * model.hidden * sum(tables)
    return BothPasses(
        gathered + PassCost(forward, 2 * len(tables), flops=flops),
        PassCost(backward, 2 * len(tables), flops=flops),
    )
