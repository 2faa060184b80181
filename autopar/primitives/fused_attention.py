"""cuDNN's fused attention, which `jax.nn.dot_product_attention` calls: how it splits and its FLOP.

Sequences are independent of one another. So are groups of heads, which are the query heads that
share a head of keys, and the queries of a forward pass without a mask. A causal mask counts
positions from the first query and key, so a part of the queries would have wrong positions. The
backward pass sums the gradients of keys and values over the queries, so it keeps the queries whole.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from jax.extend.core import JaxprEqn

from autopar.ir.array_sizes import hlo_dtype
from autopar.ir.graph import aval_of, source_line
from autopar.primitives.equation_work import Shapes
from autopar.primitives.factors import Dims, FactorBuilder, OpFactors
from autopar.primitives.registry import PrimitiveRecord
from autopar.primitives.rule_helpers import shape_of
from simulator.attention_flops import attention_flops
from simulator.hardware.description import ClusterError
from simulator.hardware.device import Device
from simulator.work import Kernel

_FORWARD = "dot_product_attention_fwd_wrapper"
_BACKWARD = "dot_product_attention_bwd_wrapper"
_BIAS, _LENGTHS, _PAGES = 3, slice(4, 8), slice(8, 10)  # positions of operands
_HEADS_FIRST = 1  # the value of `layout` for arrays (batch, heads, length, size)


@dataclass(frozen=True, slots=True)
class _OperandSizes:
    """Sizes of an array of queries, keys or values, or of its shard."""

    batch: int
    length: int
    heads: int
    size: int

    @classmethod
    def of(cls, eqn: JaxprEqn, shape: Sequence[int]) -> "_OperandSizes":
        batch, length, heads, size = _in_layout(eqn, shape)
        return cls(batch, length, heads, size)


def _in_layout[T](eqn: JaxprEqn, dims: Sequence[T]) -> tuple[T, T, T, T]:
    """Return (batch, length, heads, size) in the order of the equation's arrays, or back."""
    batch, second, third, size = dims
    if eqn.params["layout"] == _HEADS_FIRST:
        return batch, third, second, size
    return batch, second, third, size


def _factors(eqn: JaxprEqn) -> OpFactors:
    """Split the batch, the heads of keys, and the queries where they are independent."""
    shapes = [shape_of(atom) for atom in eqn.invars]
    query, key, value = (_OperandSizes.of(eqn, shape) for shape in shapes[:3])
    bias = shapes[_BIAS]
    build = FactorBuilder()
    # Shards would draw the same random numbers, pages belong to any sequence, and the gradient of
    # a bias is a sum over the sequences and heads that share it.
    is_whole = eqn.params["dropout_rate"] > 0 or any(map(prod, shapes[_PAGES]))
    has_bias_gradient = len(eqn.outvars) > 3
    sums_bias = has_bias_gradient and bias[:2] != (query.batch, query.heads)
    whole = is_whole or sums_bias
    batch = build.new(query.batch, "whole" if whole else "parallel")
    groups = build.new(key.heads, "whole" if whole else "parallel")
    heads = (*groups, *build.new(query.heads // key.heads, "whole"))
    is_masked = eqn.params["mask_type"].name != "NO_MASK"
    splits_queries = eqn.primitive.name == _FORWARD and not is_masked and not is_whole
    queries = build.new(query.length, "parallel" if splits_queries else "whole")
    keys = build.new(key.length, "whole")
    size, value_size = build.new(query.size, "whole"), build.new(value.size, "whole")

    of_query = _in_layout(eqn, (batch, queries, heads, size))
    of_key = _in_layout(eqn, (batch, keys, groups, size))
    of_value = _in_layout(eqn, (batch, keys, groups, value_size))
    of_output = _in_layout(eqn, (batch, queries, heads, value_size))
    of_bias: Dims = build.dims(bias, "whole")
    if len(bias) == 4:
        of_bias = (
            batch if bias[0] == query.batch else (),
            heads if bias[1] == query.heads else (),
            queries,
            keys,
        )
    lengths = [
        (batch, *build.dims(shape[1:], "whole")) if prod(shape) else build.dims(shape, "whole")
        for shape in shapes[_LENGTHS]
    ]
    pages = [build.dims(shape, "whole") for shape in shapes[_PAGES]]
    statistics = shape_of(eqn.invars[10] if len(eqn.invars) > 10 else eqn.outvars[-1])
    segments = build.new(max(1, statistics[0] // query.batch), "whole")
    of_statistics = ((*batch, *segments), heads, queries)
    operands = [of_query, of_key, of_value, of_bias, *lengths, *pages]
    if eqn.primitive.name == _FORWARD:
        results = [of_output, of_statistics][: len(eqn.outvars)]
    else:
        operands += [of_statistics, of_output, of_output]
        results = [of_query, of_key, of_value, of_bias][: len(eqn.outvars)]
    return build.build(operands, results, decides=True)


def _kernel(eqn: JaxprEqn, operands: Shapes, _: Shapes, moved_bytes: float) -> Kernel:
    """Return the kernel of the shards; padding counts in full, as only a run knows the lengths."""
    query, key, value = (_OperandSizes.of(eqn, shape) for shape in operands[:3])
    backward = eqn.primitive.name == _BACKWARD
    is_causal = "CAUSAL" in eqn.params["mask_type"].name
    window = (eqn.params["sliding_window_length"] or key.length) if is_causal else 0
    flops = attention_flops(
        query.batch * query.heads,
        query.length,
        key.length,
        (query.size, value.size),
        backward,
        window,
    )
    kind = "attention backward" if backward else "attention"
    dtype = hlo_dtype(aval_of(eqn.invars[0]).dtype)
    return Kernel(eqn.primitive.name.removesuffix("_wrapper"), kind, flops, moved_bytes, dtype)


def check_capability(eqns: Iterable[JaxprEqn], device: Device) -> None:
    """Check that a GPU runs the fused attention of equations, by the conditions of JAX.

    JAX checks them itself where there is a GPU.

    Raises:
        ClusterError: its compute capability is too low.
    """
    present = device.compute_capability
    if present is None:
        return
    for eqn in eqns:
        if eqn.primitive.name in RECORDS and present < (needed := _needed_capability(eqn)):
            query = _OperandSizes.of(eqn, shape_of(eqn.invars[0]))
            raise ClusterError(
                f"{source_line(eqn)} calls cuDNN's fused attention with heads of {query.size}"
                f" elements, which needs compute capability {needed[0]}.{needed[1]};"
                f" {device.name} has {present[0]}.{present[1]}. Use implementation='xla'"
            )


def _needed_capability(eqn: JaxprEqn) -> tuple[int, int]:
    query, _, value = (_OperandSizes.of(eqn, shape_of(atom)) for atom in eqn.invars[:3])
    is_packed = len(shape_of(eqn.invars[6])) > 1
    return (9, 0) if query.size > 128 or query.size != value.size or is_packed else (8, 0)


_RECORD = PrimitiveRecord(factors=_factors, work=_kernel, runs_on_shards=True)

RECORDS: dict[str, PrimitiveRecord] = {_FORWARD: _RECORD, _BACKWARD: _RECORD}
