"""Scans over layers that JAX has differentiated are cut between layers, forward and backward."""

from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core.primitives import dot_general_p, scan_p

import autopar
from autopar.ir.control_flow import repeats
from autopar.layering.equal_values import EqualValues, equal_carries
from autopar.layering.layer_clustering import NoLayersError
from autopar.layering.layer_scopes import layer_of
from autopar.pipeline.partitioner import partition_step
from autopar.testing import assert_allclose
from autopar.tracing.step_traces import TraceOptions
from autopar.tracing.trace import trace
from tests.autopar.pipeline.scan_steps import llama_step, weights

JAX = jax.value_and_grad
SAVE_DOTS = partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
LAYERS = 3


def traced(step, state, batch):
    option = autopar.AutoLayerOption(LAYERS)
    return trace(step, (state, batch), (1,), 4, TraceOptions(layers=option, marked=True))


def products_by_layer(args):
    """Return how many products each layer does, forward and backward."""
    eqns = traced(*args).jaxpr.eqns
    return Counter(
        layer_of(eqn)
        for eqn, times in zip(eqns, repeats(eqns), strict=True)
        if eqn.primitive is dot_general_p
        for _ in range(int(times))
    )


@pytest.mark.parametrize(
    "make",
    [
        partial(llama_step, 4),
        partial(llama_step, 4, remat=True, reverse=True),
    ],
)
def test_products_are_in_the_layers_that_a_divided_loss_has(make):
    assert products_by_layer(make(value_and_grad=JAX)) == products_by_layer(make())


@pytest.mark.parametrize("around", [jax.checkpoint, SAVE_DOTS])
def test_each_stage_recomputes_its_own_layers(around):
    partition = partition_step(traced(*llama_step(3, JAX, around)), range(LAYERS))
    for task, eqns in partition.eqns.items():
        loops = [eqn.params["length"] for _, eqn in eqns if eqn.primitive.name == "loop"]
        assert loops == {"F": [1], "B": [1, 1], "U": []}[task.phase]


def stacked_loss(params, x):
    """Return the mean square after a stack of layers that share a matrix."""

    def layer(x, w):
        return x + jnp.tanh(x @ w) @ params["shared"], None

    return jnp.mean(lax.scan(layer, x, params["stack"])[0] ** 2)


def test_a_loss_that_is_recomputed_as_a_whole_is_divided_like_its_forward_pass():
    def step(params, x):
        value, gradients = jax.value_and_grad(jax.checkpoint(stacked_loss))(params, x)
        return jax.tree.map(jnp.subtract, params, gradients), value

    params = {"stack": weights(3, 8, 8), "shared": weights(8, 8)}
    partition = partition_step(traced(step, params, weights(16, 8)), range(LAYERS))
    for task, eqns in partition.eqns.items():
        loops = [eqn for _, eqn in eqns if eqn.primitive.name == "loop"]
        assert len(loops) == {"F": 1, "B": 2, "U": 0}[task.phase]


def test_a_loop_that_takes_gradients_in_each_iteration_is_named_in_the_refusal():
    def step(params, x):
        def update(params, x):
            return jax.tree.map(jnp.subtract, params, jax.grad(stacked_loss)(params, x)), None

        return lax.scan(update, params, x.reshape(2, -1, 8))[0]

    params = {"stack": weights(3, 8, 8), "shared": weights(8, 8)}
    with pytest.raises(NoLayersError, match=r"test_gradient_scans.py:\d+ takes gradients in each"):
        traced(step, params, weights(16, 8))


def test_a_branch_that_takes_gradients_is_named_in_the_refusal():
    def step(params, x):
        def updated(params):
            gradients = jax.grad(stacked_loss)(params, x)
            return jax.tree.map(jnp.subtract, params, gradients)

        return lax.cond(params["shared"][0, 0] > 0, updated, lambda params: params, params)

    params = {"stack": weights(3, 8, 8), "shared": weights(8, 8)}
    with pytest.raises(NoLayersError, match=r"the branch at \S+scans.py:\d+ takes gradients: take"):
        traced(step, params, weights(16, 8))


def test_gradients_that_the_model_takes_are_in_its_forward_pass():
    """A model that iterates along the gradient of an energy, as in Du and Mordatch 2019."""

    def step(params, x):
        def energy(x, w):
            return jnp.sum(jnp.tanh(x @ w) ** 2)

        def loss(params):
            def descend(x, _):
                return x - 0.1 * jax.grad(energy)(x, params["first"]), None

            x_first = lax.scan(descend, x, length=2)[0]
            return jnp.mean((x_first - jax.grad(energy)(x_first, params["second"])) ** 2)

        return jax.value_and_grad(loss)(params)

    params = {"first": weights(8, 8), "second": weights(8, 8)}
    partition = partition_step(
        trace(
            step,
            (params, weights(16, 8)),
            (1,),
            4,
            TraceOptions(layers=autopar.AutoLayerOption(2), marked=True),
        ),
        range(2),
    )
    products = {
        task: sum(eqn.primitive is dot_general_p for _, eqn in eqns)
        for task, eqns in partition.eqns.items()
    }
    assert [products[task] for task in partition.eqns if task.phase == "F"] == [2, 2]
    method = autopar.PipeshardParallel(
        2, num_micro_batches=4, layer_option=autopar.AutoLayerOption(2)
    )
    parallel = autopar.parallelize(step, method=method, donate_argnums=())
    args = params, weights(16, 8)
    assert_allclose(parallel(*args), jax.jit(step)(*args), rtol=1e-4, atol=1e-5)


def test_a_scan_that_may_run_again_with_other_carries_is_refused():
    def layer(y, w):
        y = jnp.tanh(y @ w)
        return lax.cond(y.sum() > 0, jnp.sin, jnp.cos, y), None

    def step(params, x):
        def loss(stack):
            run = jax.checkpoint(lambda stack: lax.scan(layer, x, stack)[0])
            return jnp.mean(run(stack) ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        return params - gradients, value

    with pytest.raises(NoLayersError, match=r"test_gradient_scans.py:\d+ again as a whole"):
        traced(step, weights(3, 8, 8), weights(16, 8))


def in_chunks(scale):
    """Return a layer that works on its input in chunks."""

    def layer(c, w):
        _, chunks = lax.scan(lambda _, row: (None, jnp.tanh(scale * row @ w)), None, c)
        return chunks, None

    return layer


SCANS = {
    "another result": (in_chunks(1), lambda c, w: (in_chunks(1)(c, w)[0], c), (0,)),
    "another constant": (in_chunks(1), in_chunks(2), None),
    "another operand": (in_chunks(1), lambda c, w: in_chunks(1)(c, w.T), None),
    "another slice": (lambda c, w: (c + w[0], None), lambda c, w: (c + w[1], None), None),
}


@pytest.mark.parametrize("name", SCANS)
def test_carries_are_equal_only_if_equal_equations_compute_them(name):
    body, other, expected = SCANS[name]

    def fun(x, stack):
        return lax.scan(body, x, stack), lax.scan(other, x, stack)

    jaxpr = jax.make_jaxpr(fun)(jnp.ones((2, 4)), jnp.ones((3, 4, 4)))
    first, second = (eqn for eqn in jaxpr.eqns if eqn.primitive is scan_p)
    assert equal_carries(EqualValues(), second, first) == expected
