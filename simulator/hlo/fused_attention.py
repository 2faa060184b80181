"""FLOP of fused attention: the calls of cuDNN that XLA:GPU makes of `jax.nn.dot_product_attention(..., implementation="cudnn")`."""

from collections.abc import Mapping
from typing import Any

from simulator.hlo.text import Computation, Instruction
from simulator.hlo.traffic import call_bytes
from simulator.work import Kernel

_PRODUCTS = {"attention": 2, "attention backward": 5}
"""Of queries by keys in the forward pass: the scores, and the sum of values. In the backward pass the scores once more, and two
gradients of either."""


def is_attention_call(target: str) -> bool:
    """Whether the custom call is fused attention, `__cudnn$fmhaSoftmax`, `__cudnn$fmhaScaleBiasSoftmaxDropoutBackward` and so on."""
    return target.startswith("__cudnn$fmha")


def attention_call(computation: Computation, call: Instruction, target: str) -> Kernel:
    """The kernel of such a call. Its configuration tells batch, heads, queries and keys, and the mask; what is masked is not computed.

    Lengths of padded sequences are not known before the step runs: they count in full.
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
            "no 'intermediate_tensor_shape' of 4 dims in its backend_config; expected the cudnn_fmha_backend_config that JAX writes"
        )
    batch, heads, queries, keys = map(int, shape["dimensions"])
    size = query.size / max(1, batch * heads * queries)  # of a head
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
    """How many pairs of a query and a key are not masked; query i sees keys 0 to i, or the last of them, if the mask is causal."""
    if "CAUSAL" not in str(config.get("mask_type")):
        return queries * keys
    seen = min(keys, int(config.get("sliding_window_length") or keys))
    first = min(queries, seen)
    return first * (first + 1) // 2 + (queries - first) * seen
