"""`check="first step"` raises for plans whose results differ from one device, and no others."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar.lowering import shardwise
from autopar.lowering.compilation import lower_stage
from autopar.testing import assert_allclose
from tests.autopar.test_shardwise import IMAGES, KERNEL, per_example_gradients

RNG = np.random.default_rng(0)
DATA = {
    "x": RNG.standard_normal((16, 8)).astype(np.float32),
    "y": RNG.integers(0, 4, 16).astype(np.int32),
}
ADAM = optax.adam(1e-2)


def state_of(dtype=np.float32):
    """Return a state with a bias before a normalization.

    The gradient of the bias is rounding error, which Adam turns into a step of full size.
    """
    params = {
        "up": jnp.asarray(RNG.standard_normal((8, 16)) / 3, dtype),
        "bias": jnp.zeros(16, dtype),
        "down": jnp.asarray(RNG.standard_normal((16, 4)) / 4, dtype),
    }
    return {
        "params": params,
        "moments": ADAM.init(params),
        "key": jax.random.key(0),
        "step": jnp.int32(0),
    }


def step(state, batch, scale=1.0):
    key, used = jax.random.split(state["key"])

    def loss(params):
        hidden = batch["x"].astype(params["up"].dtype) @ params["up"] + params["bias"]
        centred = hidden - hidden.mean(-1, keepdims=True)
        hidden = jax.nn.relu(centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-3))
        logits = (hidden @ params["down"]).astype(np.float32)
        return scale * jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]))

    value, gradients = autopar.value_and_grad(loss)(state["params"])
    updates, moments = ADAM.update(gradients, state["moments"])
    params = optax.apply_updates(state["params"], updates)
    noise = jax.random.normal(used, (4,))
    return {"params": params, "moments": moments, "key": key, "step": state["step"] + 1}, (
        value,
        noise,
    )


METHODS = {
    "data": autopar.DataParallel(8),
    "zero3, microbatches": autopar.Zero3Parallel(4, num_micro_batches=2),
    "two axes": autopar.ShardParallel((2, 4)),
}


@pytest.mark.parametrize(
    ("method", "dtype"),
    [
        ("two axes", np.float16),
        *(
            pytest.param(method, dtype, marks=pytest.mark.slow)
            for method, dtype in [
                ("data", np.float32),
                ("data", jnp.bfloat16),
                ("two axes", np.float32),
                ("zero3, microbatches", np.float16),
                ("zero3, microbatches", jnp.bfloat16),
            ]
        ),
    ],
)
def test_a_right_plan_passes_and_its_arguments_stay(method, dtype):
    state = state_of(dtype)
    planned = autopar.parallelize(
        step, method=METHODS[method], donate_argnums=0, check="first step"
    )
    first = planned(state, DATA, 2.0)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert_allclose(first[1], jax.jit(step)(state, DATA, 2.0)[1], rtol=0.03, atol=0.03)
    second = planned(first[0], DATA, 2.0)
    assert int(second[0]["step"]) == 2


def test_a_pipeline_passes():
    def deep(params, batch):
        def loss(params):
            hidden = jnp.tanh(batch["x"] @ params["a"])
            autopar.mark_pipeline_boundary()
            return jnp.mean((hidden @ params["b"]) ** 2)

        value, gradients = autopar.value_and_grad(loss)(params)
        return jax.tree.map(jnp.subtract, params, gradients), value

    params = {name: RNG.standard_normal((8, 8)).astype(np.float32) for name in "ab"}
    method = autopar.PipeshardParallel(
        2, num_micro_batches=2, layer_option=autopar.ManualLayerOption()
    )
    planned = autopar.parallelize(deep, method=method, check="first step")
    assert_allclose(planned(params, DATA), jax.jit(deep)(params, DATA))


def test_the_error_names_the_first_value_that_differs_with_its_line(monkeypatch):
    """XLA's partitioner is wrong about convolutions with groups unless they run shardwise."""
    monkeypatch.setattr(shardwise, "runs_on_shards", lambda eqn: False)

    def gradients(w, x):
        return {"norms": jnp.sqrt(jnp.sum(per_example_gradients(w, x) ** 2, (1, 2, 3, 4)))}

    planned = autopar.parallelize(gradients, method=autopar.DataParallel(8), check="first step")
    with pytest.raises(autopar.FirstStepError) as caught:
        planned(KERNEL, IMAGES)
    assert (
        "the first step of gradients gives something else than one device: result/norms is off by"
        in str(caught.value)
    )
    assert re.search(
        r"the first value inside that differs is that of \S+ \(\S+test_\w+\.py:\d+\), float32",
        str(caught.value),
    )
    with pytest.raises(autopar.FirstStepError):  # the check is repeated until it succeeds
        planned(KERNEL, IMAGES)


def test_integers_are_compared_exactly(monkeypatch):
    def wrong(*args):
        (right,) = lower_stage(*args)
        jitted = jax.jit(
            lambda *operands: (right.jitted(*operands)[0] + 1, right.jitted(*operands)[1])
        )
        return [replace(right, jitted=jitted)]

    monkeypatch.setattr("autopar.runtime.tasks.lower_stage", wrong)
    count = lambda n, x: (n + 1000, x.mean())  # noqa: E731
    planned = autopar.parallelize(count, method=autopar.DataParallel(8), check="first step")
    with pytest.raises(
        autopar.FirstStepError,
        match=r"result/0 is off by 1 where its numbers reach 1e\+03\. Another",
    ):
        planned(jnp.int32(1), DATA["x"])


@pytest.mark.parametrize("check", ["first", True, 1, ""])
def test_other_checks_are_refused(check):
    with pytest.raises(ValueError, match="expected None or 'first step'"):
        autopar.parallelize(step, check=check)


def test_the_first_step_of_every_executable_is_checked():
    options = autopar.ShardingOptions(pins={"0": P("x")})
    planned = autopar.parallelize(
        jnp.sin, method=autopar.ShardParallel(8, options=options), check="first step"
    )
    for rows in 8, 16:
        executable = planned.get_executable(jnp.ones(rows))
        assert executable in planned._unchecked
        assert_allclose(planned(jnp.ones(rows)), jnp.sin(jnp.ones(rows)))
        assert executable not in planned._unchecked
