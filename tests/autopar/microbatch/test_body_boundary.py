"""Rows per example and metrics in microbatches equal the results of the whole batch."""

from dataclasses import fields

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import autopar
from autopar.ir.graph import aval_of
from autopar.microbatch.batch_rows import cut_rows, put_rows, take_rows
from autopar.pipeline.stage_options import ManualStageOption
from autopar.sharding.options import DATA_PARALLEL
from autopar.testing import assert_allclose
from autopar.tracing.trace import trace
from tests.tiers import fast

RNG = np.random.default_rng(0)
PARAMS = [RNG.standard_normal((6, n)).astype(np.float32) for n in (6, 6, 4)]
BATCH = {
    "x": RNG.standard_normal((16, 6)).astype(np.float32),
    "label": RNG.integers(0, 4, 16),
    "mask": RNG.integers(0, 2, 16).astype(np.float32),
}
LAYERS = autopar.AutoLayerOption(2)
IN_PARTS = {field.name: getattr(DATA_PARALLEL, field.name) for field in fields(DATA_PARALLEL)}
IN_PARTS = {name: IN_PARTS[name] for name in ("data_parallel", "parameters", "optimizer_state")}
SHARDED = {
    "shards": autopar.ShardParallel((2, 4), 4),
    "local accumulation": autopar.DataParallel(4, 4),
    "ZeRO-3": autopar.Zero3Parallel(4, 2),
}
PIPELINES = {
    "pipeline": autopar.PipeshardParallel(2, 4, layer_option=LAYERS),
    "pipeline with local accumulation": autopar.PipeshardParallel(
        8,
        2,
        layer_option=LAYERS,
        stage_option=ManualStageOption(
            [[0], [1]], [(1, 4), (1, 4)], [(4, 1), (4, 1)], [{}, IN_PARTS]
        ),
    ),
    "one microbatch": autopar.PipeshardParallel(2, 1, layer_option=LAYERS),
}


def logits_of(params, x):
    for weights in params[:-1]:
        x = jnp.tanh(x @ weights)
    return x @ params[-1]


def cross_entropy(logits, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)[:, 0]


def metrics(logits, batch):
    """Return metrics that are sums or means, that need all rows, and rows themselves."""
    right = logits.argmax(-1) == batch["label"]
    best = jax.lax.top_k(logits, 2)[1] == batch["label"][:, None]
    return {
        "accuracy": right.mean(),
        "among two": best.any(-1).mean(),
        "confusion": jnp.zeros((4, 4)).at[batch["label"], logits.argmax(-1)].add(1),
        "masked": (right * batch["mask"]).sum() / jnp.maximum(batch["mask"].sum(), 1),
        "sorted": jnp.sort(logits[:, 0] * batch["mask"]),
        "deviation": jnp.std(logits, axis=0),
        "largest input": batch["x"].max(0),
        "transposed": logits.T,
        "share": jax.nn.softmax(logits) / len(logits),
        "examples": len(logits),
    }


def step_of(value_and_grad):
    def step(params, batch):
        def loss(p):
            logits = logits_of(p, batch["x"])
            return cross_entropy(logits, batch["label"]).mean(), logits

        (value, logits), gradients = value_and_grad(loss, has_aux=True)(params)
        updated = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
        return updated, value, logits, metrics(logits, batch)

    return step


METHODS = SHARDED | PIPELINES


@pytest.mark.parametrize(
    "name", fast(METHODS, ["local accumulation", "pipeline with local accumulation"])
)
def test_logits_and_metrics_computed_from_them_equal_one_device(name):
    step = step_of(autopar.value_and_grad)
    planned = autopar.parallelize(step, method=METHODS[name])
    assert_allclose(planned(PARAMS, BATCH), jax.jit(step)(PARAMS, BATCH), rtol=1e-4, atol=1e-5)
    if "local" in name:
        assert any(stage.deferred for stage in planned.get_last_executable().plan.stages)


@pytest.mark.parametrize("method", SHARDED.values(), ids=SHARDED.keys())
def test_gradients_of_jax_equal_those_of_autopar_in_value_and_plan(method):
    planned = [
        autopar.parallelize(step_of(f), method=method)
        for f in (jax.value_and_grad, autopar.value_and_grad)
    ]
    results = [step(PARAMS, BATCH) for step in planned]
    assert_allclose(*results)
    plans = [step.get_last_executable().plan for step in planned]
    assert plans[0].fingerprint == plans[1].fingerprint
    assert plans[0].stages == plans[1].stages


