"""A maximum over a split dim is an all_reduce of the maxima of the parts."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.directives import DirectiveError, ModelSchedule, build, create_schedule
from autopar.testing import assert_allclose


def row_maximum(params: Any, x: jax.Array) -> jax.Array:
    """Return the tanh of the maximum of each row."""
    with jax.named_scope("features"):
        x = x * params["scale"]
    with jax.named_scope("top"):
        return jnp.tanh(x.max(-1))


def scheduled(x: Any) -> ModelSchedule:
    sch = create_schedule(row_maximum, {"scale": jnp.ones(8)}, [x], mesh=4)
    sch.shard("scale", axis=0)
    return sch


@cache
def gradients(on_shards: bool) -> Any:
    """Return a jitted function of values and gradients, on shards or on one device."""
    sch = scheduled(jnp.ones((2, 8)))
    sch["top"].sync("fwd_post", "all_reduce")
    apply = build(sch).apply if on_shards else row_maximum
    return jax.jit(jax.value_and_grad(lambda params, x: apply(params, x).sum(), (0, 1)))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.permutations(range(8)), min_size=2, max_size=2))
def test_a_maximum_over_shards_has_the_value_and_gradient_of_one_device(
    rows: list[list[int]],
) -> None:
    args = {"scale": jnp.ones(8)}, np.array(rows, np.float32) / 8
    assert_allclose(jax.block_until_ready(gradients(True)(*args)), gradients(False)(*args))


def test_devices_with_equal_maxima_share_the_gradient_equally() -> None:
    sch = scheduled(jnp.ones((1, 8)))
    sch["top"].sync("fwd_post", "all_reduce")
    gradient = jax.grad(lambda x: build(sch).apply({"scale": jnp.ones(8)}, x).sum())(
        jnp.ones((1, 8))
    )
    np.testing.assert_allclose(gradient, np.full((1, 8), (1 - np.tanh(1.0) ** 2) / 8), rtol=1e-5)


@pytest.mark.parametrize("op", [None, "all_gather", "reduce_scatter"])
def test_a_maximum_over_a_split_dim_without_all_reduce_is_refused(op: str | None) -> None:
    sch = scheduled(jnp.ones((4, 8)))
    if op is not None:
        sch["top"].sync("fwd_post", op, axis=0)
    with pytest.raises(
        DirectiveError, match=r"top/reduce_max is a partial maximum over 'x' and goes into top/tanh"
    ):
        build(sch)
