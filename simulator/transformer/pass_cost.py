"""Costs of a pass over a part of a layer, and helpers that the parts share."""

from collections.abc import Sequence
from typing import NamedTuple

from simulator.engine.stream_rules import added_seconds
from simulator.transformer.machine import Machine
from simulator.transformer.precision import RECIPES
from simulator.transformer.scenario import Execution
from simulator.transformer.transformer_sizes import Transformer

COLLECTIVE_LAUNCHES = 2
"""Launches of the host per collective: the collective, and the event that the next kernel waits
for."""

Shape = tuple[int, int]
"""The outputs and the inputs of a linear layer on one device."""


class PassCost(NamedTuple):
    """The cost of one pass over a layer, or over a part of it, on one device.

    Attributes:
        compute: seconds of kernels.
        kernels: number of kernels.
        communication: seconds of exposed collectives over the tensor axis.
        flops: FLOP of the matrix products.
        hidden: seconds of collectives over the tensor axis that overlap with computation.
        dispatch: seconds in which tokens get to experts and back, exposed or not.
    """

    compute: float = 0.0
    kernels: int = 0
    communication: float = 0.0
    flops: float = 0.0
    hidden: float = 0.0
    dispatch: float = 0.0

    def __add__(self, other: "PassCost") -> "PassCost":  # pyright: ignore[reportIncompatibleMethodOverride]
        if other is NO_COST:
            return self
        return PassCost(
            self.compute + other.compute,
            self.kernels + other.kernels,
            self.communication + other.communication,
            self.flops + other.flops,
            self.hidden + other.hidden,
            self.dispatch + other.dispatch,
        )

    def mixed(self, other: "PassCost", part: float) -> "PassCost":
        """Return the mean of this pass and of another one, which is a part of all passes."""
        return PassCost(
            self.compute + part * (other.compute - self.compute),
            round(self.kernels + part * (other.kernels - self.kernels)),
            self.communication + part * (other.communication - self.communication),
            self.flops + part * (other.flops - self.flops),
            self.hidden + part * (other.hidden - self.hidden),
            self.dispatch + part * (other.dispatch - self.dispatch),
        )


NO_COST = PassCost()


class BothPasses(NamedTuple):
    """The costs of the forward and the backward pass over a layer, or over a part of it."""

    forward: PassCost = NO_COST
    backward: PassCost = NO_COST

    def __add__(self, other: "BothPasses") -> "BothPasses":  # pyright: ignore[reportIncompatibleMethodOverride]
        return BothPasses(self.forward + other.forward, self.backward + other.backward)


NO_PASSES = BothPasses()


class PartPasses(NamedTuple):
    """The passes over a part of a layer: its mixer or its MLP.

    Attributes:
        forward: the forward pass.
        backward: the backward pass.
        scores: the part of the forward pass that selective recomputation repeats.
        unsaved: the part of the forward pass that is repeated because its results are not saved,
            or because it belongs to modules that are recomputed.
    """

    forward: PassCost = NO_COST
    backward: PassCost = NO_COST
    scores: PassCost = NO_COST
    unsaved: PassCost = NO_COST


def without_products(forward: PassCost, products: PassCost) -> PassCost:
    """Return the kernels of a forward pass beside the products of its linear layers."""
    return PassCost(
        forward.compute - products.compute,
        forward.kernels - products.kernels,
        flops=forward.flops - products.flops,
    )


