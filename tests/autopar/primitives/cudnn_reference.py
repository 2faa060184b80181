"""cuDNN's fused attention on the CPU of tests: the primitives of JAX with a plain definition."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import mlir

import autopar
from autopar.ir.flatten import flatten


def attend(query: Any, key: Any, value: Any, bias: Any = None, **options: Any) -> Any:
    """Return `jax.nn.dot_product_attention` by cuDNN, which is assumed to be there."""
    with autopar.assume_cudnn():
        return jax.nn.dot_product_attention(
            query, key, value, bias, implementation="cudnn", **options
        )


def gradients(query: Any, key: Any, value: Any, bias: Any = None, **options: Any) -> Any:
    """Return the gradients of a sum of squares of attention."""

    def loss(query: Any, key: Any, value: Any, bias: Any) -> Any:
        return jnp.sum(attend(query, key, value, bias, **options).astype(jnp.float32) ** 2)

    return jax.grad(loss, (0, 1, 2, 3) if bias is not None else (0, 1, 2))(query, key, value, bias)


def _forward(
    query: Any, key: Any, value: Any, bias: Any, q_len: Any, k_len: Any, *_: Any, **params: Any
) -> list[Any]:
    """Return the output and the logarithms of the sums of softmax, of (batch, length, heads)."""
    query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
    groups = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, groups, 2) for x in (key, value))
    scores = params["scale"] * jnp.einsum("btnh,bsnh->bnts", query, key)
    if params["variadic_args"][0]:
        scores += bias.astype(jnp.float32)
    rows = jnp.arange(scores.shape[2])[:, None]
    columns = jnp.arange(scores.shape[3])
    mask = jnp.ones(scores.shape, bool)
    if "CAUSAL" in params["mask_type"].name:
        mask &= columns <= rows
        if params["sliding_window_length"]:
            mask &= columns > rows - params["sliding_window_length"]
    if "PADDING" in params["mask_type"].name:
        mask &= columns < k_len[:, None, None, None]
        mask &= rows < q_len[:, None, None, None]
    scores = jnp.where(mask, scores, -1e9)
    statistics = jax.nn.logsumexp(scores, axis=-1)
    return [
        jnp.einsum("bnts,bsnh->btnh", jnp.exp(scores - statistics[..., None]), value),
        statistics,
    ]


def _fwd_on_cpu(*operands: Any, is_training: bool, **params: Any) -> list[Any]:
    output, statistics = _forward(*operands, **params)
    return [output.astype(operands[0].dtype), statistics][: 1 + is_training]


def _bwd_on_cpu(*operands: Any, **params: Any) -> list[Any]:
    *others, _statistics, _output, gradient = operands
    smooth = others[:4] if params["variadic_args"][1] else others[:3]
    _, pullback = jax.vjp(
        lambda *smooth: _forward(*smooth, *others[len(smooth) :], **params)[0], *smooth
    )
    return list(pullback(gradient.astype(jnp.float32)))


def _register_on_cpu() -> None:
    """Define the calls of cuDNN on the CPU, for this process."""
    array = jax.ShapeDtypeStruct((1, 8, 1, 8), jnp.bfloat16)
    definitions = {"fwd": _fwd_on_cpu, "bwd": _bwd_on_cpu}
    for wrapper in flatten(jax.make_jaxpr(gradients)(array, array, array)).eqns:
        if not wrapper.primitive.name.startswith("dot_product_attention_"):
            continue
        call = partial(wrapper.primitive.impl, **wrapper.params)
        (inner,) = jax.make_jaxpr(call)(*(atom.aval for atom in wrapper.invars)).eqns
        definition = definitions[inner.primitive.name.removeprefix("dot_product_attention_")]
        lowering = mlir.lower_fun(definition, multiple_results=True)
        mlir.register_lowering(inner.primitive, lowering, platform="cpu")


_register_on_cpu()