def test_an_optimizer_of_nnx_needs_no_change_of_the_step():
    graph, state = nnx.split(nnx.Linear(6, 4, rngs=nnx.Rngs(0)))

    def step(state, batch):
        model = nnx.merge(graph, state)
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

        def loss(model):
            logits = model(batch["x"])
            return cross_entropy(logits, batch["label"]).mean(), logits

        (value, logits), gradients = nnx.value_and_grad(loss, has_aux=True)(model)
        optimizer.update(model, gradients)
        return nnx.state(model), value, (logits.argmax(-1) == batch["label"]).mean()

    planned = autopar.parallelize(step, method=autopar.ShardParallel((2, 4), 4))
    expected = jax.jit(step)(state, BATCH)
    assert_allclose(planned(state, BATCH), expected, rtol=1e-5, atol=1e-6)


def test_what_sums_over_the_examples_is_summed_per_microbatch():
    """Only metrics that need the rows keep them."""

    def step(params, batch):
        def loss(p):
            logits = logits_of(p, batch["x"])
            return cross_entropy(logits, batch["label"]).mean(), logits

        (value, logits), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        return gradients, value, (logits.argmax(-1) == batch["label"]).mean()

    graph = trace(step, (PARAMS, BATCH), (1,), num_micro_batches=4)
    assert graph.microbatching is not None
    assert "rows" not in graph.microbatching.combine


def test_two_gradients_at_the_same_parameters_are_both_accumulated():
    def step(params, batch):
        first = jax.grad(lambda p: (logits_of(p, batch["x"]) ** 2).mean())(params)
        second = jax.grad(lambda p: jnp.sin(logits_of(p, batch["x"])).sum())(params)
        return jax.tree.map(lambda p, a, b: p - 0.1 * a - 0.01 * b, params, first, second)

    planned = autopar.parallelize(step, method=autopar.DataParallel(2, 4))
    assert_allclose(planned(PARAMS, BATCH), jax.jit(step)(PARAMS, BATCH), rtol=1e-4, atol=1e-5)


def test_gradients_of_single_examples_are_clipped_one_by_one():
    def step(params, batch):
        def gradient(x):
            return jax.grad(lambda p: (logits_of(p, x) ** 2).mean())(params)

        each = jax.vmap(gradient)(batch["x"])
        norms = jax.vmap(optax.tree.norm)(each)
        scale = jnp.minimum(1, 0.1 / norms)
        mean = jax.tree.map(lambda g: jnp.einsum("n,n...->...", scale, g) / len(norms), each)
        return jax.tree.map(lambda p, g: p - g, params, mean), norms

    planned = autopar.parallelize(step, method=autopar.DataParallel(2, 4))
    assert_allclose(planned(PARAMS, BATCH), jax.jit(step)(PARAMS, BATCH), rtol=1e-4, atol=1e-5)


def test_a_loss_at_parameters_that_another_gradient_has_updated_takes_another_pass():
    def step(params, batch):
        def loss(p):
            return (logits_of(p, batch["x"]) ** 2).mean()

        inner = jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))
        return jax.grad(loss)(inner)

    planned = autopar.parallelize(step, method=autopar.DataParallel(2, 4))
    assert_allclose(planned(PARAMS, BATCH), jax.jit(step)(PARAMS, BATCH), rtol=1e-4, atol=1e-5)
    first = trace(step, (PARAMS, BATCH), (1,), num_micro_batches=4).first_pass
    assert first is not None
    assert {aval_of(out).shape for out in first.step.jaxpr.outvars} == {
        array.shape for array in jax.tree.leaves(PARAMS)
    }


@settings(max_examples=20, deadline=None)
@given(
    dim=st.integers(0, 2),
    count=st.sampled_from([2, 3, 4]),
    chunks=st.sampled_from([1, 2, 3]),
    run=st.integers(1, 3),
)
def test_rows_are_put_where_they_were_before_the_batch_was_cut(dim, count, chunks, run):
    rows = count * chunks * run
    batch = np.arange(rows * 6, dtype=np.int32).reshape(rows, 2, 3)
    whole = jnp.zeros(np.moveaxis(batch, 0, dim).shape, batch.dtype)
    for number, part in enumerate(cut_rows(batch, count, chunks)):
        whole = put_rows(whole, jnp.moveaxis(part, 0, dim), jnp.int32(number), count, chunks)
    np.testing.assert_array_equal(whole, np.moveaxis(batch, 0, dim))


@pytest.mark.parametrize("chunks", [2, 6])
def test_rows_of_a_microbatch_are_those_of_the_cut_batch(chunks):
    batch = np.arange(24 * 2).reshape(24, 2)
    taken = jax.lax.map(lambda number: take_rows(batch, number, 4, chunks), jnp.arange(4))
    np.testing.assert_array_equal(taken, cut_rows(batch, 4, chunks))
