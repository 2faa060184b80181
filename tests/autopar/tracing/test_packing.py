"""Arguments that hold more than arrays are taken as their libraries' own jit takes them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import autopar

X = np.arange(32, dtype=np.float32).reshape(8, 4) / 32
Y = np.ones((8, 2), np.float32)


class Model(NamedTuple):
    weight: jax.Array
    activation: object
    name: str = "model"


def model_step(model, batch):
    def loss_fn(weight):
        return jnp.mean((model.activation(batch["x"] @ weight) - batch["y"]) ** 2)

    loss, grad = autopar.value_and_grad(loss_fn)(model.weight)
    return model._replace(weight=model.weight - 0.1 * grad), loss


BATCH = {"x": X, "y": Y}


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_functions_and_texts_in_an_argument_are_constants(micro_batches) -> None:
    method = autopar.ShardParallel((2, 4), micro_batches)
    step = autopar.parallelize(model_step, method=method)
    model = Model(jnp.ones((4, 2)), jnp.tanh)
    expected = model
    for _ in range(2):
        model, loss = step(model, BATCH)
        expected, expected_loss = model_step(expected, BATCH)
        assert (model.activation, model.name) == (jnp.tanh, "model")
        np.testing.assert_allclose(model.weight, expected.weight, rtol=1e-5)
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    executable = step.get_last_executable()
    step(model._replace(activation=jnp.sin), BATCH)
    assert step.get_last_executable() is not executable
    step(model, BATCH)
    assert step.get_last_executable() is executable


def test_a_number_inside_of_an_argument_warns_at_its_third_value() -> None:
    def counted(state, batch):
        return state["model"] * batch.sum()

    step = autopar.parallelize(counted)
    for count in (0, 1):
        step({"model": jnp.ones(4), "f": jnp.tanh, "count": [count]}, X)
    with pytest.warns(
        UserWarning, match=r"\['count'\]\[0\] of argument 0 \(state\) has been 0, 1, 2"
    ):
        step({"model": jnp.ones(4), "f": jnp.tanh, "count": [2]}, X)
    step({"model": jnp.ones(4), "f": jnp.tanh, "count": [3]}, X)


def test_a_function_as_an_argument_is_planned_and_predicted() -> None:
    def step(weight, batch, apply):
        return weight - jax.grad(lambda w: apply(w, batch).sum())(weight)

    args = (jnp.ones((4, 2)), X, lambda w, x: jnp.tanh(x @ w))
    plan = autopar.plan_step(step, args, cluster="dgx_h100")
    assert autopar.predict(step, args, plan, "dgx_h100", fidelity="analytic").seconds > 0


def test_what_can_not_be_hashed_is_refused_with_its_place() -> None:
    model = Model(jnp.ones((4, 2)), jnp.tanh)._replace(name=bytearray(b"x"))
    with pytest.raises(TypeError, match=r"argument 0 holds bytearray.* at \.name, which is no"):
        autopar.parallelize(model_step)(model, BATCH)


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_a_batch_dim_that_is_not_the_first_is_that_of_the_mapping(micro_batches) -> None:
    def step(weight, rows, columns):
        return autopar.value_and_grad(lambda w: jnp.mean((rows @ w - columns.T) ** 2))(weight)

    method = autopar.ShardParallel((8,), micro_batches)
    options = {"batch_argnums": {1: 0, 2: 1}}
    args = jnp.ones((4, 2)), X, np.arange(16.0, dtype=np.float32).reshape(2, 8)
    value, grad = autopar.parallelize(step, method=method, **options)(*args)
    expected, expected_grad = step(*args)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(grad, expected_grad, rtol=1e-5)
    plan = autopar.plan_step(step, args, method=method, cluster="dgx_h100", **options)
    assert plan.num_micro_batches == micro_batches


def test_a_batch_dim_that_an_array_lacks_is_refused() -> None:
    step = autopar.parallelize(lambda w, x: w + x, batch_argnums={1: 2})
    with pytest.raises(autopar.OptionError, match=r"dim 2 of argument 1, but .* shape \(8, 4\)"):
        step(X, X)
    with pytest.raises(autopar.OptionError, match="mapping"):
        autopar.parallelize(lambda w, x: w + x, batch_argnums={1: "x"})


def test_arguments_by_name_are_those_by_position() -> None:
    def step(state, batch, scale=2.0, *, shift):
        return state * scale + batch.sum() + shift

    parallel = autopar.parallelize(step)
    shift = jnp.float32(3.0)
    expected = step(X, Y, shift=shift)
    for args, keywords in [
        ((X, Y), {"shift": shift}),
        ((X,), {"shift": shift, "batch": Y}),
        ((), {"shift": shift, "batch": Y, "state": X, "scale": 2.0}),
    ]:
        np.testing.assert_allclose(parallel(*args, **keywords), expected, rtol=1e-6)
    with pytest.raises(TypeError, match="shfit"):
        parallel(X, Y, shift=shift, shfit=shift)
    with pytest.raises(TypeError, match=r"takes more by \*\*; name them"):
        autopar.parallelize(lambda x, **more: x)(X, more=shift)


def test_parameters_after_any_number_of_arguments_keep_their_defaults() -> None:
    """As those of `numpyro.infer.SVI.update`."""

    def step(state, *batches, scale=2.0):
        return state * scale + sum(batch.sum() for batch in batches)

    parallel = autopar.parallelize(step)
    for batches in ((), (Y,), (Y, X)):
        np.testing.assert_allclose(parallel(X, *batches), step(X, *batches), rtol=1e-6)
    with pytest.raises(TypeError, match=r"takes scale by name after any number of arguments"):
        parallel(X, Y, scale=3.0)
    plan = autopar.plan_step(step, (X, Y), cluster="dgx_h100")
    assert len(plan.stages[0].inputs) == 2


class Network(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.second = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x):
        return self.second(self.dropout(nnx.relu(self.first(x))))


def nnx_args():
    model = Network(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param), BATCH


def nnx_step(model, optimizer, batch):
    def loss_fn(model):
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def test_nnx_modules_are_changed_as_by_nnx_jit() -> None:
    step = autopar.parallelize(nnx_step, method=autopar.ShardParallel((2, 4)), batch_argnums=2)
    args, expected_args = nnx_args(), nnx_args()
    for _ in range(3):
        loss, expected = step(*args), nnx.jit(nnx_step)(*expected_args)
        np.testing.assert_allclose(loss, expected, rtol=1e-4)
    states = [nnx.to_pure_dict(nnx.state(a[:2])) for a in (args, expected_args)]
    leaves, expected_leaves = map(jax.tree.leaves_with_path, states)
    assert int(args[1].step[...]) == 3
    for (path, leaf), (_, expected) in zip(leaves, expected_leaves, strict=True):
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(leaf, expected, rtol=1e-3, atol=1e-5, err_msg=str(path))
    plan = autopar.plan_step(nnx_step, args, cluster="dgx_h100", batch_argnums=2)
    assert autopar.predict(
        nnx_step, args, plan, "dgx_h100", batch_argnums=2, fidelity="analytic"
    ).seconds > 0  # fmt: skip
    assert not any(
        isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(nnx.state(args[0]))
    )


def test_modes_that_a_step_sets_are_those_of_nnx_jit() -> None:
    def step(model, teacher, optimizer, batch):
        model.train()
        teacher.eval()
        targets = teacher(batch["x"])
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(batch["x"]) - targets) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    def trained(jit):
        model, teacher = Network(nnx.Rngs(0)), Network(nnx.Rngs(1))
        model.eval()
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        losses = [float(jit(model, teacher, optimizer, BATCH)) for _ in range(2)]
        return losses, model.dropout.deterministic, teacher.dropout.deterministic

    losses, *modes = trained(autopar.parallelize(step, batch_argnums=3))
    expected, *expected_modes = trained(nnx.jit(step))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert modes == expected_modes == [False, True]


def test_a_returned_nnx_argument_is_the_same_object() -> None:
    def step(models, x):
        models["a"].kernel[...] = models["a"].kernel[...] * 2
        return models["a"], models["a"](x)

    models = {"a": nnx.Linear(4, 2, rngs=nnx.Rngs(0)), "scale": jnp.ones(())}
    kernel = np.asarray(models["a"].kernel[...])
    returned, _ = autopar.parallelize(step)(models, X)
    assert returned is models["a"]
    np.testing.assert_allclose(returned.kernel[...], 2 * kernel)


def test_nnx_steps_that_cannot_be_written_back_are_refused() -> None:
    def grows(model, x):
        model.extra = nnx.Param(x)

    def counts(model, x):
        model.in_features += 1

    def makes(model, x):
        return nnx.Linear(4, 2, rngs=nnx.Rngs(0))

    model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    with pytest.raises(autopar.TraceError, match="grows adds, removes or replaces variables"):
        autopar.parallelize(grows)(model, X)
    with pytest.raises(autopar.TraceError, match="attribute that is neither an array nor a flag"):
        autopar.parallelize(counts)(model, X)
    with pytest.raises(autopar.TraceError, match="makes returns a Linear that is none of"):
        autopar.parallelize(makes)(model, X)
    with pytest.raises(TypeError, match="argument 1 has a Linear that an argument has already"):
        autopar.parallelize(lambda a, b: a(X) + b(X), batch_argnums=())(model, model)
    assert not hasattr(model, "extra")
