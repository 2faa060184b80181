"""Operations that a backend composes of elementwise kernels instead of launching a fused one.

Each kernel of PyTorch reads its operands from memory and writes its result there. The traffic below
is what the kernels of an operation move beyond the fused kernel, in bytes per element: "r2 w4" is a
kernel that reads two bytes and writes four. The sequences of kernels are those of Llama as written
in PyTorch without fusions (the same as in github.com/Aleph-Alpha/scaling, src/scaling/core/nn).
"""

from dataclasses import dataclass

from simulator.transformer.machine import Machine
from simulator.transformer.pass_cost import NO_COST, PassCost
from simulator.transformer.scenario import ComposedOperation, Execution, Transformer

Passes = tuple[PassCost, PassCost]
"""A forward pass and a backward pass."""


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
    # Queries and keys. Forward: cosine r2 w2, negation of a half r1 w1, concatenation r2 w2, sine
    # r2 w2, sum r4 w2: 20, of which 4 fused. Backward: both products 8, halves in zeros 10, their
    # sums 12: 30, of which 6 fused.
    "rotary": ComposedKernels(16.0, 9, 24.0, 16, 0.0),
    # A gated MLP. Forward: function r2 w2, product r4 w2: 10, of which 6 fused. Backward: two
    # products 12, function r4 w2: 18, of which 10 fused. The value of the function is saved.
    "activation": ComposedKernels(4.0, 1, 8.0, 2, 2.0),
    # Scores. Forward: to f32 r2 w4, mask r4 w4, softmax r4 w4, back r4 w2: 28, of which 4 fused.
    # Backward: r2 w4, softmax r8 w4, mask r4 w4, back r4 w2: 32, of which 6 fused. The softmax is
    # saved in f32 beside its copy.
    "softmax": ComposedKernels(24.0, 3, 26.0, 3, 4.0),
}
"""What each operation adds when it is composed."""

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
) -> Passes:
    """Return what an operation adds to both passes; nothing if it is fused.

    Args:
        operation: the operation.
        elements: elements of its operand on one device.
        execution: the execution, which says what is composed.
        machine: the machine.
    """
    if operation not in execution.composed:
        return NO_COST, NO_COST
    kernels = COMPOSED[operation]
    forward = machine.memory_seconds(kernels.forward_bytes * elements, kernels.forward_kernels)
    backward = machine.memory_seconds(kernels.backward_bytes * elements, kernels.backward_kernels)
    return PassCost(forward, kernels.forward_kernels), PassCost(backward, kernels.backward_kernels)


def composed_norm(elements: float, execution: Execution, machine: Machine) -> Passes:
    """Return what a norm adds to both passes, however it is composed.

    Args:
        elements: elements of the norm's operand on one device.
        execution: the execution, which says what is composed.
        machine: the machine.
    """
    if not execution.composed:
        return NO_COST, NO_COST
    parts = composed_passes("norm", elements, execution, machine)
    in_f32 = composed_passes("norm_in_f32", elements, execution, machine)
    repeated = NO_COST
    if "norm_in_f32" in execution.composed and execution.recompute != "full":
        seconds = machine.memory_seconds(_REPEATED_BYTES * elements, _REPEATED_KERNELS)
        repeated = PassCost(seconds, _REPEATED_KERNELS)
    return parts[0] + in_f32[0], parts[1] + in_f32[1] + repeated


def composed_saved(operation: ComposedOperation, elements: float, execution: Execution) -> float:
    """Return the further bytes that an operation saves for the backward pass.

    Args are those of `composed_passes`.
    """
    return COMPOSED[operation].saved_bytes * elements if operation in execution.composed else 0.0


def rotated_elements(model: Transformer, execution: Execution) -> float:
    """Return the elements of queries and keys on one device, which rotary positions change."""
    if model.learned_positions:
        return 0.0
    rotated = (model.heads + model.key_heads) * model.query_size
    return execution.tokens(model) * rotated / execution.tensor


def score_elements(model: Transformer, execution: Execution) -> float:
    """Return the elements of the scores of attention on one device."""
    heads = model.heads / (execution.tensor * execution.context)
    return execution.microbatch * heads * model.seq**2
