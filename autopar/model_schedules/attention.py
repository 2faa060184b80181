"""Attention block by block, in plain JAX: runs on shards, compiles for any device, and its memory grows with the length, not its square.

The algorithm is FlashAttention's (Dao et al., arXiv 2205.14135): softmax by running maxima and sums (equations in section 3.1), weights
computed again from the logarithm of their sum in the backward pass. A kernel for the devices at hand is faster; it takes the same place.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

BLOCK = 512
"""Keys that are attended to at a time."""


def attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Attention as models that call JAX's write it."""
    return jax.nn.dot_product_attention(query, key, value)


def causal_attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """The same where a position attends to itself and those before it."""
    return jax.nn.dot_product_attention(query, key, value, is_causal=True)


def flash_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, causal: bool = False, block: int = BLOCK
) -> jax.Array:
    """Softmax attention, scaled by the square root of the features, without its scores ever being there as a whole.

    Args:
        query, key, value: (batch, length, heads, features).
        causal: a position attends to itself and those before it.
        block: keys at a time; the largest divisor of the length up to it is taken.
    """
    length = key.shape[1]
    size = next(size for size in range(min(block, length), 0, -1) if length % size == 0)
    return _attention(query, key, value, causal, size)


def causal_flash_attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """The same where a position attends to itself and those before it."""
    return flash_attention(query, key, value, causal=True)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _attention(
    query: jax.Array, key: jax.Array, value: jax.Array, causal: bool, size: int
) -> jax.Array:
    return _forward(query, key, value, causal, size)[0]


type _Running = tuple[jax.Array, jax.Array, jax.Array]
"""Of the keys so far: weighted values, the largest score, and the sum of the weights, relative to the largest."""


def _forward(
    query: jax.Array, key: jax.Array, value: jax.Array, causal: bool, size: int
) -> tuple[jax.Array, Any]:
    def attend(keys: jax.Array, values: jax.Array, start: jax.Array) -> _Running:
        scores = _scores(query, keys, start, causal)
        top = scores.max(-1, keepdims=True)
        weights = jnp.exp(scores - top)
        mixed = jnp.einsum("bhqk,bkhd->bhqd", weights.astype(values.dtype), values)
        return mixed.astype(jnp.float32), top, weights.sum(-1, keepdims=True)

    def merge(left: _Running, right: _Running) -> _Running:
        top = jnp.maximum(left[1], right[1])
        scales = jnp.exp(left[1] - top), jnp.exp(right[1] - top)
        mixed, total = (left[k] * scales[0] + right[k] * scales[1] for k in (0, 2))
        return mixed, top, total

    blocks = _blocks(size, key, value)
    state, rest = attend(*(each[0] for each in blocks)), tuple(each[1:] for each in blocks)
    (mixed, top, total), _ = lax.scan(
        lambda state, block: (merge(state, attend(*block)), None), state, rest
    )
    result = jnp.moveaxis(mixed / total, 1, 2).astype(query.dtype)
    return result, (query, key, value, result, top + jnp.log(total))


def _backward(
    causal: bool, size: int, kept: Any, cotangent: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    query, key, value, result, log_total = kept
    scale = query.shape[-1] ** -0.5
    inner = jnp.einsum("bqhd,bqhd->bhq", cotangent, result, preferred_element_type=jnp.float32)[
        ..., None
    ]

    def step(of_query: jax.Array, block: Any) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        keys, values, start = block
        weights = jnp.exp(_scores(query, keys, start, causal) - log_total)
        of_value = jnp.einsum("bhqk,bqhd->bkhd", weights.astype(cotangent.dtype), cotangent)
        of_weights = jnp.einsum(
            "bqhd,bkhd->bhqk", cotangent, values, preferred_element_type=jnp.float32
        )
        of_scores = (weights * (of_weights - inner) * scale).astype(query.dtype)
        of_query += jnp.einsum(
            "bhqk,bkhd->bqhd", of_scores, keys, preferred_element_type=jnp.float32
        )
        return of_query, (jnp.einsum("bhqk,bqhd->bkhd", of_scores, query), of_value)

    of_query, parts = lax.scan(step, jnp.zeros_like(query, jnp.float32), _blocks(size, key, value))
    of_key, of_value = (jnp.moveaxis(part, 0, 1).reshape(key.shape) for part in parts)
    return of_query.astype(query.dtype), of_key.astype(key.dtype), of_value.astype(value.dtype)


_attention.defvjp(_forward, _backward)


def _scores(query: jax.Array, keys: jax.Array, start: jax.Array, causal: bool) -> jax.Array:
    """(batch, heads, queries, keys of a block), in float32."""
    scores = (
        jnp.einsum("bqhd,bkhd->bhqk", query, keys, preferred_element_type=jnp.float32)
        * query.shape[-1] ** -0.5
    )
    if not causal:
        return scores
    visible = jnp.arange(query.shape[1])[:, None] >= start + jnp.arange(keys.shape[1])
    return jnp.where(visible, scores, jnp.finfo(jnp.float32).min)


def _blocks(size: int, key: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Keys and values as (blocks, batch, size, heads, features), and where each block starts."""
    batch, length, *rest = key.shape
    keys, values = (
        jnp.moveaxis(each.reshape(batch, length // size, size, *rest), 1, 0)
        for each in (key, value)
    )
    return keys, values, jnp.arange(0, length, size)