def linear_passes(
    shapes: Sequence[Shape],
    model: Transformer,
    execution: Execution,
    machine: Machine,
    divided: bool = False,
    adapted: int = 0,
) -> BothPasses:
    """Return the passes of linear layers, with two products each in the backward pass.

    Frozen layers have one product, that of the gradient of the inputs.

    Args:
        shapes: outputs and inputs of each layer on a device.
        model: the model.
        execution: the execution.
        machine: the machine.
        divided: whether weights are whole on each device, which computes only its part of the
            sequence where sequence parallelism divides it.
        adapted: layers that have adapters, from the first.
    """
    tokens = execution.tokens(model)
    if divided and execution.sequence_parallel:
        tokens = -(-tokens // execution.tensor)
    gemms = machine.linear_products(model.precision)
    # lists, which `sum` adds up faster than generators
    forward = sum([gemms.seconds(tokens, out, inner) for out, inner in shapes])
    backward = sum([gemms.seconds(tokens, inner, out) for out, inner in shapes])
    count, products = len(shapes), model.products_of_weights - 1
    if model.adapters is None:
        backward += sum([gemms.seconds(out, inner, tokens) for out, inner in shapes])
        backward += sum(
            [accumulation_seconds(out * inner, execution, machine) for out, inner in shapes]
        )
    if execution.casts_parameters and execution.zero < 3:
        # 32 and 16 bits, of the parameters and of their gradients
        moved = 6.0 * sum([out * inner for out, inner in shapes])
        converted = machine.memory_seconds(moved, count)
        forward += converted
        backward += converted if model.adapters is None else 0.0
    casting = 0
    if execution.autocast:
        # parameters to 16 bits; their gradients to 32 bits, and to 16 for their sum
        casting = count
        moved = 6.0 * sum([out * inner for out, inner in shapes])
        forward += machine.memory_seconds(moved, count)
        if model.adapters is None:
            backward += machine.memory_seconds(2 * moved, 2 * count)
    if RECIPES[model.precision].dtype is not None:
        casts = _cast_passes(shapes, tokens, model, execution, machine)
        forward, backward = forward + casts[0], backward + casts[1]
    flops = sum([2.0 * tokens * out * inner for out, inner in shapes])
    passes = BothPasses(
        PassCost(forward, count + casting, 0.0, flops),
        PassCost(backward, products * (count + casting), 0.0, products * flops),
    )
    if model.adapters is None:
        return passes
    rank = model.adapters.rank
    adapters = [_adapter_passes(shape, rank, tokens, machine) for shape in shapes[:adapted]]
    return sum(adapters, passes)


def _adapter_passes(shape: Shape, rank: int, tokens: int, machine: Machine) -> BothPasses:
    """Return the passes of an adapter: its products in 16 bits, and the sums of its results."""
    out, inner = shape
    gemms = machine.gemms
    forward = gemms.seconds(tokens, rank, inner) + gemms.seconds(tokens, out, rank)
    inputs = gemms.seconds(tokens, rank, out) + gemms.seconds(tokens, inner, rank)
    weights = gemms.seconds(out, rank, tokens) + gemms.seconds(rank, inner, tokens)
    # two reads and a write of the results, and of the gradient of the inputs
    forward += machine.memory_seconds(6.0 * tokens * out, 1)
    backward = inputs + weights + machine.memory_seconds(6.0 * tokens * inner, 1)
    flops = 2.0 * tokens * rank * (out + inner)
    return BothPasses(PassCost(forward, 3, 0.0, flops), PassCost(backward, 5, 0.0, 2 * flops))


def _cast_passes(
    shapes: Sequence[Shape],
    tokens: int,
    model: Transformer,
    execution: Execution,
    machine: Machine,
) -> tuple[float, float]:
    """Return the seconds of casts, with a transposed copy, of what products of few bits read.

    Fused into the kernel that computes the operand, a cast adds nothing: it writes no more bytes
    than that kernel would without it.
    """
    count, cast = len(shapes), RECIPES[model.precision].cast_bytes
    weights = cast * sum(out * inner for out, inner in shapes)
    if machine.backend.fused_casts:
        # the last product before the residual sum has an operand and a gradient without such a
        # kernel; weights are cast with the first microbatch
        out, inner = shapes[-1]
        weights /= execution.microbatches
        forward = machine.memory_seconds(cast * tokens * inner + weights, count + 1)
        return forward, machine.memory_seconds(cast * tokens * out, 1)
    inputs = cast * sum(tokens * inner for _, inner in shapes)
    gradients = cast * sum(tokens * out for out, _ in shapes)
    return (
        machine.memory_seconds(inputs + weights, 2 * count),
        machine.memory_seconds(gradients, count),
    )


def accumulation_seconds(elements: float, execution: Execution, machine: Machine) -> float:
    """Return the seconds by which a product is slower that adds a weight gradient to its sum.

    It reads and writes the sum over microbatches instead of writing a gradient, or another kernel
    reads the gradient and both reads and writes the sum. Frozen layers have none.
    """
    if not execution.accumulates:
        return 0.0
    if execution.separate_accumulation:
        return machine.memory_seconds((2.0 + 2.0 * execution.gradient_bytes) * elements, 1)
    return (
        machine.memory_seconds((2.0 * execution.gradient_bytes - 2.0) * elements, 1)
        - machine.launch_seconds
    )


def tensor_collectives(
    outputs_by_column: int,
    inputs_by_row: int,
    model: Transformer,
    execution: Execution,
    machine: Machine,
    inputs: int = 1,
) -> BothPasses:
    """Return the waits for collectives over the tensor axis around two linear layers.

    The first is split by column, the second by row. A pass has an all_reduce, or an all_gather and
    a reduce_scatter with sequence parallelism, whose backward pass gathers the inputs once more
    unless they are saved. In the backward pass these gathers, and the sums of the gradients of
    inputs, can overlap with the products of weight gradients.

    Args:
        outputs_by_column: outputs of the first layer on a device.
        inputs_by_row: inputs of the second layer on a device.
        model: the model.
        execution: the execution.
        machine: the machine.
        inputs: linear layers that the first consists of, each of which sums the gradient of its
            input without sequence parallelism.
    """
    if execution.tensor == 1:
        return NO_PASSES
    network = machine.network
    ring = network.ring(execution.tensor)
    tokens, h = execution.tokens(model), model.hidden
    stream = 2.0 * tokens * h
    if execution.sequence_parallel:
        recipe = machine.gathered_as(model.precision)
        gather = network.seconds("all_gather", recipe.width * tokens * h, ring)
        # both products of the backward pass read the gradient
        gradients = network.seconds("all_gather", recipe.width_of_both * tokens * h, ring)
        scatter = network.seconds("reduce_scatter", stream, ring)
    else:
        gather, gradients = 0.0, 0.0
        scatter = network.seconds("all_reduce", stream, ring)
    # pairs of a collective and the product that it can overlap with
    forward = (
        (gather, machine.gemms.seconds(tokens, outputs_by_column, h)),
        (scatter, machine.gemms.seconds(tokens, h, inputs_by_row)),
    )
    again = 0.0 if execution.saves_gathered else gather
    sums = 1 if execution.sequence_parallel else inputs
    weights = (again + sums * scatter, machine.gemms.seconds(outputs_by_column, h, tokens))
    outputs = (gradients, machine.gemms.seconds(tokens, inputs_by_row, h))
    launches = COLLECTIVE_LAUNCHES * (2 if execution.sequence_parallel else 1)
    overlap_weights = execution.overlap_tensor != "none"
    overlap_all = execution.overlap_tensor == "all"
    far = ring.hosts > 1
    return BothPasses(
        overlapped(forward, overlap_all, launches, machine, far),
        overlapped((weights,), overlap_weights, launches, machine, far)
        + overlapped((outputs,), overlap_all, 0, machine, far),
    )


def sum_of_outputs(
    inputs_by_row: int, model: Transformer, execution: Execution, machine: Machine
) -> PassCost:
    """Return the wait for the collective after a linear layer that is split by row.

    Arguments as for `tensor_collectives`.
    """
    if execution.tensor == 1:
        return NO_COST
    ring = machine.network.ring(execution.tensor)
    tokens, h = execution.tokens(model), model.hidden
    kind = "reduce_scatter" if execution.sequence_parallel else "all_reduce"
    pair = (
        machine.network.seconds(kind, 2.0 * tokens * h, ring),
        machine.gemms.seconds(tokens, h, inputs_by_row),
    )
    overlap = execution.overlap_tensor == "all"
    return overlapped((pair,), overlap, COLLECTIVE_LAUNCHES, machine, ring.hosts > 1)


def overlapped(
    pairs: Sequence[tuple[float, float]],
    overlap: bool,
    launches: int,
    machine: Machine,
    between_hosts: bool,
) -> PassCost:
    """Return the wait for collectives, each of which may overlap with a product.

    Args:
        pairs: seconds of each collective and of its product.
        overlap: whether they overlap.
        launches: launches of the host.
        machine: the machine.
        between_hosts: whether the collectives are between hosts.
    """
    total, exposed = 0.0, 0.0
    contention = machine.tensor_contention(between_hosts) if overlap else 0.0
    for moved, compute in pairs:
        total += moved
        exposed += added_seconds(moved, compute, contention) if overlap else moved
    return PassCost(0.0, launches, exposed, 0.0, total - exposed)


def norm_pass(elements: float, machine: Machine) -> PassCost:
    """Return the forward pass of a norm, which reads and writes its elements in 16 bits."""
    return PassCost(machine.memory_seconds(2 * 2.0 * elements, 1), 1)


def residual_passes(
    model: Transformer,
    execution: Execution,
    machine: Machine,
    forward_bytes: float,
    backward_bytes: float,
) -> BothPasses:
    """Return the passes of the elementwise kernels around a mixer or an MLP.

    They are a norm before it, bias, dropout and the residual sum after it, and kernels of its own.

    Args:
        model: the model.
        execution: the execution.
        machine: the machine.
        forward_bytes: traffic of its own elementwise kernels in the forward pass.
        backward_bytes: the same in the backward pass.
    """
    width = 2
    stream = execution.stream(model)
    mask = 1 if model.dropout else 0
    forward = 2 * width * stream + (3 * width + mask) * stream + forward_bytes
    # the norm; its sum with the gradient of the residual; dropout and bias
    backward = 2 * 3 * width * stream + backward_bytes
    backward += (2 * width + mask + (width if model.biases else 0)) * stream
    if (streams := model.residual_streams) > 1:
        # their mixture, which is written and normalized, and their sum with the output; the
        # backward pass also reads them for the gradients of the weights of both
        mixed = (streams + 1 + 2 * (streams - 1)) * width * stream
        forward, backward = forward + mixed, backward + 2 * mixed
    passes = BothPasses(
        PassCost(machine.memory_seconds(forward, 3), 4),
        PassCost(machine.memory_seconds(backward, 8), 8),
    )
    if not execution.autocast:
        return passes
    # Beyond the kernels above: the input of the norm r4 w2, and 4 more of the sum. Backward: the
    # gradient of the output r4 w2, gradient of the norm's input r2 w4, and 6 more for their sum.
    return passes + BothPasses(
        PassCost(machine.memory_seconds(10.0 * stream, 2), 1),
        PassCost(machine.memory_seconds(18.0 * stream, 3), 2),
    )
