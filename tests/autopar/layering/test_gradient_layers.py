"""Steps that take gradients with JAX's own functions are divided into layers after the fact."""

import functools
import re
from collections import Counter
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.extend.core.primitives import dot_general_p

import autopar
from autopar.ir.graph import scopes
from autopar.layering.layer_clustering import NoLayersError
from autopar.layering.layer_scopes import layer_of
from autopar.testing import assert_allclose
from autopar.tracing.step_traces import TraceOptions
from autopar.tracing.trace import trace
from tests.tiers import slow

RNG = np.random.default_rng(0)
WIDTH, CLASSES, EXAMPLES = 16, 8, 16
BATCH = {
    "x": RNG.standard_normal((EXAMPLES, WIDTH)).astype(np.float32),
    "label": RNG.integers(0, CLASSES, EXAMPLES),
}


class Residual(nn.Module):
    """A classifier of four residual blocks with dropout."""

    @nn.compact
    def __call__(self, x, train):
        for _ in range(4):
            hidden = nn.gelu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x)))
            x = x + nn.Dropout(0.2, deterministic=not train)(nn.Dense(WIDTH)(hidden))
        return nn.Dense(CLASSES)(x)


MODEL = Residual()
PARAMS = jax.jit(functools.partial(MODEL.init, train=False))(jax.random.key(0), BATCH["x"])


def make_step(value_and_grad):
    """Return a step that computes its accuracy from the logits that the loss returns."""

    def step(params, batch):
        def loss(params):
            rngs = {"dropout": jax.random.key(1)}
            logits = MODEL.apply(params, batch["x"], train=True, rngs=rngs)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
            return losses.mean(), logits

        (value, logits), grads = value_and_grad(loss, has_aux=True)(params)
        accuracy = (logits.argmax(-1) == batch["label"]).mean()
        return jax.tree.map(lambda p, g: p - 0.5 * g, params, grads), value, accuracy

    return step


def pipeline(schedule="1f1b", layers=2, **options):
    return autopar.PipeshardParallel(
        2,
        4,
        pipeline_schedule=schedule,
        layer_option=autopar.AutoLayerOption(layers, **options),
        stage_option=autopar.UniformStageOption(2),
    )


@pytest.mark.parametrize("schedule", [*slow("1f1b"), "zero_bubble_h1"])
def test_a_pipeline_of_plain_gradients_equals_one_device(schedule):
    step = make_step(jax.value_and_grad)
    expected = jax.jit(step)(PARAMS, BATCH)
    planned = autopar.parallelize(step, method=pipeline(schedule))
    assert_allclose(planned(PARAMS, BATCH), expected, rtol=1e-5, atol=1e-5)


def test_an_optimizer_of_nnx_trains_in_a_pipeline():
    class Classifier(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(4)])

        def __call__(self, x):
            for layer in self.layers:
                x = jnp.tanh(layer(x))
            return x

    model = Classifier(nnx.Rngs(0))
    graph, state = nnx.split((model, nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)))

    def step(state, batch):
        model, optimizer = nnx.merge(graph, state)
        value, grads = nnx.value_and_grad(lambda model: (model(batch["x"]) ** 2).mean())(model)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), value

    expected = jax.jit(step)(state, BATCH)
    planned = autopar.parallelize(step, method=pipeline(), donate_argnums=())
    assert_allclose(planned(state, BATCH), expected, rtol=1e-5, atol=1e-5)


def checkpointed(loss, has_aux=True):
    """Return the value and gradient of a loss with a `jax.checkpoint` around it."""
    return jax.value_and_grad(jax.checkpoint(loss), has_aux=has_aux)


def gradient_alone(loss, has_aux=True):
    """Return the gradient of a loss with a `jax.checkpoint` around it, and no value of it."""
    gradient = jax.grad(jax.checkpoint(lambda params: loss(params)[0]))
    return lambda params: ((0.0, jnp.zeros((1, CLASSES))), gradient(params))


def jitted_checkpoint(loss, has_aux=True):
    """Return what `checkpointed` does, inside of a call."""
    return jax.value_and_grad(jax.jit(jax.checkpoint(loss)), has_aux=has_aux)


def marked_checkpointed(loss, has_aux=True):
    """Return what `checkpointed` does, by autopar's gradients."""
    return autopar.value_and_grad(jax.checkpoint(loss), has_aux=has_aux)


