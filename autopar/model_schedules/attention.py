"""FlashAttention in plain JAX: runs on shards and compiles for any device.

Its memory grows with the length, not with its square. The algorithm is that of Dao et al. (arXiv
2205.14135): softmax by running maxima and sums (equations in section 3.1), and recomputation of the
weights from the logarithm of their sum in the backward pass. A kernel written for a device is
faster; a schedule can use one instead.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

BLOCK = 512
"""The number of keys in a block."""


def attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Return JAX's softmax attention, as many models call it.

    Query, key, value and result have shape (batch, length, heads, features).
    """
    return jax.nn.dot_product_attention(query, key, value)


def causal_attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Return `attention` in which a position attends to itself and earlier positions."""
    return jax.nn.dot_product_attention(query, key, value, is_causal=True)


def flash_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, causal: bool = False, block: int = BLOCK
) -> jax.Array:
    """Return softmax attention, with scores that exist for one block of keys at a time.

    Scores are divided by the square root of the number of features. Query, key, value and result
    have shape (batch, length, heads, features).

    Args:
        query: the queries.
        key: the keys.
        value: the values.
        causal: whether a position attends only to itself and earlier positions.
        block: the largest number of keys in a block. The number used divides the length.
    """
    length = key.shape[1]
    size = next(size for size in range(min(block, length), 0, -1) if length % size == 0)
    return _attention(query, key, value, causal, size)


def causal_flash_attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Return `flash_attention` in which a position attends to itself and earlier positions."""
    return flash_attention(query, key, value, causal=True)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _attention(
    query: jax.Array, key: jax.Array, value: jax.Array, causal: bool, size: int
) -> jax.Array:
    return _forward(query, key, value, causal, size)[0]


type _Running = tuple[jax.Array, jax.Array, jax.Array]
"""The softmax of the blocks so far: weighted values, largest score, and sum of the weights. Weights
are relative to the largest score."""


def _forward(
    query: jax.Array, key: jax.Array, value: jax.Array, causal: bool, size: int
) -> tuple[jax.Array, Any]:
    """Return attention over blocks of keys, and what the backward pass needs of it."""

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
    first = attend(*(array[0] for array in blocks))
    rest = tuple(array[1:] for array in blocks)
    (mixed, top, total), _ = lax.scan(
        lambda running, block: (merge(running, attend(*block)), None), first, rest
    )
    result = jnp.moveaxis(mixed / total, 1, 2).astype(query.dtype)
    return result, (query, key, value, result, top + jnp.log(total))


def _backward(
    causal: bool, size: int, residuals: Any, cotangent: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients of query, key and value; each block computes its weights again."""
    query, key, value, result, log_total = residuals
    scale = query.shape[-1] ** -0.5
    inner = jnp.einsum("bqhd,bqhd->bhq", cotangent, result, preferred_element_type=jnp.float32)[
        ..., None
    ]

    def step(d_query: jax.Array, block: Any) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        keys, values, start = block
        weights = jnp.exp(_scores(query, keys, start, causal) - log_total)
        d_values = jnp.einsum("bhqk,bqhd->bkhd", weights.astype(cotangent.dtype), cotangent)
        d_weights = jnp.einsum(
            "bqhd,bkhd->bhqk", cotangent, values, preferred_element_type=jnp.float32
        )
        d_scores = (weights * (d_weights - inner) * scale).astype(query.dtype)
        d_query += jnp.einsum("bhqk,bkhd->bqhd", d_scores, keys, preferred_element_type=jnp.float32)
        d_keys = jnp.einsum("bhqk,bqhd->bkhd", d_scores, query)
        return d_query, (d_keys, d_values)

    d_query, blocks = lax.scan(step, jnp.zeros_like(query, jnp.float32), _blocks(size, key, value))
    d_key, d_value = (jnp.moveaxis(block, 0, 1).reshape(key.shape) for block in blocks)
    return d_query.astype(query.dtype), d_key.astype(key.dtype), d_value.astype(value.dtype)


_attention.defvjp(_forward, _backward)


def _scores(query: jax.Array, keys: jax.Array, start: jax.Array, causal: bool) -> jax.Array:
    """Return the scores of a block of keys, (batch, heads, queries, keys), in float32."""
    scores = (
        jnp.einsum("bqhd,bkhd->bhqk", query, keys, preferred_element_type=jnp.float32)
        * query.shape[-1] ** -0.5
    )
    if not causal:
        return scores
    visible = jnp.arange(query.shape[1])[:, None] >= start + jnp.arange(keys.shape[1])
    return jnp.where(visible, scores, jnp.finfo(jnp.float32).min)


def _blocks(size: int, key: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return keys and values as (blocks, batch, size, heads, features), and the block starts."""
    batch, length, *rest = key.shape
    keys, values = (
        jnp.moveaxis(array.reshape(batch, length // size, size, *rest), 1, 0)
        for array in (key, value)
    )
    return keys, values, jnp.arange(0, length, size)
