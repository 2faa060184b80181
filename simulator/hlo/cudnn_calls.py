"""FLOP of fused attention: calls of cuDNN.

XLA:GPU compiles `jax.nn.dot_product_attention(..., implementation="cudnn")` to them.
"""

from collections.abc import Mapping

from simulator.attention_flops import attention_flops
from simulator.hlo.text import Computation, Instruction
from simulator.hlo.traffic import call_bytes
from simulator.work import Kernel


def is_attention_call(target: str) -> bool:
    """Return whether a custom call is fused attention, e.g. `__cudnn$fmhaSoftmaxBackward`."""
    return target.startswith("__cudnn$fmha")


def attention_call(computation: Computation, call: Instruction, target: str) -> Kernel:
    """Return the kernel of a call of fused attention.

    Its configuration has the numbers of sequences, heads, queries and keys, and the mask. Masked
    pairs cost nothing; padding counts in full, as lengths of sequences are values of the step.

    Args:
        computation: the computation with the call.
        call: the custom call.
        target: its target.

    Raises:
        HloError: its configuration lacks the numbers.
    """
    least = 5 if "Backward" in target else 3
    query = computation.operands(call, least=least)[0].array
    config = call.backend_config().get("cudnn_fmha_backend_config")
    shape = config.get("intermediate_tensor_shape") if isinstance(config, Mapping) else None
    if (
        not isinstance(config, Mapping)
        or not isinstance(shape, Mapping)
        or len(shape.get("dimensions", ())) != 4
    ):
        raise call.error(
            "no 'intermediate_tensor_shape' of 4 dims in its backend_config; expected the "
            "cudnn_fmha_backend_config that JAX writes"
        )
    batch, heads, queries, keys = map(int, shape["dimensions"])
    backward = "Backward" in target
    operands = computation.operands(call)
    output = operands[4].array if backward else call.array  # the backward pass reads its gradient
    rows = max(1, batch * heads * queries)
    is_causal = "CAUSAL" in str(config.get("mask_type"))
    window = int(config.get("sliding_window_length") or keys) if is_causal else 0
    sizes = query.size / rows, output.size / rows
    return Kernel(
        call.name,
        "attention backward" if backward else "attention",
        attention_flops(batch * heads, queries, keys, sizes, backward, window),
        call_bytes(computation, call),
        query.dtype,
    )