@pytest.mark.parametrize(
    "value_and_grad", [checkpointed, gradient_alone, jitted_checkpoint, marked_checkpointed]
)
def test_a_loss_in_a_checkpoint_is_cut_into_layers(value_and_grad):
    step = make_step(value_and_grad)
    planned = autopar.parallelize(step, method=pipeline(), donate_argnums=())
    expected = jax.jit(step)(PARAMS, BATCH)
    assert_allclose(planned(PARAMS, BATCH), expected, rtol=1e-5, atol=1e-5)


def test_the_layers_in_a_checkpoint_around_the_loss_are_those_without_it():
    assert products_by_layer(checkpointed) == products_by_layer(jax.value_and_grad)


@pytest.mark.parametrize("around", [jax.checkpoint, lambda loss: jax.checkpoint(jax.jit(loss))])
def test_a_checkpoint_around_a_marked_loss_recomputes_each_layer(around):
    def value_and_grad(loss, has_aux):
        return autopar.value_and_grad(around(loss), has_aux=has_aux)

    recomputed = products_by_layer(autopar.value_and_grad, remat_layer=True)
    assert products_by_layer(value_and_grad) == recomputed


RESIDUAL_WEIGHTS = list(RNG.standard_normal((8, WIDTH, WIDTH)).astype(np.float32) / 8)


def residual(x, weight):
    return x + jnp.tanh(x @ weight)


def whole(weights, x):
    return jax.checkpoint(lambda weights, x: functools.reduce(residual, weights, x))(weights, x)


def halves(weights, x):
    return whole(weights[4:], whole(weights[:4], x))


def nested(weights, x):
    return jax.checkpoint(
        lambda weights, x: functools.reduce(jax.checkpoint(residual), weights, x)
    )(weights, x)


def step_of(model):
    def step(weights, batch):
        value, grads = jax.value_and_grad(lambda w: (model(w, batch["x"]) ** 2).mean())(weights)
        return [weight - grad for weight, grad in zip(weights, grads, strict=True)], value

    return step


@pytest.mark.parametrize("model", [whole, halves, nested, jax.jit(whole)])
def test_layers_in_a_checkpoint_are_recomputed_in_their_stages(model):
    step = step_of(model)
    planned = autopar.parallelize(step, method=pipeline(), donate_argnums=())
    args = RESIDUAL_WEIGHTS, BATCH
    assert_allclose(planned(*args), jax.jit(step)(*args), rtol=1e-5, atol=1e-5)
    if model is not nested:  # which recomputes twice
        graph = trace(
            step, args, (1,), 4, TraceOptions(layers=autopar.AutoLayerOption(4), marked=True)
        )
        recomputed = Counter(
            layer_of(eqn)
            for eqn in graph.jaxpr.eqns
            if eqn.primitive is dot_general_p and "rematted_computation" in scopes(eqn)
        )
        assert recomputed == {(layer, True): 2 for layer in range(4)}


def products_by_layer(value_and_grad, **options):
    """Return how many products each layer has, forward and backward."""
    step = trace(
        make_step(value_and_grad),
        (PARAMS, BATCH),
        (1,),
        4,
        TraceOptions(layers=autopar.AutoLayerOption(4, **options), marked=True),
    )
    eqns = [eqn for eqn in step.jaxpr.eqns if eqn.primitive is dot_general_p]
    return Counter(layer_of(eqn) for eqn in eqns)


def test_products_are_in_the_layers_that_a_divided_loss_has():
    assert products_by_layer(jax.value_and_grad) == products_by_layer(autopar.value_and_grad)


def test_layers_that_jax_has_differentiated_are_not_recomputed():
    step = autopar.parallelize(make_step(jax.value_and_grad), method=pipeline(remat_layer=True))
    with pytest.raises(autopar.LayerError, match=r"remat_layer=True needs .* autopar\.grad"):
        step(PARAMS, BATCH)


def test_a_gradient_with_its_product_with_the_hessian_runs_in_stages():
    def step(params, batch):
        def loss(params):
            logits = MODEL.apply(params, batch["x"], train=False)
            labels = batch["label"]
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        ones = jax.tree.map(jnp.ones_like, params)
        grads, products = jax.jvp(jax.grad(loss), (params,), (ones,))

        def updated(weight, grad, product):
            return weight - 0.1 * grad / (1 + jnp.abs(product))

        return jax.tree.map(updated, params, grads, products)

    parallel = autopar.parallelize(step, method=pipeline(), donate_argnums=())
    assert_allclose(parallel(PARAMS, BATCH), jax.jit(step)(PARAMS, BATCH), rtol=1e-4, atol=1e-5)
    microbatching = parallel.get_last_executable().step.microbatching
    products = [eqn for _, eqn in microbatching.body if eqn.primitive is dot_general_p]
    passes = {(layer, is_backward) for layer in (0, 1) for is_backward in (False, True)}
    assert set(map(layer_of, products)) == passes


