"""Loops of Equinox run in microbatches where every example that is done keeps its values."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir

import autopar
from autopar.testing import assert_allclose

WEIGHTS = 0.4 * np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
BATCH = np.random.default_rng(1).normal(size=(8, 4)).astype(np.float32)
BATCH *= np.logspace(-4, 1, 8, dtype=np.float32)[:, None]  # examples take 1 to 18 iterations
METHODS = {
    "microbatches": autopar.ShardParallel((2, 4), num_micro_batches=4),
    "pipeline": autopar.PipeshardParallel(
        8, num_micro_batches=4, layer_option=autopar.AutoLayerOption(2)
    ),
}


def marker(name, function):
    """Return a primitive of Equinox, which the tests do without."""
    primitive = Primitive(name)
    primitive.def_impl(lambda x, **_: function(x))
    primitive.def_abstract_eval(lambda x, **_: jax.core.ShapedArray((), x.dtype))
    lowered = mlir.lower_fun(lambda x, **_: function(x), multiple_results=False)
    mlir.register_lowering(primitive, lowered)
    return primitive


UNVMAP_ANY = marker("unvmap_any", jnp.any)
NONBATCHABLE = marker("nonbatchable", lambda x: x)
MESSAGE = "Nonconstant batch. `equinox.internal.while_loop` has received a batch of values."


def fixed_points(w, x, kind):
    """Return z = tanh(z w + x) of every example, and the number of its iterations."""

    def condition(carry):
        iteration, running, *_ = carry
        goes_on = UNVMAP_ANY.bind(running) & (iteration < 64)
        if kind == "batch":
            goes_on = (jnp.max(jnp.abs(carry[2])) < 0.9) & (iteration < 64)
        return goes_on if kind == "no marker" else NONBATCHABLE.bind(goes_on, msg=MESSAGE)

    def body(carry):
        iteration, running, z, counts = carry
        after = jnp.tanh(z @ w + x)
        is_far = jnp.max(jnp.abs(after - z), axis=1) > 1e-3
        following = jnp.where(running[:, None], after, z)
        if kind == "goes on":
            following = after
        if kind == "blends":
            weight = running.astype(z.dtype)[:, None]
            following = weight * after + (1 - weight) * z
        return (
            iteration + 1,
            is_far if kind == "starts again" else running & is_far,
            following,
            jnp.where(running, counts + 1, counts),
        )

    start = 0, jnp.ones(len(x), bool), jnp.zeros_like(x), jnp.zeros(len(x), jnp.int32)
    iteration, _, z, counts = jax.lax.while_loop(condition, body, start)
    if kind == "returns the number":
        return z, (counts, iteration)
    return z, jnp.where(iteration > 10, counts, 0) if kind == "reads the number" else counts


def step_of(kind):
    def step(w, x):
        z, counts = fixed_points(w, x, kind)

        def loss(w):
            return jnp.mean(jnp.tanh(jnp.tanh(z @ w + x) @ w) ** 2)

        value, gradient = jax.value_and_grad(loss)(w)
        return w - gradient, value, counts

    return step


@pytest.mark.parametrize("method", METHODS)
def test_examples_that_keep_their_values_may_stop_earlier(method):
    parallel = autopar.parallelize(
        step_of("stops"), method=METHODS[method], donate_argnums=(), batch_argnums=(1,)
    )
    results = parallel(WEIGHTS, BATCH)
    expected = jax.jit(step_of("stops"))(WEIGHTS, BATCH)
    assert len(set(expected[2].tolist())) > 3
    assert_allclose(results, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("goes on", "runs until its last example is done"),
        ("blends", "runs until its last example is done.* Use while_loops='microbatch'"),
        ("starts again", "runs until its last example is done"),
        ("reads the number", "runs until its last example is done"),
        ("no marker", "runs until the batch meets a condition"),
    ],
)
def test_other_loops_over_a_batch_are_refused(kind, message):
    parallel = autopar.parallelize(step_of(kind), method=METHODS["microbatches"])
    with pytest.raises(autopar.MicrobatchError, match=message):
        parallel(WEIGHTS, BATCH)


@pytest.mark.parametrize("method", METHODS)
def test_microbatches_may_run_loops_until_their_own_examples_are_done(method):
    own = replace(METHODS[method], while_loops="microbatch")
    parallel = autopar.parallelize(
        step_of("blends"), method=own, donate_argnums=(), batch_argnums=(1,)
    )
    results = parallel(WEIGHTS, BATCH)
    assert_allclose(results, jax.jit(step_of("blends"))(WEIGHTS, BATCH), rtol=1e-5)
    plan = parallel.get_last_executable().plan
    assert plan.while_loops == "microbatch"
    again = autopar.PlanMethod(autopar.Plan.from_json(plan.to_json()))
    same = autopar.parallelize(
        step_of("blends"), method=again, donate_argnums=(), batch_argnums=(1,)
    )
    assert_allclose(same(WEIGHTS, BATCH), results, rtol=1e-6)
    (warning,) = (text for text in plan.warnings if "while_loops" in text)
    assert (
        f"each microbatch runs a loop until the last of its own examples is done at {__file__}:"
        in (warning)
    )


def followed(w, x, counts, iterations):
    """Apply a layer to each example as often as counted, in a loop of as many iterations."""

    def body(carry):
        iteration, h = carry
        is_running = (iteration < counts)[:, None]
        return iteration + 1, jnp.where(is_running, jnp.tanh(h @ w + x), h)

    return jax.lax.while_loop(lambda carry: carry[0] < iterations, body, (0, x))[1]


def test_a_stage_gets_the_number_of_iterations_of_its_own_examples():
    """Devices of the stage before have other examples, and so other numbers of iterations."""

    def step(w, x):
        @autopar.manual_layer_construction
        def loss(w):
            fixed = jax.lax.stop_gradient(w)
            z, (counts, iterations) = fixed_points(fixed, x, "returns the number")
            y = jnp.tanh(z @ w + x)
            autopar.mark_pipeline_boundary()
            h = followed(fixed, jax.lax.stop_gradient(y), counts, iterations)
            return jnp.mean(jnp.tanh((y + h) @ w) ** 2)

        value, gradient = autopar.value_and_grad(loss)(w)
        return w - gradient, value

    own = autopar.PipeshardParallel(
        3,
        num_micro_batches=2,
        stage_option=autopar.ManualStageOption([[0], [1]], [(1, 2), (1, 1)], [(2,), (1,)]),
        default_auto_sharding_option=autopar.ShardingOptions(data_parallel=True),
        while_loops="microbatch",
    )
    batch = BATCH[::-1]
    parallel = autopar.parallelize(step, method=own, donate_argnums=(), batch_argnums=(1,))
    assert_allclose(parallel(WEIGHTS, batch), jax.jit(step)(WEIGHTS, batch), rtol=1e-5)
    warnings = parallel.get_last_executable().plan.warnings
    assert any("a stage sends a statistic of the batch" in text for text in warnings)


@pytest.mark.parametrize(("kind", "equal"), [("blends", True), ("reads the number", False)])
def test_the_check_of_the_first_step_compares_such_loops(kind, equal):
    own = replace(METHODS["microbatches"], while_loops="microbatch")
    parallel = autopar.parallelize(
        step_of(kind), method=own, donate_argnums=(), batch_argnums=(1,), check="first step"
    )
    if equal:
        parallel(WEIGHTS, BATCH)
    else:
        with pytest.raises(autopar.FirstStepError, match="gives something else than one device"):
            parallel(WEIGHTS, BATCH)


def test_a_loop_by_a_condition_on_the_batch_is_no_choice():
    own = replace(METHODS["microbatches"], while_loops="microbatch")
    with pytest.raises(autopar.MicrobatchError, match="runs until the batch meets a condition"):
        autopar.parallelize(step_of("batch"), method=own)(WEIGHTS, BATCH)


def raises(has_error):
    raise ValueError("the gradient is not finite")


raises.__module__ = "equinox._errors"


@jax.custom_vjp
def checked(x):
    """Return `x`. Its gradient is checked as by `equinox.error_if`."""
    return x


def checked_gradient(_, gradient):
    has_error = UNVMAP_ANY.bind(~jnp.isfinite(gradient).all(axis=1))
    of_one = jax.ShapeDtypeStruct(gradient.shape[1:], gradient.dtype)

    def raising(gradient):
        return jnp.broadcast_to(jax.pure_callback(raises, of_one, has_error), gradient.shape)

    return (jax.lax.cond(has_error, raising, lambda each: each, gradient),)


checked.defvjp(lambda x: (x, None), checked_gradient)


def test_gradients_that_are_checked_for_errors_run_in_microbatches():
    def step(w, x):
        value, gradient = jax.value_and_grad(lambda w: jnp.mean(checked(x @ w) ** 2))(w)
        return w - gradient, value

    own = autopar.ShardParallel(1, num_micro_batches=4, while_loops="microbatch")
    parallel = autopar.parallelize(step, method=own, donate_argnums=())
    assert_allclose(parallel(WEIGHTS, BATCH), jax.jit(step)(WEIGHTS, BATCH), rtol=1e-5)


def test_the_number_of_iterations_is_no_result_of_a_microbatch():
    def step(w, x):
        z, (_, iterations) = fixed_points(w, x, "returns the number")
        value, gradient = jax.value_and_grad(lambda w: jnp.mean((z @ w) ** 2))(w)
        return w - gradient, value, iterations

    own = replace(METHODS["microbatches"], while_loops="microbatch")
    with pytest.raises(autopar.MicrobatchError, match="depends on how often the loop at"):
        autopar.parallelize(step, method=own)(WEIGHTS, BATCH)


def test_plans_without_such_loops_have_no_choice():
    own = replace(METHODS["microbatches"], while_loops="microbatch")

    def step(w, x):
        return w - jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)

    plan = autopar.plan_step(step, (WEIGHTS, BATCH), method=own, cluster="p3.16xlarge")
    assert plan.while_loops == "exact"
