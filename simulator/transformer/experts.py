"""Costs of the passes over experts: router, permutation, dispatch, grouped and shared experts.

The devices of an expert group have tokens of their own. `dispatch` sends each token to the devices
of its experts and back. Expert-tensor parallelism divides an expert's inner width; its devices
gather the tokens that they share.
"""

from dataclasses import dataclass
from math import comb, gcd, lcm

from simulator.transformer.layer_kinds import Experts
from simulator.transformer.machine import Machine
from simulator.transformer.pass_cost import (
    COLLECTIVE_LAUNCHES,
    NO_COST,
    NO_PASSES,
    BothPasses,
    PartPasses,
    PassCost,
    accumulation_seconds,
    linear_passes,
    norm_pass,
    residual_passes,
    tensor_collectives,
    without_products,
)
from simulator.transformer.precision import RECIPES
from simulator.transformer.scenario import Execution, activation_inputs
from simulator.transformer.transformer_sizes import Transformer

_ROUTER_KERNELS = 6
"""Kernels of a router per pass: product, scores, the choice of experts, counts, and a sort."""

_PADDING_KERNELS = 2
"""Kernels per pass that pad the rows of experts and remove the padding."""

_EXPERT_LAUNCHES = 30
"""Time of the host per pass over experts beside their kernels, in launches: Python's modules of the
dispatcher and of grouped products, and counts of tokens per expert that the host waits for. Like
the next number, it is fitted to the 69 steps of Megatron-Bridge with experts that are launched
kernel by kernel."""

_LOOPED_LAUNCHES = 0.5
"""Time of the host for a product that a loop in C++ launches, in launches of an operation of
PyTorch (`nvte_multi_tensor_gemm` in github.com/NVIDIA/TransformerEngine)."""


