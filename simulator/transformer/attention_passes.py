"""Costs of the passes over attention: projections, core, and the exchange of long sequences.

Elementwise traffic is that of Megatron-LM's fused kernels. In formulas `w` is the bytes of an
element; a mask of dropout is a byte.
"""

from simulator.transformer.composed_kernels import (
    composed_norm,
    composed_passes,
    composed_softmax,
    rotated_elements,
    score_elements,
)
from simulator.transformer.layer_kinds import Mixer
from simulator.transformer.machine import Machine
from simulator.transformer.pass_cost import (
    COLLECTIVE_LAUNCHES,
    NO_COST,
    NO_PASSES,
    BothPasses,
    PartPasses,
    PassCost,
    Shape,
    linear_passes,
    norm_pass,
    residual_passes,
    sum_of_outputs,
    tensor_collectives,
)
from simulator.transformer.ring_attention import ring_passes
from simulator.transformer.scenario import PROJECTIONS, Execution
from simulator.transformer.transformer_sizes import Transformer

_WINDOW_TILES = 384
"""Keys beyond a window that fused attention computes and masks: a tile of 256 queries needs the
tiles of 128 keys that any of its queries sees. cuDNN takes as long for a window of 128 tokens on
GB300, and for one of 1024 on GB200 (NVIDIA/cudnn-frontend, benchmark/sdpa_benchmark_training)."""


def attention_passes(
    model: Transformer, execution: Execution, machine: Machine, mixer: Mixer
) -> PartPasses:
    """Return the passes of one microbatch over the attention of a layer."""
    columns = model.qkv_width // execution.tensor
    rows = model.attention_width // execution.tensor
    if mixer == "cross":
        linear = _cross_projections(model, execution, machine)
    else:
        linear = _projections(model, execution, machine)
    core = _core(model, execution, machine, mixer)
    elementwise = _elementwise(model, execution, machine)
    collectives = tensor_collectives(columns, rows, model, execution, machine)
    exchange = _context_passes(model, execution, machine, core)
    forward, backward = core + elementwise + linear + collectives + exchange
    scores = core.forward if model.attention == "naive" else NO_COST
    unsaved = NO_COST
    if execution.recompute == "unsaved":
        products = _unsaved_products(model, execution, machine, mixer, linear.forward)
        unsaved = elementwise.forward + products
        # what naive attention returns doesn't give its backward pass the scores
        if execution.recomputes("context") or model.attention == "naive":
            unsaved += core.forward + exchange.forward
    elif execution.recompute == "modules":
        unsaved = _recomputed_modules(model, execution, machine, (core + exchange).forward)
    return PartPasses(forward, backward, scores, unsaved)


