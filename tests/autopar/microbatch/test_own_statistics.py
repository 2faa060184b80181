"""Microbatches with statistics of their own equal a loop over microbatches on one device."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import autopar
from autopar.ir.step_graph import Exactness
from autopar.planning.method_planning import trace_for
from autopar.testing import assert_allclose
from autopar.tracing.step_traces import TraceOptions
from autopar.tracing.trace import trace
from tests.autopar.microbatch.batch_losses import FITTING, REPAIRED
from tests.autopar.microbatch.batch_losses import step_of as simple_step
from tests.tiers import slow

RNG = np.random.default_rng(0)
COUNT = 4
OWN = Exactness(batch_statistics="microbatch")


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


PARAMS = {
    "first": 0.4 * normal(6, 8),
    "second": 0.4 * normal(8, 8),
    "last": 0.4 * normal(8, 3),
    "scale": 1 + 0.1 * normal(8),
}
STATE = {"mean": 0.1 * normal(8), "var": 1 + 0.1 * normal(8) ** 2}
BATCH = {
    "x": normal(16, 6),
    "label": RNG.integers(0, 3, 16),
    "mask": RNG.integers(0, 2, 16).astype(np.float32),
}
ARGS = PARAMS, STATE, BATCH


def normalized(params, state, x, fast):
    """Return normalized rows and running averages; `fast` takes a biased variance of two means."""
    mean = x.mean(0)
    var = (x * x).mean(0) - mean * mean if fast else x.var(0, ddof=1)
    rows = (x - mean) * jax.lax.rsqrt(var + 1e-3) * params["scale"]
    new = {
        "mean": 0.9 * state["mean"] + 0.1 * mean,
        "var": 0.9 * state["var"] + 0.1 * var,
    }
    return rows, new


def network(params, state, x):
    hidden, new = normalized(params, state, x @ params["first"], fast=True)
    hidden, _ = normalized(params, state, jnp.tanh(hidden) @ params["second"], fast=False)
    return jnp.maximum(hidden, 0) @ params["last"], new


def per_example(logits, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)[:, 0]


def mean_loss(params, state, batch):
    logits, new = network(params, state, batch["x"])
    return per_example(logits, batch["label"]).mean(), new


def summed_loss(params, state, batch):
    logits, new = network(params, state, batch["x"])
    return per_example(logits, batch["label"]).sum(), new


def loss_with_auxiliary_terms(params, state, batch):
    """Load balancing, a largest logit and a covariance, nonlinear in statistics of the batch."""
    logits, new = network(params, state, batch["x"])
    gates = jax.nn.softmax(logits)
    load = jax.nn.one_hot(gates.argmax(1), 3).mean(0)
    balance = 3 * (load * gates.mean(0)).sum() + 0.1 * logits.max()
    covariance = logits.T @ logits / (len(logits) - 1)
    return per_example(logits, batch["label"]).mean() + balance + 0.1 * (covariance**2).sum(), new


def step_of(loss):
    """Return a step with metrics and an update that are nonlinear in the loss and the gradients."""

    def step(params, state, batch):
        (value, new), gradients = jax.value_and_grad(loss, has_aux=True)(params, state, batch)
        return *updated(params, value, gradients), new

    return step


def updated(params, value, gradients):
    norm = optax.tree.norm(gradients)
    return jax.tree.map(lambda p, g: p - 0.1 * g / norm, params, gradients), value, jnp.exp(value)


def loop_of(loss, count=COUNT, sums=False):
    """Return the same step as a loop; the loss is a sum over the microbatches or their mean."""

    def step(params, state, batch):
        parts = [
            jax.value_and_grad(loss, has_aux=True)(
                params, state, {name: array[k::count] for name, array in batch.items()}
            )
            for k in range(count)
        ]
        (value, new), gradients = jax.tree.map(lambda *parts: sum(parts) / count, *parts)
        if sums:
            value, gradients = jax.tree.map(lambda mean: mean * count, (value, gradients))
        return *updated(params, value, gradients), new

    return step


def pipeline(schedule):
    layers = autopar.AutoLayerOption(2)
    return autopar.PipeshardParallel(4, COUNT, layer_option=layers, pipeline_schedule=schedule)


METHODS = {
    "shards": autopar.ShardParallel((2, 2), COUNT),
    "data parallel": autopar.DataParallel(4, COUNT),
    "ZeRO-3": autopar.Zero3Parallel(2, COUNT),
    **{name: pipeline(name) for name in ("gpipe", "1f1b", "zero_bubble_h1")},
}
METHODS = {name: replace(method, batch_statistics="microbatch") for name, method in METHODS.items()}
LOSSES = {"mean": mean_loss, "sum": summed_loss, "auxiliary": loss_with_auxiliary_terms}
FAST = {("data parallel", "auxiliary"), ("1f1b", "auxiliary")}


def parallelized(step, method):
    return autopar.parallelize(step, method=method, batch_argnums=(2,), donate_argnums=())


@pytest.mark.parametrize(
    ("method", "loss"),
    [
        (method, loss)
        if (method, loss) in FAST
        else pytest.param(method, loss, marks=pytest.mark.slow)
        for method in METHODS
        for loss in LOSSES
    ],
)
def test_value_gradient_and_running_averages_equal_a_loop_on_one_device(method, loss):
    step = parallelized(step_of(LOSSES[loss]), METHODS[method])
    expected = jax.jit(loop_of(LOSSES[loss], sums=loss == "sum"))
    assert_allclose(step(*ARGS), expected(*ARGS), rtol=1e-5, atol=1e-6)
    plan = step.get_last_executable().plan
    assert plan.batch_statistics == "microbatch"
    assert not any(stage.deferred for stage in plan.stages)


def test_the_plan_keeps_the_choice_and_names_the_lines(tmp_path):
    method = METHODS["shards"]
    plan = autopar.plan_step(
        step_of(mean_loss), ARGS, batch_argnums=(2,), method=method, cluster="dgx_a100_80"
    )
    (warning,) = (text for text in plan.warnings if "batch_statistics" in text)
    first = normalized.__code__.co_firstlineno
    assert f"{__file__}:{first + 3}, {__file__}:{first + 4}" in warning
    plan.save(tmp_path / "plan.json")
    again = autopar.Plan.load(tmp_path / "plan.json")
    assert again.exactness == OWN
    graph = trace_for(again, step_of(mean_loss), ARGS, (2,))
    assert graph.fingerprint == plan.fingerprint


def test_a_first_step_that_differs_by_choice_is_not_checked():
    step = autopar.parallelize(
        step_of(mean_loss), method=METHODS["shards"], batch_argnums=(2,), check="first step"
    )
    with pytest.raises(
        ValueError, match="by batch_statistics='microbatch' the microbatches differ"
    ):
        step(*ARGS)


def test_by_default_a_refusal_names_the_choice():
    words = rf"{__file__}:\d+.* or use batch_statistics='microbatch' in the method"
    with pytest.raises(autopar.MicrobatchError, match=words):
        trace(step_of(mean_loss), ARGS, (2,), COUNT)


@pytest.mark.parametrize("loss", [*FITTING.values(), *REPAIRED.values()])
def test_what_is_exact_without_the_choice_is_exact_with_it(loss):
    args = ({"w": PARAMS["last"][:6], "b": PARAMS["last"][0]}, BATCH | {"y": BATCH["label"]})
    graph = trace(simple_step(loss), args, (1,), 2, TraceOptions(exactness=OWN))
    assert graph.microbatching is not None
    assert graph.microbatching.own_statistics == ()


def test_a_masked_mean_of_normalized_rows_is_divided_by_the_weight_of_the_whole_batch():
    """The weights depend on the batch alone. A loop has to know their sum to give this result."""

    def loss(params, state, batch, weight=None):
        logits, new = network(params, state, batch["x"])
        total = (per_example(logits, batch["label"]) * batch["mask"]).sum()
        weight = jnp.maximum(batch["mask"].sum(), 1) if weight is None else weight / COUNT
        return total / weight, new

    def expected(params, state, batch):
        weight = batch["mask"].sum()
        return loop_of(lambda p, s, b: loss(p, s, b, weight))(params, state, batch)

    step = parallelized(step_of(loss), METHODS["shards"])
    assert_allclose(step(*ARGS), jax.jit(expected)(*ARGS), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", ["shards", "1f1b"])
def test_a_step_that_is_exact_without_the_choice_stays_so(method):
    """Weights of classes and standardized targets are prepared, and no model is normalized."""

    def loss(params, state, batch):
        logits = jnp.tanh(batch["x"] @ params["first"]) @ params["last"]
        weights = 1 / (1 + jnp.bincount(batch["label"], length=3))
        target = (batch["mask"] - batch["mask"].mean()) / batch["mask"].std()
        losses = weights[batch["label"]] * per_example(logits, batch["label"])
        return losses.sum() + (target * logits[:, 0]).mean() + (logits**2).mean(), state

    parallel = parallelized(step_of(loss), METHODS[method])
    assert_allclose(parallel(*ARGS), jax.jit(step_of(loss))(*ARGS), rtol=1e-5, atol=1e-6)


def test_weights_that_rows_are_normalized_with_are_those_of_the_microbatch_everywhere():
    """A statistic has one meaning in a step: what the loss divides by is not completed either."""

    def loss(params, state, batch):
        x = batch["x"] @ params["first"]
        weight = jnp.maximum(batch["mask"].sum(), 1) + 0.5
        mean = (x * batch["mask"][:, None]).sum(0) / weight
        hidden = jnp.tanh(jnp.tanh(x - mean) @ params["second"])
        return (hidden.sum(1) * batch["mask"]).sum() / weight, state

    step = parallelized(step_of(loss), METHODS["shards"])
    assert_allclose(step(*ARGS), jax.jit(loop_of(loss))(*ARGS), rtol=1e-5, atol=1e-6)


def test_statistics_of_inputs_are_those_of_the_microbatch_when_inputs_are_differentiated():
    """A whole statistic would need a gradient from all microbatches."""

    def loss(x, params, batch):
        weight = (x**2).mean()
        hidden = x @ params["first"]
        hidden = jnp.tanh(jnp.tanh(hidden - hidden.mean(0)) @ params["second"])
        return hidden.mean() / weight + weight**2

    def step(params, state, batch):
        (value, gradient) = jax.value_and_grad(loss)(batch["x"], params, batch)
        return value, gradient

    def expected(params, state, batch):
        parts = [
            step(params, state, {name: array[k::COUNT] for name, array in batch.items()})
            for k in range(COUNT)
        ]
        value = sum(value for value, _ in parts) / COUNT
        return value, jnp.stack([g for _, g in parts], 1).reshape(16, 6) / COUNT

    parallel = parallelized(step, METHODS["shards"])
    assert_allclose(parallel(*ARGS), jax.jit(expected)(*ARGS), rtol=1e-5, atol=1e-6)


def test_a_truth_value_of_a_statistic_is_refused_as_a_result():
    def loss(params, state, batch):
        hidden, _ = normalized(params, state, batch["x"] @ params["first"], fast=True)
        hidden, _ = normalized(params, state, hidden @ params["second"], fast=True)
        return ((hidden @ params["last"]) ** 3).mean(), hidden.max() > 1

    with pytest.raises(
        autopar.MicrobatchError, match="becomes an array of bool, which has no mean"
    ):
        trace(step_of(loss), ARGS, (2,), COUNT, TraceOptions(exactness=OWN))


def test_three_dimensional_parallelism_without_stages_keeps_the_choice():
    method = autopar.get_3d_parallel_method(4, 2, 1, 1, devices=2, batch_statistics="microbatch")
    assert isinstance(method, autopar.ShardParallel)
    assert method.exactness == OWN


@pytest.mark.parametrize("method", [METHODS["shards"], *slow(METHODS["1f1b"])])
def test_batch_normalization_of_nnx_equals_a_loop(method):
    class Network(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(6, 8, use_bias=False, rngs=rngs)
            self.norm = nnx.BatchNorm(8, rngs=rngs)
            self.last = nnx.Linear(8, 3, rngs=rngs)

        def __call__(self, x):
            return self.last(nnx.relu(self.norm(self.first(x))))

    network = Network(nnx.Rngs(0))
    graph, params, state = nnx.split(network, nnx.Param, ...)

    def loss(params, state, batch):
        model = nnx.merge(graph, params, state, copy=True)
        value = per_example(model(batch["x"]), batch["label"]).mean()
        return value, nnx.state(model, nnx.BatchStat)

    step = parallelized(step_of(loss), method)
    args = params, state, BATCH
    assert_allclose(step(*args), jax.jit(loop_of(loss))(*args), rtol=1e-5, atol=1e-6)


EXACT_TERMS = {
    "group norm": lambda p, x: standardized(x.reshape(-1, 2, 4), -1).reshape(-1, 8) * p["scale"],
    "instance norm": lambda p, x: standardized(x.reshape(-1, 4, 2), 1).reshape(-1, 8),
    "RMS norm": lambda p, x: x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-3),
    "weight norm": lambda p, x: x @ (p["second"] / jnp.linalg.norm(p["second"], axis=0)),
    "spectral norm": lambda p, x: x @ (p["second"] / largest_singular_value(p["second"])),
}


def standardized(x, axis):
    return jax.nn.standardize(x, axis, epsilon=1e-3)


def largest_singular_value(weights):
    vector = jnp.ones(8)
    for _ in range(2):
        vector = weights.T @ (weights @ vector)
        vector = jax.lax.stop_gradient(vector / jnp.linalg.norm(vector))
    return jnp.linalg.norm(weights @ vector)


def test_norms_within_examples_and_of_weights_are_exact_without_the_choice():
    """Also label smoothing, masked means, metrics of the loss and clipping by the global norm."""

    def loss(params, state, batch):
        hidden = batch["x"] @ params["first"]
        for term in EXACT_TERMS.values():
            hidden = hidden + term(params, hidden)
        logits = hidden @ params["last"]
        targets = optax.smooth_labels(jax.nn.one_hot(batch["label"], 3), 0.1)
        valid = jnp.maximum((batch["label"] > 0).sum(), 1)
        losses = optax.softmax_cross_entropy(logits, targets) * (batch["label"] > 0)
        correct = (logits.argmax(-1) == batch["label"]).mean()
        return losses.sum() / valid, correct

    graph = trace(step_of(loss), ARGS, (2,), COUNT, TraceOptions(exactness=OWN))
    assert graph.microbatching is not None
    assert graph.microbatching.own_statistics == ()
    method = autopar.DataParallel(2, COUNT)
    step = parallelized(step_of(loss), method)
    assert_allclose(step(*ARGS), jax.jit(step_of(loss))(*ARGS), rtol=1e-5, atol=1e-6)