def test_a_scope_may_be_named_like_a_differentiation():
    def step(weight, x):
        with jax.named_scope("jvp(energy)"):
            return weight - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(weight)

    args = jnp.ones(4), jnp.ones((8, 4))
    parallel = autopar.parallelize(step, method=autopar.ShardParallel((8,)))
    assert_allclose(parallel(*args), jax.jit(step)(*args))


def test_a_step_with_too_few_products_is_refused_with_their_lines():
    def step(weight, x):
        return weight - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(weight)

    method = autopar.PipeshardParallel(
        devices=8, num_micro_batches=2, layer_option=autopar.AutoLayerOption(8)
    )
    args = np.ones((WIDTH, WIDTH), np.float32), BATCH["x"]
    with pytest.raises(NoLayersError, match=r"8 layers asked of .* at \S*test_gradient_layers.py:"):
        autopar.plan_step(step, args, method=method, cluster="p3.16xlarge")


def test_recomputation_is_left_out_where_it_is_a_choice():
    step = autopar.parallelize(make_step(jax.value_and_grad), method=pipeline(remat_layer="auto"))
    option = step.get_executable(PARAMS, BATCH).plan.schedule.layer_option
    assert option is not None
    assert option.remat_layer is False


def test_a_loop_in_one_layer_is_named_in_a_warning():
    def step(weights, batch):
        def loss(weights):
            x = jax.lax.fori_loop(0, 4, lambda i, x: jnp.tanh(x @ weights[i]), batch["x"])
            return (x**2).mean()

        value, grads = jax.value_and_grad(loss)(weights)
        return weights - 0.1 * grads, value

    weights = np.ones((4, WIDTH, WIDTH), np.float32) / WIDTH
    planned = autopar.parallelize(step, method=pipeline(), donate_argnums=())
    executable = planned.get_executable(weights, BATCH)
    (warning,) = executable.plan.warnings
    assert re.search(
        r"1 of 2; .*; each loop is in one layer, at .*test_gradient_layers.* jax.lax.scan", warning
    )
    assert_allclose(planned(weights, BATCH), jax.jit(step)(weights, BATCH), rtol=1e-5, atol=1e-6)


def test_a_loop_over_examples_is_told_to_be_vmapped():
    def step(weights, batch):
        def loss(weights):
            def of_example(x):
                return (jnp.tanh(x @ weights[0]) @ weights[1]).sum()

            return jax.lax.map(of_example, batch["x"]).mean()

        return jax.grad(loss)(weights)

    weights = np.ones((2, WIDTH, WIDTH), np.float32) / WIDTH
    planned = autopar.parallelize(step, method=pipeline(), donate_argnums=())
    with pytest.raises(NoLayersError, match=r"loop over examples, as of jax.lax.map, by jax.vmap"):
        planned.get_executable(weights, BATCH)


@pytest.mark.parametrize("value_and_grad", [jax.value_and_grad, autopar.value_and_grad])
def test_stages_without_a_product_equal_one_device_and_are_named_in_a_warning(value_and_grad):
    def step(weights, batch):
        def loss(weights):
            return (jnp.sin(jnp.tanh(batch["x"] @ weights)) ** 2).mean()

        value, grads = value_and_grad(loss)(weights)
        return weights - 0.1 * grads, value

    weights = RNG.standard_normal((WIDTH, WIDTH)).astype(np.float32)
    method = autopar.PipeshardParallel(3, 2, layer_option=autopar.AutoLayerOption(3))
    parallel = autopar.parallelize(step, method=method, donate_argnums=())
    result: Any = parallel(weights, BATCH)
    assert_allclose(result, jax.jit(step)(weights, BATCH), rtol=1e-5, atol=1e-6)
    executable = parallel.get_last_executable()
    assert executable is not None
    (warning,) = executable.plan.warnings
    assert "stages without a matrix product or convolution: 1, 2 of 3" in warning