def _unsaved_products(
    model: Transformer, execution: Execution, machine: Machine, mixer: Mixer, linear: PassCost
) -> PassCost:
    """Return the projections whose results are not saved, and the sum of their outputs.

    Args:
        model: the model.
        execution: the execution.
        machine: the machine.
        mixer: the mixer.
        linear: the forward pass of all projections.
    """
    t, rows = execution.tensor, model.attention_width // execution.tensor
    summed = sum_of_outputs(rows, model, execution, machine)
    output = summed if execution.recomputes("output") else NO_COST
    if mixer == "cross" or model.latent_attention is not None:
        every = execution.recomputes(*PROJECTIONS)
        return linear + output if every else NO_COST
    columns = {
        "queries": model.heads * model.query_size // t,
        "keys": model.key_heads * model.query_size // t,
        "values": model.key_heads * model.value_size // t,
    }
    unsaved = [width for name, width in columns.items() if name not in execution.saved]
    if len(unsaved) == len(columns):
        unsaved = [model.qkv_width // t]
    shapes = [(width, model.hidden) for width in unsaved]
    if execution.recomputes("output"):
        shapes.append((model.hidden, rows))
    return linear_passes(shapes, model, execution, machine).forward + output if shapes else NO_COST


def _recomputed_modules(
    model: Transformer, execution: Execution, machine: Machine, core: PassCost
) -> PassCost:
    """Return the modules of attention that are recomputed.

    Args:
        model: the model.
        execution: the execution.
        machine: the machine.
        core: the forward pass of the core, with the exchange of long sequences.
    """
    modules, recomputed = execution.recomputed, NO_COST
    if "core_attn" in modules:
        recomputed += core
    if model.latent_attention is None:
        return recomputed
    if "layernorm" in modules:
        recomputed += norm_pass(execution.stream(model), machine)
    if "mla_up_proj" in modules:
        _, to_heads, _ = _latent_shapes(model, execution)
        columns = 2.0 * execution.tokens(model) * model.qkv_width / execution.tensor
        rotation = PassCost(machine.memory_seconds(2 * columns, 1), 1)
        recomputed += linear_passes(to_heads, model, execution, machine).forward + rotation
    return recomputed


def _cross_projections(model: Transformer, execution: Execution, machine: Machine) -> BothPasses:
    """Return the passes of projections of queries and outputs, and of the encoder's keys.

    The backward pass sums the gradients of the encoder's outputs over the tensor axis.
    """
    t, h, encoder = execution.tensor, model.hidden, model.encoder_model
    shapes = ((model.heads * model.query_size // t, h), (h, model.attention_width // t))
    queries = linear_passes(shapes, model, execution, machine)
    keys = linear_passes(((model.key_width // t, h),), encoder, execution, machine)
    stream = 2.0 * execution.tokens(encoder) * h
    # the gradient is added to that of the layers after this one
    added = PassCost(
        machine.memory_seconds(3 * stream, 1),
        1,
        machine.network.seconds("all_reduce", stream, machine.network.ring(t)),
    )
    return queries + keys + BothPasses(backward=added)


def _projections(model: Transformer, execution: Execution, machine: Machine) -> BothPasses:
    """Return the passes of the projections before and after attention."""
    t, h, latent = execution.tensor, model.hidden, model.latent_attention
    output = (h, model.attention_width // t)
    if latent is None:
        shapes = ((model.qkv_width // t, h), output)
        adapters = model.adapters
        adapted = 0 if adapters is None else 1 if adapters.of == "qkv" else len(shapes)
        return linear_passes(shapes, model, execution, machine, adapted=adapted)
    # projections to latents are whole on each device
    down, up, outputs = _latent_shapes(model, execution)
    latents = linear_passes(down, model, execution, machine, divided=True)
    heads = linear_passes((*up, *outputs), model, execution, machine)
    # norms of the latents
    stream = 2.0 * execution.tokens(model) * sum(out for out, _ in down)
    norms = BothPasses(
        PassCost(machine.memory_seconds(2 * stream, 2), 2),
        PassCost(machine.memory_seconds(3 * stream, 2), 2),
    )
    return latents + heads + norms


def _latent_shapes(
    model: Transformer, execution: Execution
) -> tuple[list[Shape], list[Shape], list[Shape]]:
    """Return the projections of latent attention: to latents, to heads, and of the values."""
    t, h, latent = execution.tensor, model.hidden, model.latent_attention
    assert latent is not None
    queries = model.heads * model.query_size // t
    keys_and_values = model.heads * (model.head_width + model.value_size) // t
    to_latents = [(latent.key_rank + latent.rotary_size, h)]
    to_heads = [] if latent.shared else [(keys_and_values, latent.key_rank)]
    if latent.query_rank is None:
        to_heads.append((queries, h))
    else:
        to_latents.append((latent.query_rank, h))
        to_heads.append((queries, latent.query_rank))
    if latent.output_rank is None:
        return to_latents, to_heads, [(h, model.attention_width // t)]
    groups, rank = latent.output_groups // t, latent.output_rank
    outputs = [(rank, model.attention_width // latent.output_groups)] * groups
    return to_latents, to_heads, [*outputs, (h, groups * rank)]


def _elementwise(model: Transformer, execution: Execution, machine: Machine) -> BothPasses:
    """Return the passes of the norm, the residual sum, dropout, rotations and copies."""
    tokens, t, w = execution.tokens(model), execution.tensor, 2
    heads = 2.0 * w * tokens * model.attention_width / t  # their concatenation
    columns = w * tokens * model.qkv_width / t
    rotation = 0.0 if model.learned_positions else 2 * columns
    passes = residual_passes(model, execution, machine, heads + rotation, heads + 3 * columns)
    if model.head_norms:
        normalized = tokens * (model.heads + model.key_heads) * model.query_size / t
        passes += BothPasses(
            PassCost(machine.memory_seconds(2.0 * w * normalized, 2), 2),
            PassCost(machine.memory_seconds(3.0 * w * normalized, 2), 2),
        )
    norm = composed_norm(execution.stream(model), execution, machine)
    rotated = rotated_elements(model, execution)
    rotary = composed_passes("rotary", rotated, execution, machine)
    complex_rotary = composed_passes("complex_rotary", rotated, execution, machine)
    dropped = execution.stream(model) if model.dropout else 0.0
    dropout = composed_passes("dropout_by_xla", dropped, execution, machine)
    copies = BothPasses(forward=PassCost(kernels=1))
    return passes + copies + norm + rotary + complex_rotary + dropout


def _core(model: Transformer, execution: Execution, machine: Machine, mixer: Mixer) -> BothPasses:
    """Return the passes of the core of attention, between the projections."""
    # heads that see whole sequences, whichever way the context axis divides the work
    heads = model.heads * execution.microbatch / (execution.tensor * execution.context)
    if model.attention == "naive":
        return _naive_core(model, execution, machine, mixer, heads)
    return _fused_core(model, execution, machine, mixer, heads)


def _fused_core(
    model: Transformer, execution: Execution, machine: Machine, mixer: Mixer, heads: float
) -> BothPasses:
    """Return the passes of a fused core, which keeps scores out of memory."""
    assert model.attention != "naive"
    size, value = model.query_size, model.value_size
    s, w = model.seq, 2
    visible = model.visible_keys(mixer)
    flops = 2.0 * heads * s * visible * (size + value)
    # half of them are masked
    computed_keys = visible / 2 if model.causal and mixer != "cross" else visible
    computed_backward = computed_keys
    if mixer == "window" and visible < s:
        computed_keys = min(computed_keys + _WINDOW_TILES, s / 2)
        # the backward pass in 8 bits computes all keys (cuDNN 9.19 to 9.23, same benchmark)
        computed_backward = s / 2 if model.attention == "cudnn_f8" else computed_keys
    rates = machine.flash(model.attention)
    computed_size = max(size, rates.least_head) + max(value, rates.least_head)
    flops_per_key = 2.0 * heads * s * computed_size * imbalance(model, execution, mixer)
    traffic = 2.0 * w * heads * s * (size + value) / machine.gemms.bandwidth
    forward = max(flops_per_key * computed_keys / rates.forward, traffic)
    backward = max(2.5 * flops_per_key * computed_backward / rates.backward, 2 * traffic)
    return BothPasses(
        PassCost(forward + machine.launch_seconds, 1, 0.0, flops),
        PassCost(backward + 3 * machine.launch_seconds, 3, 0.0, 2 * flops),
    )


def _naive_core(
    model: Transformer, execution: Execution, machine: Machine, mixer: Mixer, heads: float
) -> BothPasses:
    """Return the passes of a core that writes scores to memory."""
    size, value = model.query_size, model.value_size
    s, w = model.seq, 2
    keys = model.keys_of(mixer)
    flops = 2.0 * heads * s * keys * (size + value)
    scores = machine.gemms.seconds(s, keys, size, max(1, round(heads)))
    context = machine.gemms.seconds(s, value, keys, max(1, round(heads)))
    saved, kernels = (2 * w + 1, 2) if model.drops_scores else (0, 1)

    def moved(arrays: float) -> float:
        """Return the seconds of the traffic of scores and of what dropout saves."""
        return machine.memory_seconds((arrays * w + saved) * heads * s * keys, kernels)

    forward = scores + context + moved(2.0)
    backward = 2 * scores + 2 * context + moved(3.0)
    elements = score_elements(model, execution, keys)
    softmax = composed_softmax(elements, (s, keys), execution, machine)
    passes = BothPasses(PassCost(forward, 4, 0.0, flops), PassCost(backward, 6, 0.0, 2 * flops))
    return passes + softmax


def imbalance(model: Transformer, execution: Execution, mixer: Mixer) -> float:
    """Return the keys that queries of the last device see, relative to the mean of all queries."""
    balanced = execution.balanced_context or execution.context_exchange == "all_to_all"
    if balanced or not model.causal:
        return 1.0
    # a query sees the keys before it, at most a window: x or w of 1 at x of 1
    first = 1 - 1 / execution.context
    window = 1.0
    if mixer == "window" and model.window is not None:
        window = min(1.0, model.window / model.seq)
    start = min(first, window)
    seen = execution.context * ((window**2 - start**2) / 2 + window * (1 - max(first, window)))
    return 2 * seen * model.seq / model.visible_keys(mixer)


def _context_passes(
    model: Transformer, execution: Execution, machine: Machine, core: BothPasses
) -> BothPasses:
    """Return what both passes of attention add where the context axis divides sequences."""
    if execution.context == 1:
        return NO_PASSES
    match execution.context_exchange:
        case "ring":
            return ring_passes(model, execution, machine, core)
        case "all_to_all":
            exchange = _exchange_of_heads(model, execution, machine)
            return BothPasses(exchange, exchange)
        case "all_gather":
            return _gathers_of_keys(model, execution, machine)


def _exchange_of_heads(model: Transformer, execution: Execution, machine: Machine) -> PassCost:
    """Return the exchange of heads for tokens around attention, which needs complete sequences."""
    ring = machine.network.ring(execution.context, execution.tensor)
    tokens = execution.tokens(model)
    queries, outputs = model.heads * model.query_size, model.attention_width
    keys, values = model.key_heads * model.query_size, model.key_heads * model.value_size
    seconds = sum(
        machine.network.seconds("all_to_all", 2.0 * tokens * width / execution.tensor, ring)
        for width in (queries, keys, values, outputs)
    )
    moved = 2.0 * tokens * (model.qkv_width + outputs) / execution.tensor
    # packed before and unpacked after, each read and written
    return PassCost(machine.memory_seconds(4 * moved, 8), 4 * (1 + COLLECTIVE_LAUNCHES), seconds)


def _gathers_of_keys(model: Transformer, execution: Execution, machine: Machine) -> BothPasses:
    """Return gathers of keys and values before both passes, and the sum of their gradients."""
    network = machine.network
    ring = network.ring(execution.context, execution.tensor)
    width = model.key_heads * (model.query_size + model.value_size)
    gathered_bytes = 2.0 * execution.tokens(model) * execution.context * width / execution.tensor
    gather = network.seconds("all_gather", gathered_bytes, ring)
    scatter = network.seconds("reduce_scatter", gathered_bytes, ring)
    return BothPasses(
        PassCost(kernels=COLLECTIVE_LAUNCHES, communication=gather),
        PassCost(kernels=2 * COLLECTIVE_LAUNCHES, communication=gather + scatter),
    )
