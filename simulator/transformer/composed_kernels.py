"""Operations that a backend composes of elementwise kernels instead of launching a fused one.

Each kernel of PyTorch reads its operands from memory and writes its result there. The traffic below
is what the kernels of an operation move beyond the fused kernel, in bytes per element: "r2 w4" is a
kernel that reads two bytes and writes four. The sequences of kernels are those of Llama as written
in PyTorch without fusions (the same as in github.com/Aleph-Alpha/scaling, src/scaling/core/nn).

Those that end in "by_xla" are of a layer of a vision transformer and a GPT that XLA (jaxlib 0.11.2)
compiled for A100: it fuses elementwise operations with the reduction after them, but not with the
one before them, and keeps gradients of biases in f32.
"""

from dataclasses import dataclass

from simulator.transformer.machine import Machine
from simulator.transformer.pass_cost import NO_COST, NO_PASSES, BothPasses, PassCost
from simulator.transformer.scenario import ComposedOperation, Execution
from simulator.transformer.transformer_sizes import Transformer


@dataclass(frozen=True, slots=True)
class ComposedKernels:
    """What a composed operation adds to its fused kernel.

    Attributes:
        forward_bytes: further traffic of the forward pass, per element.
        forward_kernels: further kernels of the forward pass.
        backward_bytes: further traffic of the backward pass, per element.
        backward_kernels: further kernels of the backward pass.
        saved_bytes: further bytes that are saved for the backward pass, per element.
    """

    forward_bytes: float
    forward_kernels: int
    backward_bytes: float
    backward_kernels: int
    saved_bytes: float


COMPOSED: dict[ComposedOperation, ComposedKernels] = {
    # Forward: to f32 r2 w4, square r4 w4, mean r4, product with the inverse root r4 w4, back r4 w2,
    # weight r2 w2: 36, of which 4 fused. Backward: weight r2 w2, its gradient r4 w2 and sum r2, to
    # f32 r2 w4, product r4 w4, gradient of the root r8 w4 and sum r4, mean w4, square r4 w4 and
    # r8 w4, sum of both gradients r8 w4, back r4 w2: 84, of which 6 fused. The input in f32 and the
    # normalized input are saved beside the input and the output.
    "norm": ComposedKernels(32.0, 7, 78.0, 13, 6.0),
    # A fused norm in f32 between casts. Forward: to f32 r2 w4, norm r4 w4, back r4 w2: 20, of
    # which 4 fused. Backward: to f32 r2 w4, norm r8 w4, back r4 w2: 24, of which 6 fused.
    "norm_in_f32": ComposedKernels(16.0, 2, 18.0, 2, 0.0),
    # Forward: statistics r2, norm r2 w2: 6, of which 4 fused. Backward: its kernels move no more
    # than a fused one and those beside it, whose sums they include.
    "norm_by_xla": ComposedKernels(2.0, 1, 0.0, 1, 0.0),
    # Queries and keys. Forward: cosine r2 w2, negation of a half r1 w1, concatenation r2 w2, sine
    # r2 w2, sum r4 w2: 20, of which 4 fused. Backward: both products 8, halves in zeros 10, their
    # sums 12: 30, of which 6 fused.
    "rotary": ComposedKernels(16.0, 9, 24.0, 16, 0.0),
    # Forward: to f32 r2 w4, complex product r4 w4, back r4 w2: 20, of which 4 fused. Backward: the
    # same with the conjugate: 20, of which 6 fused. torch.compile leaves these kernels as they are
    # (_warn_complex_not_supported in torch/_inductor/lowering.py).
    "complex_rotary": ComposedKernels(16.0, 5, 14.0, 5, 0.0),
    # A gated MLP. Forward: function r2 w2, product r4 w2: 10, of which 6 fused. Backward: two
    # products 12, function r4 w2: 18, of which 10 fused. The value of the function is saved.
    "activation": ComposedKernels(4.0, 1, 8.0, 2, 2.0),
    # A GELU with a bias, in place of "activation". Forward: r2 w6, which saves the input and the
    # hyperbolic tangent: 8, of which 4 fused. Backward: r6 w2, w4 and r4 for the gradient of the
    # bias in f32, r2: 18, of which 8 fused.
    "gelu_by_xla": ComposedKernels(4.0, 1, 10.0, 1, 2.0),
    # An element that may be dropped. Forward: random bits w4, their order r4 w1, mask r1: 11 with
    # their rest, of which 1 fused. Backward: 3, of which 1 fused.
    "dropout_by_xla": ComposedKernels(10.0, 2, 2.0, 1, 0.0),
    # Scores. Forward: to f32 r2 w4, mask r4 w4, softmax r4 w4, back r4 w2: 28, of which 4 fused.
    # Backward: r2 w4, softmax r8 w4, mask r4 w4, back r4 w2: 32, of which 6 fused. The softmax is
    # saved in f32 beside its copy.
    "softmax": ComposedKernels(24.0, 3, 26.0, 3, 4.0),
    # Forward: maximum r2, sum of exponentials r2, quotient r2 w2: 8, of which 4 fused. Backward:
    # sum of the product r4, gradient r4 w2: 10, of which 6 fused.
    "softmax_by_xla": ComposedKernels(4.0, 2, 4.0, 1, 0.0),
    # Scores whose sides are no multiples of 8, to which XLA pads operands of products. Forward: the
    # part of a result that is no padding r2 w2, a padded operand r2 w2. Backward: the same.
    "padding_by_xla": ComposedKernels(8.0, 2, 8.0, 2, 0.0),
}
"""What each operation adds when it is composed."""

