"""Blockwise attention equals the textbook formula without storing all scores."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar.model_schedules.attention import attention, causal_attention, flash_attention
from autopar.testing import assert_allclose


@pytest.mark.parametrize(
    ("length", "block", "causal"), [(12, 4, False), (12, 5, True), (1, 8, True)]
)
def test_blockwise_attention_equals_softmax_attention_forward_and_backward(
    length: int, block: int, causal: bool
) -> None:
    inputs = tuple(3 * jax.random.normal(jax.random.key(0), (3, 2, length, 3, 4)))
    plain = causal_attention if causal else attention

    def gradients(attend: Any) -> Any:
        return jax.jit(
            jax.value_and_grad(lambda *args: jnp.sum(jnp.sin(attend(*args))), (0, 1, 2))
        )(*inputs)

    actual = gradients(lambda *args: flash_attention(*args, causal, block))
    assert_allclose(actual, gradients(plain), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("causal", [False, True])
def test_no_array_has_the_scores_of_all_pairs(causal: bool) -> None:
    """No array has the shape (batch, heads, length, length), forward or backward."""
    x = jax.ShapeDtypeStruct((1, 64, 2, 8), jnp.float32)
    jaxpr = jax.make_jaxpr(jax.grad(lambda *a: flash_attention(*a, causal, 16).sum(), (0, 1, 2)))(
        x, x, x
    )
    assert "64,64" not in str(jaxpr)
    assert "64,16" in str(jaxpr)


def test_results_have_the_dtype_of_the_inputs() -> None:
    x = jnp.ones((1, 4, 2, 8), jnp.bfloat16)
    value, gradient = jax.value_and_grad(
        lambda x: flash_attention(x, x, x).astype(jnp.float32).sum()
    )(x)
    assert flash_attention(x, x, x).dtype == gradient.dtype == jnp.bfloat16
    assert float(value) == x.size
