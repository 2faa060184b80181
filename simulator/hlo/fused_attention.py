"""FLOP of fused attention: calls of cuDNN.

XLA:GPU compiles `jax.nn.dot_product_attention(..., implementation="cudnn")` to them.
"""

from collections.abc import Mapping
from typing import Any

from simulator.hlo.text import Computation, Instruction
from simulator.hlo.traffic import call_bytes
from simulator.work import Kernel

_PRODUCTS = {"attention": 2, "attention backward": 5}
"""Matrix products per kind of kernel.

Forward: the scores, and the sum of values. Backward: the scores again, and two gradients of either.
"""


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
    query = computation.operands(call, least=3)[0].array
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
    size = query.size / max(1, batch * heads * queries)  # elements of a head
    kind = "attention backward" if "Backward" in target else "attention"
    pairs = batch * heads * _pairs(queries, keys, config)
    return Kernel(
        call.name,
        kind,
        2.0 * _PRODUCTS[kind] * size * pairs,
        call_bytes(computation, call),
        query.dtype,
    )


def _pairs(queries: int, keys: int, config: Mapping[str, Any]) -> int:
    """Return the number of unmasked pairs of a query and a key.

    With a causal mask query i sees keys 0 to i, or the last of them within a sliding window.
    """
    if "CAUSAL" not in str(config.get("mask_type")):
        return queries * keys
    window = min(keys, int(config.get("sliding_window_length") or keys))
    first = min(queries, window)  # queries that see less than a complete window
    return first * (first + 1) // 2 + (queries - first) * window