@dataclass(frozen=True, slots=True)
class Routing:
    """Sizes of the work of experts on the busiest device, per microbatch.

    Attributes:
        tokens: tokens whose experts a device chooses.
        copies: rows that it sends, one for each expert of a token.
        rows: rows that its experts compute.
        experts: routed experts on a device.
        width: elements of a row.
        inner: inner width of an expert on a device.
    """

    tokens: int
    copies: int
    rows: int
    experts: int
    width: int
    inner: int

    @classmethod
    def of(cls, model: Transformer, execution: Execution) -> "Routing":
        """Return the sizes of a model with experts under an execution."""
        experts = model.experts_section
        shards = execution.tensor if execution.sequence_parallel else 1
        tokens = -(-execution.tokens(model) // shards)
        copies = tokens * experts.top_k
        divided = execution.tensor == 1 or execution.sequence_parallel
        gathered = execution.expert_shards if divided else 1
        return cls(
            tokens=tokens,
            copies=copies,
            rows=max(1, round(experts.load * copies * gathered)),
            experts=experts.count // execution.expert,
            width=experts.width(model.hidden),
            inner=experts.ffn // execution.expert_shards,
        )


def expert_passes(model: Transformer, execution: Execution, machine: Machine) -> PartPasses:
    """Return the passes of one microbatch over the experts of a layer."""
    routing = Routing.of(model, execution)
    passes = (
        _grouped(routing, model, execution, machine),
        _biases(routing, model, machine),
        _shared(model, execution, machine),
        _latent(model, execution, machine),
        _router(routing, model, execution, machine),
        _elementwise(routing, model, execution, machine),
        _padding(routing, model, execution, machine),
        _clamps(routing, model, machine),
    )
    exchange = PassCost(
        kernels=2 * (1 + COLLECTIVE_LAUNCHES) + _EXPERT_LAUNCHES,
        dispatch=dispatch_seconds(model, execution, machine),
    )
    forward, backward = sum(passes, BothPasses(exchange, exchange))
    if execution.recompute == "modules":
        unsaved = forward
        if "moe" not in execution.recomputed:
            unsaved = _recomputed_modules(routing, model, execution, machine)
    else:
        saved = not execution.recomputes(*activation_inputs(model))
        unsaved = without_products(forward, passes[0].forward) if saved else forward
    return PartPasses(forward, backward, unsaved=unsaved)


def _recomputed_modules(
    routing: Routing, model: Transformer, execution: Execution, machine: Machine
) -> PassCost:
    """Return the modules of experts that are recomputed: norm, activation, shared experts."""
    modules, recomputed = execution.recomputed, NO_COST
    if "layernorm" in modules:
        recomputed += norm_pass(execution.stream(model), machine)
    if "moe_act" in modules and machine.backend.expert_kernels != "fused":
        moved = (3 if model.gated else 2) * 2.0 * routing.rows * routing.inner
        recomputed += PassCost(machine.memory_seconds(moved, 1), 1)
        recomputed += _clamps(routing, model, machine).forward
    if "shared_experts" in modules:
        recomputed += _shared(model, execution, machine).forward
    return recomputed


def dispatch_seconds(model: Transformer, execution: Execution, machine: Machine) -> float:
    """Return the seconds in which tokens get to their experts and back, in one pass."""
    routing = Routing.of(model, execution)
    experts, network = model.experts_section, machine.network
    ring = network.ring(execution.expert, execution.expert_shards)
    row = 2.0 * routing.width
    match execution.dispatch:
        case "all_to_all":
            one_way = network.seconds("all_to_all", experts.load * routing.copies * row, ring)
            both_ways = 2 * one_way
        case "all_gather":
            gathered = execution.expert * routing.tokens * row
            both_ways = network.seconds("all_gather", gathered, ring)
            both_ways += network.seconds("reduce_scatter", gathered, ring)
        case "deduplicated":
            hosts = min(experts.max_hosts or ring.hosts, ring.hosts)
            far = distinct_places(experts, ring.hosts, hosts) * routing.tokens * row
            near = distinct_places(experts, ring.size, ring.size) * routing.tokens * row
            within = network.ring(ring.per_host, execution.expert_shards)
            # devices of a host share what it gets, so each of them forwards its part
            both_ways = 2 * network.seconds("all_to_all", near, within)
            if ring.hosts > 1:
                both_ways = max(both_ways, 2 * network.seconds("all_to_all", far, ring))
    shards = execution.expert_shards
    if shards > 1 and (execution.tensor == 1 or execution.sequence_parallel):
        block = network.ring(shards)
        both_ways += network.seconds("all_gather", routing.rows * row, block)
        both_ways += network.seconds("reduce_scatter", routing.rows * row, block)
    return both_ways


def distinct_places(experts: Experts, places: int, most: int) -> float:
    """Return the mean number of places of the experts of a token.

    Args:
        experts: the experts.
        places: devices or hosts with equal numbers of experts.
        most: places on which the experts of a token are, at most.
    """
    if places == 1:
        return 1.0
    if experts.consecutive:
        size, step = experts.count // places, gcd(experts.top_k, experts.count)
        # the first expert is any multiple of the step; the next place starts at `size`
        starts = range(0, lcm(size, step), step)
        ends = (start % size + experts.top_k - 1 for start in starts)
        return min(float(most), sum(end // size + 1 for end in ends) / len(starts))
    others = experts.count - experts.count // places
    absent = comb(others, experts.top_k) / comb(experts.count, experts.top_k)
    return min(float(most), places * (1 - absent))


def _grouped(
    routing: Routing, model: Transformer, execution: Execution, machine: Machine
) -> BothPasses:
    """Return the passes of the routed experts of a device, whose products are grouped.

    Products that are launched one by one run side by side, so that only the host is slower.
    """
    rows, groups = max(1, round(routing.rows / routing.experts)), routing.experts
    up = (2 if model.gated else 1) * routing.inner
    shapes = ((up, routing.width), (routing.width, routing.inner))
    gemms = machine.linear_products(model.precision)
    forward = sum(gemms.seconds(rows, out, inner, groups) for out, inner in shapes)
    backward = sum(gemms.seconds(rows, inner, out, groups) for out, inner in shapes)
    if model.adapters is None:
        backward += sum(gemms.seconds(out, inner, rows, groups) for out, inner in shapes)
    elements = groups * sum(out * inner for out, inner in shapes)
    cast_bytes = RECIPES[model.precision].cast_bytes
    if cast_bytes and machine.backend.expert_kernels == "fused":
        # what arrives is cast by a kernel of its own: rows, and gradients of results
        arrived = cast_bytes * routing.rows * routing.width
        forward += machine.memory_seconds(arrived, 1)
        backward += machine.memory_seconds(arrived, 1)
    elif cast_bytes:
        # backends that fuse casts cast weights once per step
        weights = elements / execution.microbatches if machine.backend.fused_casts else elements
        read = routing.rows * sum(inner for _, inner in shapes) + weights
        written = routing.rows * sum(out for out, _ in shapes)
        forward += machine.memory_seconds(cast_bytes * read, 4)
        backward += machine.memory_seconds(cast_bytes * written, 2)
    if model.adapters is None:
        backward += accumulation_seconds(elements, execution, machine)
    flops = 2.0 * rows * elements
    looped = machine.backend.expert_kernels == "looped"
    launches = 2 * max(1.0, _LOOPED_LAUNCHES * groups) if looped else 2
    products = model.products_of_weights - 1
    return BothPasses(
        PassCost(forward, round(launches), 0.0, flops),
        PassCost(backward, round(products * launches), 0.0, products * flops),
    )


def _biases(routing: Routing, model: Transformer, machine: Machine) -> BothPasses:
    """Return the passes of the biases of routed experts.

    Fused with the products, they add nothing. Otherwise the first is part of its product, and the
    second, times the scores, is added expert by expert and the sums concatenated (`_apply_bias` in
    github.com/NVIDIA/Megatron-LM, megatron/core/transformer/moe/experts.py). Bytes per element:
    product w2, sum r4 w2, concatenation r2 w2; backward the gradients of bias and score r2 w2 r2
    each. The gradient of the first bias reads that of the product.
    """
    if not model.experts_section.biases or machine.backend.expert_kernels == "fused":
        return NO_PASSES
    groups = routing.experts if machine.backend.expert_kernels == "looped" else 1
    outputs = routing.rows * routing.width
    columns = routing.rows * (2 if model.gated else 1) * routing.inner
    forward = PassCost(machine.memory_seconds(12.0 * outputs, 3), 2 * groups + 1)
    if model.adapters is not None:
        return BothPasses(forward)
    moved = 12.0 * outputs + 2.0 * columns
    return BothPasses(forward, PassCost(machine.memory_seconds(moved, 7), 7 * groups))


def _padding(
    routing: Routing, model: Transformer, execution: Execution, machine: Machine
) -> BothPasses:
    """Return the passes of copies that pad the rows of each expert for products of few bits.

    Such products need a multiple of 16 or 32 rows. Exchanges that sort rows by expert pad them as
    well, and so does a capacity; after a plain all_to_all, kernels of their own copy the inputs of
    experts into padded rows, and the outputs back (`quantization_padding` of `TEGroupedMLP` in
    github.com/NVIDIA/Megatron-LM, megatron/core/transformer/moe/experts.py). The backward pass
    copies their gradients in the same way.
    """
    padded = execution.dispatch == "all_to_all" and model.experts_section.capacity_factor is None
    looped = machine.backend.expert_kernels == "looped"
    if RECIPES[model.precision].dtype is None or not padded or not looped:
        return NO_PASSES
    row = 2.0 * routing.width
    copied = PassCost(
        machine.memory_seconds(2 * 2 * routing.rows * row, _PADDING_KERNELS), _PADDING_KERNELS
    )
    return BothPasses(copied, copied)


def _clamps(routing: Routing, model: Transformer, machine: Machine) -> BothPasses:
    """Return the passes of the clamps before a gated activation.

    They are not part of the kernel of the activation (`weighted_bias_quick_geglu_impl` in
    github.com/NVIDIA/Megatron-LM, megatron/core/fusions/fused_bias_geglu.py). Bytes per element of
    the inner width: clamps of both inputs r4 w4, their concatenation r4 w4; backward both clamps r8
    w4, the concatenation of the gradients r4 w4.
    """
    if not model.experts_section.clamped or machine.backend.expert_kernels == "fused":
        return NO_PASSES
    elements = float(routing.rows * routing.inner)
    return BothPasses(
        PassCost(machine.memory_seconds(16.0 * elements, 3), 3),
        PassCost(machine.memory_seconds(20.0 * elements, 3), 3),
    )


def _shared(model: Transformer, execution: Execution, machine: Machine) -> BothPasses:
    """Return the passes of shared experts, which the tensor axis divides like a dense MLP."""
    width = model.experts_section.shared_ffn
    routed_is_divided = execution.sequence_parallel or execution.expert_shards == 1
    if not width:
        if execution.tensor == 1 or routed_is_divided:
            return NO_PASSES
        inner = model.experts_section.ffn // execution.expert_shards
        return tensor_collectives(inner, inner, model, execution, machine)
    t, h, w = execution.tensor, model.hidden, 2
    up, down = (2 if model.gated else 1) * width // t, width // t
    linear = linear_passes(((up, h), (h, down)), model, execution, machine)
    activation = w * execution.tokens(model) * width / t
    moved = 3 if model.gated else 2
    collectives = tensor_collectives(up, down, model, execution, machine)
    forward = PassCost(machine.memory_seconds(moved * activation, 1), 1)
    backward = PassCost(machine.memory_seconds((2 * moved - 1) * activation, 1), 1)
    return linear + collectives + BothPasses(forward, backward)


def _latent(model: Transformer, execution: Execution, machine: Machine) -> BothPasses:
    """Return the passes of the projections to and from the width of tokens that are sent."""
    latent = model.experts_section.latent
    if latent is None:
        return NO_PASSES
    shapes = ((latent, model.hidden), (model.hidden, latent))
    return linear_passes(shapes, model, execution, machine, divided=True)


def _router(
    routing: Routing, model: Transformer, execution: Execution, machine: Machine
) -> BothPasses:
    """Return the passes of the router, whose product is of 16 bits and whose scores are f32."""
    count, h, tokens = model.experts_section.count, model.hidden, routing.tokens
    gemms = machine.gemms
    scores = 4.0 * tokens * count
    kernels = 1 if "router" in machine.backend.captured else _ROUTER_KERNELS
    flops = 2.0 * tokens * count * h
    forward = gemms.seconds(tokens, count, h) + machine.memory_seconds(4 * scores, 3)
    backward = gemms.seconds(tokens, h, count) + machine.memory_seconds(3 * scores, 2)
    if model.adapters is None:
        backward += gemms.seconds(count, h, tokens)
        backward += accumulation_seconds(count * h, execution, machine)
    return BothPasses(
        PassCost(forward, kernels, 0.0, flops),
        PassCost(backward, kernels, 0.0, 2 * flops),
    )


def _elementwise(
    routing: Routing, model: Transformer, execution: Execution, machine: Machine
) -> BothPasses:
    """Return the passes of norm, residual sum, permutations, and activations of routed experts."""
    w = 2
    row = w * routing.width
    permuted = 2 * (routing.tokens + routing.copies) * row  # to copies, and the sum of copies
    sorted_rows = 2 * 2 * routing.rows * row if routing.experts > 1 else 0
    if execution.dispatch == "deduplicated":  # the exchange makes and sums the copies
        permuted, sorted_rows = 0, 2 * 2 * routing.rows * row
    activation = w * routing.rows * routing.inner
    if machine.backend.expert_kernels == "fused":
        activation = 0
    moved = 3 if model.gated else 2
    passes = residual_passes(
        model,
        execution,
        machine,
        permuted + sorted_rows + moved * activation,
        permuted + sorted_rows + (2 * moved - 1) * activation,
    )
    return passes + BothPasses(PassCost(kernels=4), PassCost(kernels=4))
