"""Random steps with statistics of each microbatch equal a loop over microbatches on one device."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.testing import assert_allclose
from tests.autopar.microbatch.test_own_statistics import (
    ARGS,
    METHODS,
    loop_of,
    parallelized,
    per_example,
    step_of,
)

pytestmark = pytest.mark.fuzz

STATISTICS = {
    "mean": lambda x: x.mean(0),
    "variance": lambda x: x.var(0),
    "unbiased variance": lambda x: x.var(0, ddof=1),
    "square root by hand": lambda x: jnp.sqrt((x * x).sum(0) / (len(x) - 1)),
    "fast variance": lambda x: jnp.maximum((x * x).mean(0) - x.mean(0) ** 2, 0),
    "second moment": lambda x: x.T @ x / len(x),
    "largest": lambda x: jnp.abs(x).max(0),
    "of all": lambda x: jnp.sqrt(jnp.mean(x**2) + 1e-3),
    "logarithm of a mean": lambda x: jnp.log(jnp.exp(x).mean(0)),
    "ratio of sums": lambda x: (x**3).sum(0) / (x**2 + 1).sum(0),
}
USES = {
    "subtracted": lambda x, s: x - s,
    "divided by": lambda x, s: x / (1 + s**2),
    "whitened": lambda x, s: x * jax.lax.rsqrt(s**2 + 0.1),
    "gated": lambda x, s: jnp.where(x > s, x, 0.1 * x),
    "in a function of the rows": lambda x, s: jnp.tanh(x * s),
    "repeated": lambda x, s: jnp.sin(jnp.broadcast_to(s, x.shape)) + x,
}
TERMS = {
    "square of a mean": lambda x: (x.mean(0) ** 2).sum(),
    "entropy": lambda x: -(jax.nn.softmax(x).mean(0) * jnp.log(jax.nn.softmax(x).mean(0))).sum(),
    "covariance": lambda x: jnp.linalg.norm(x.T @ x / len(x)),
    "root of a mean": lambda x: jnp.sqrt(jnp.mean(x**2) + 1e-3),
}


@settings(max_examples=300)
@given(
    layers=st.lists(
        st.tuples(st.sampled_from(sorted(STATISTICS)), st.sampled_from(sorted(USES))),
        min_size=1,
        max_size=3,
    ),
    term=st.sampled_from([None, *sorted(TERMS)]),
    checkpoint=st.booleans(),
    method=st.sampled_from(sorted(METHODS)),
)
def test_random_steps_equal_a_loop(layers, term, checkpoint, method):
    """The loss is a mean over the examples and such a term, or a sum over the examples."""

    def loss(params, state, batch):
        def apply(params, x):
            new = []
            for k, (statistic, use) in enumerate(layers):
                x = jnp.tanh(x @ params["first" if k == 0 else "second"])
                value = STATISTICS[statistic](x)
                value = value.mean(0) if value.ndim == 2 else value
                x = USES[use](x, value) * params["scale"]
                new.append(0.9 * state["mean"] + 0.1 * value)
            return x, new

        apply = jax.checkpoint(apply) if checkpoint else apply
        x, new = apply(params, batch["x"])
        losses = per_example(x @ params["last"], batch["label"])
        return (losses.mean() + TERMS[term](x) if term else losses.sum()), new

    step = parallelized(step_of(loss), METHODS[method])
    expected = jax.jit(loop_of(loss, sums=term is None))
    assert_allclose(step(*ARGS), expected(*ARGS), rtol=1e-4, atol=1e-5)