_PADDED = 8
"""Elements to a multiple of which XLA pads the sides of products in 16 bits."""

_REPEATED_BYTES = 26.0
_REPEATED_KERNELS = 4
"""What the backward pass repeats of a norm in f32, so that its f32 values need no memory: the
residual sum before it (r4 w2), both casts and the norm (20), in bytes per element. InternEvo does
so without recomputation (dropout_selective_checkpoint in internlm/model/modeling_internlm.py)."""


def composed_passes(
    operation: ComposedOperation,
    elements: float,
    execution: Execution,
    machine: Machine,
) -> BothPasses:
    """Return what an operation adds to both passes; nothing if it is fused.

    Args:
        operation: the operation.
        elements: elements of its operand on one device.
        execution: the execution, which says what is composed.
        machine: the machine.
    """
    if operation not in execution.composed:
        return NO_PASSES
    kernels = COMPOSED[operation]
    forward = machine.memory_seconds(kernels.forward_bytes * elements, kernels.forward_kernels)
    backward = machine.memory_seconds(kernels.backward_bytes * elements, kernels.backward_kernels)
    return BothPasses(
        PassCost(forward, kernels.forward_kernels), PassCost(backward, kernels.backward_kernels)
    )


def composed_norm(elements: float, execution: Execution, machine: Machine) -> BothPasses:
    """Return what a norm adds to both passes, however it is composed.

    Args:
        elements: elements of the norm's operand on one device.
        execution: the execution, which says what is composed.
        machine: the machine.
    """
    if not execution.composed:
        return NO_PASSES
    parts = composed_passes("norm", elements, execution, machine)
    in_f32 = composed_passes("norm_in_f32", elements, execution, machine)
    by_xla = composed_passes("norm_by_xla", elements, execution, machine)
    repeated = NO_COST
    if "norm_in_f32" in execution.composed and execution.recompute != "full":
        seconds = machine.memory_seconds(_REPEATED_BYTES * elements, _REPEATED_KERNELS)
        repeated = PassCost(seconds, _REPEATED_KERNELS)
    return parts + in_f32 + by_xla + BothPasses(backward=repeated)


def composed_softmax(
    elements: float, sides: tuple[int, int], execution: Execution, machine: Machine
) -> BothPasses:
    """Return what the softmax of naive attention adds to both passes, however it is composed.

    Args:
        elements: elements of the scores on one device.
        sides: queries and keys of a sequence.
        execution: the execution, which says what is composed.
        machine: the machine.
    """
    parts = composed_passes("softmax", elements, execution, machine)
    by_xla = composed_passes("softmax_by_xla", elements, execution, machine)
    padded = NO_PASSES
    if sides[0] % _PADDED or sides[1] % _PADDED:
        padded = composed_passes("padding_by_xla", elements, execution, machine)
    return parts + by_xla + padded


def composed_saved(operation: ComposedOperation, elements: float, execution: Execution) -> float:
    """Return the further bytes that an operation saves for the backward pass.

    Arguments as for `composed_passes`.
    """
    return COMPOSED[operation].saved_bytes * elements if operation in execution.composed else 0.0


def rotated_elements(model: Transformer, execution: Execution) -> float:
    """Return the elements of queries and keys on one device, which rotary positions change."""
    if model.learned_positions:
        return 0.0
    rotated = (model.heads + model.key_heads) * model.query_size
    return execution.tokens(model) * rotated / execution.tensor


def score_elements(model: Transformer, execution: Execution, keys: int) -> float:
    """Return the elements of the scores of attention to so many keys on one device."""
    heads = model.heads / (execution.tensor * execution.context)
    return execution.microbatch * heads * model.seq * keys
