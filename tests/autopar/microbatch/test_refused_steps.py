"""Steps are refused with the reason if microbatches cannot give the result of the batch."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.layering.layer_clustering import NoLayersError
from autopar.testing import assert_allclose
from autopar.tracing.step_traces import TraceOptions
from autopar.tracing.trace import trace
from tests.autopar.microbatch.batch_losses import (
    BATCH,
    DEEP,
    PARAMS,
    REPAIRED,
    deep,
    mean_loss,
    outputs,
    per_example,
    preferences,
    step_of,
)

REFUSED = {
    "a part by the size of the batch": lambda p, b: (
        mean_loss(p, b) * jnp.split(p["w"][:, 0], [1, 1 + len(b["x"]) // 4])[1].sum()
    ),
    "an index by the size of the batch": lambda p, b: (
        mean_loss(p, b)
        * jax.lax.dynamic_slice(
            p["w"], (jnp.int32(len(b["x"]) // 4), 0), (1, 3), allow_negative_indices=False
        ).sum()
    ),
    "indices by the size of the batch": lambda p, b: (
        mean_loss(p, b)
        * (
            p["w"]
            .at[jnp.array([len(b["x"]) // 2, len(b["x"]) // 4])]
            .get(mode="promise_in_bounds", wrap_negative_indices=False)
            .sum()
        )
    ),
}


def nearly_ones(rows):
    """Return an array of ones whose last element is the next larger number.

    The trace for a single example of a step that reads it does not follow from those for more.
    """
    return np.append(np.ones(rows - 1, np.float32), np.nextafter(np.float32(1), np.float32(2)))


def with_array(loss):
    """Return a loss that reads `nearly_ones`."""
    return lambda p, b: loss(p, {**b, "mask": b["mask"] * nearly_ones(len(b["mask"]))})


def test_a_single_example_per_microbatch_is_told_to_be_the_reason():
    with pytest.raises(
        autopar.MicrobatchError, match="has a single example; use fewer microbatches"
    ):
        trace(
            step_of(with_array(REPAIRED["normalized weights"])),
            (PARAMS, BATCH),
            (1,),
            num_micro_batches=8,
        )


@pytest.mark.parametrize(
    ("least", "count", "sizes"), [(2, 8, "1 than for 2"), (8, 2, "4 than for 8")]
)
def test_a_difference_after_the_gradient_is_named_with_its_line_and_the_sizes(least, count, sizes):
    def step(weights, x):
        losses = nearly_ones(len(x))[:, None]
        gradient = autopar.value_and_grad(lambda w: jnp.mean((x @ w) ** 2 * losses))
        value, update = gradient(weights)
        metric = jnp.sin(value) if len(x) < least else jnp.exp(value)
        return weights - update, 2 * metric

    line = f"test_refused_steps.py:{step.__code__.co_firstlineno + 4}"
    with pytest.raises(autopar.MicrobatchError) as refused:
        trace(step, (np.ones((5, 3), np.float32), np.ones((8, 5), np.float32)), (1,), count)
    assert f"{line}, is computed otherwise for {sizes} examples" in str(refused.value)


def test_arguments_that_may_be_batches_are_named_if_a_microbatch_cannot_be_traced():
    def step(weights, x, y):
        return jax.value_and_grad(lambda w: ((x @ w - y) ** 2).mean())(weights)

    method = autopar.ShardParallel(1, num_micro_batches=2)
    parallel = autopar.parallelize(step, method=method, batch_argnums=1)
    with pytest.raises(autopar.MicrobatchError, match=r"in batch_argnums \(2 has arrays of 4 rows"):
        parallel(np.ones((5, 3), np.float32), np.ones((4, 5)), np.ones((4, 3)))


@pytest.mark.parametrize("count", [2, 3])
def test_frozen_weights_that_are_taken_for_the_batch_are_told_to_be_none(count):
    def step(adapter, frozen, batch):
        def loss(adapter):
            hidden = jnp.tanh(batch["x"] @ (frozen["a"] + jnp.outer(*adapter)) @ frozen["b"])
            return (hidden**2).mean()

        return jax.tree.map(jnp.subtract, adapter, jax.grad(loss)(adapter))

    adapter = np.ones(4, np.float32), np.ones(4, np.float32)
    frozen = {"a": np.ones((4, 4), np.float32), "b": np.ones((4, 4), np.float32)}
    args = adapter, frozen, {"x": np.ones((6, 4), np.float32)}
    method = autopar.ShardParallel(1, num_micro_batches=count)
    words = r"(?s)(which is argument 1|batch input 1/a).* arguments with examples in batch_argnums"
    with pytest.raises(autopar.MicrobatchError, match=words):
        autopar.parallelize(step, method=method)(*args)
    parallel = autopar.parallelize(step, method=method, batch_argnums=2)
    assert_allclose(parallel(*args), step(*args), rtol=1e-5)


def test_features_that_are_shuffled_after_a_layer_are_told_to_be_shuffled_before():
    def step(weights, x, key, after):
        order = jax.random.permutation(key, len(x))

        def loss(weights):
            mixed = x if after else x + x[order]
            hidden = jnp.tanh(mixed @ weights)
            hidden = hidden + hidden[order] if after else hidden
            return (jnp.tanh(hidden @ weights) ** 2).mean()

        return weights - jax.grad(loss)(weights)

    args = np.ones((5, 5), np.float32), np.ones((8, 5), np.float32), jax.random.key(0)
    line = f"test_refused_steps.py:{step.__code__.co_firstlineno + 1}"
    words = rf"sort at \S*{line} .*, shuffle examples before the first layer"
    with pytest.raises(autopar.MicrobatchError, match=words):
        trace(partial(step, after=True), args, (1,), num_micro_batches=2)
    trace(partial(step, after=False), args, (1,), num_micro_batches=2)


def test_a_state_of_examples_beside_weights_is_told_to_be_an_argument_of_its_own():
    def step(state, x):
        def loss(weights):
            hidden = jnp.tanh(x @ weights + state["hidden"])
            return (hidden**2).mean(), hidden

        grads, hidden = jax.grad(loss, has_aux=True)(state["weights"])
        return {"weights": state["weights"] - grads, "hidden": hidden}

    method = autopar.ShardParallel(1, num_micro_batches=2)
    parallel = autopar.parallelize(step, method=method, batch_argnums=1)
    state = {"weights": np.ones((5, 3), np.float32), "hidden": np.ones((4, 3), np.float32)}
    with pytest.raises(autopar.MicrobatchError, match="pass them in an argument of their own"):
        parallel(state, np.ones((4, 5), np.float32))


@pytest.mark.parametrize("loss", REFUSED.values(), ids=REFUSED.keys())
def test_what_is_neither_is_refused(loss):
    with pytest.raises(autopar.MicrobatchError):
        trace(step_of(loss), (PARAMS, BATCH), (1,), num_micro_batches=2)


@pytest.mark.parametrize("own_weights", [False, True])
def test_a_loop_that_accumulates_gradients_is_refused_with_what_to_write(own_weights):
    """Chunks that are computed alike are microbatches, others are refused."""

    def step(params, batch):
        gradients = jax.tree.map(jnp.zeros_like, params)
        size = len(batch["x"]) // 4
        for k in range(4):
            part = jax.tree.map(lambda rows, k=k: rows[k * size : (k + 1) * size], batch)
            new = jax.grad(mean_loss)(params, part)
            gradients = jax.tree.map(lambda a, b: a + b / 4, gradients, new)
            if own_weights:
                params = jax.tree.map(lambda p, g: p - 0.1 * g, params, new)
        return gradients

    advice = "write one gradient of the whole batch" if own_weights else "use num_micro_batches=4"
    with pytest.raises(autopar.MicrobatchError, match=advice):
        trace(step, (PARAMS, BATCH), (1,), num_micro_batches=2)
    pipeline = autopar.PipeshardParallel(
        2, num_micro_batches=8, layer_option=autopar.AutoLayerOption(2)
    )
    error = NoLayersError if own_weights else autopar.MicrobatchError
    with pytest.raises(error, match=advice):
        autopar.parallelize(step, method=pipeline)(PARAMS, BATCH)


def test_several_updates_in_a_scan_are_refused_as_gradients_after_an_update():
    def step(params, batches):
        def update(params, batch):
            value, gradients = jax.value_and_grad(mean_loss)(params, batch)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

        return jax.lax.scan(update, params, batches)

    batches = jax.tree.map(lambda rows: np.stack([rows, rows]), BATCH)
    method = autopar.ShardParallel(1, num_micro_batches=2)
    with pytest.raises(autopar.MicrobatchError, match=r"a gradient has changed.*of each update"):
        autopar.parallelize(step, method=method, batch_argnums={1: 1})(PARAMS, batches)
    pipeline = autopar.PipeshardParallel(
        2, num_micro_batches=2, layer_option=autopar.AutoLayerOption(2)
    )
    with pytest.raises(NoLayersError, match="updates weights, make a step of each update"):
        autopar.parallelize(step, method=pipeline, batch_argnums={1: 1})(PARAMS, batches)


def test_a_scan_of_updates_is_refused_at_its_reshape():
    def step(params, batch):
        def update(params, part):
            return jax.tree.map(jnp.subtract, params, jax.grad(mean_loss)(params, part)), None

        parts = jax.tree.map(lambda rows: rows.reshape(2, -1, *rows.shape[1:]), batch)
        return jax.lax.scan(update, params, parts)[0]

    words = r"reshape at .*test_refused_steps.py.*write one gradient of the whole batch"
    with pytest.raises(autopar.MicrobatchError, match=words):
        trace(step, (PARAMS, BATCH), (1,), num_micro_batches=4)


def test_more_neighbours_than_a_microbatch_has_are_refused_with_their_number():
    def step(params, batch):
        return autopar.grad(lambda p: preferences(outputs(p, batch).sum(1), 4))(params)

    with pytest.raises(
        autopar.MicrobatchError,
        match=r"batch_losses.py:\d+ puts 4 neighbouring examples together, .* has 2",
    ):
        trace(step, (PARAMS, BATCH), (1,), num_micro_batches=4)


def test_a_model_that_knows_the_size_of_the_batch_is_refused_in_words_of_microbatches():
    def step(params, batch):
        return autopar.grad(lambda p: (batch["x"].reshape(8, 6) @ p["w"]).mean())(params)

    words = r"not for a microbatch of 4: .*\.py:\d+ raises TypeError: .*\n.*x\.shape\[0\]"
    with pytest.raises(autopar.MicrobatchError, match=words):
        trace(step, (PARAMS, BATCH), (1,), num_micro_batches=2)


def test_a_model_of_no_more_examples_needs_several_of_them_in_a_microbatch():
    def step(params, batch):
        rows = len(batch["x"])
        assert rows <= 8, "too many"
        return autopar.grad(lambda p: (batch["x"].reshape(rows, 6) @ p["w"]).mean())(params)

    words = r"not for a batch of 16: .* raises AssertionError: too many\n.* or use fewer microb"
    with pytest.raises(autopar.MicrobatchError, match=words):
        trace(step, (PARAMS, BATCH), (1,), num_micro_batches=8)


def test_gradients_by_an_associative_scan_over_the_batch_are_told_to_use_a_sum():
    """Cox's partial likelihood of examples that are sorted by their times."""

    def loss(params, batch):
        risks = outputs(params, batch).sum(1)
        return (jax.lax.cumlogsumexp(risks) - risks).mean()

    words = r"associative scan over the batch at .*test_refused_steps.py:\d+ .* jnp.cumsum"
    with pytest.raises(autopar.MicrobatchError, match=words):
        trace(step_of(loss), (PARAMS, BATCH), (1,), num_micro_batches=2)


def test_groups_of_sorted_tokens_are_told_to_be_counted():
    def loss(params, batch):
        tokens = deep(params, batch["x"])
        experts = tokens[:, :2].argmax(1)
        order = jnp.argsort(experts)
        ends = jnp.searchsorted(experts[order], jnp.arange(2), side="right")
        sizes = jnp.diff(ends, prepend=0).astype(jnp.int32)
        rows = jax.lax.ragged_dot(tokens[order], jnp.stack(params["w"]), sizes)
        return deep(params, rows[jnp.argsort(order)]).mean()

    with pytest.raises(autopar.MicrobatchError, match=r"group sizes are jnp.bincount"):
        trace(step_of(loss), (DEEP, BATCH), (1,), num_micro_batches=2)


def test_a_jacobian_of_the_losses_is_told_to_be_gradients_of_each_example():
    def step(params, batch):
        jacobian = jax.jacrev(lambda params: deep(params, deep(params, batch["x"])).sum(1))(params)
        return jax.tree.map(lambda rows: rows.mean(0), jacobian)

    with pytest.raises(autopar.MicrobatchError, match=r"those of jax.vmap\(jax.grad\(loss\)"):
        trace(step, (DEEP, BATCH), (1,), num_micro_batches=2)


def test_a_batch_is_named_by_its_own_shape_where_microbatches_do_not_divide():
    step = step_of(mean_loss)
    with pytest.raises(ValueError, match=r"has shape \(8,.*\): in 2 microbatches of 4 examples"):
        autopar.parallelize(step, method=autopar.DataParallel(devices=8, num_micro_batches=2))(
            PARAMS, BATCH
        )


def test_a_pipeline_of_a_step_without_gradient_is_refused():
    with pytest.raises(autopar.MicrobatchError, match="the step takes no gradient"):
        trace(mean_loss, (PARAMS, BATCH), (1,), 2, TraceOptions(marked=True))


def test_a_batch_without_arrays_is_said_to_have_no_gradient_and_nothing_else():
    with pytest.raises(autopar.MicrobatchError, match=r"for an evaluation$"):
        trace(lambda scale, count: scale * count, (1.0, 2), (1,), options=TraceOptions(marked=True))


def test_a_batch_that_cannot_be_cut_is_refused():
    with pytest.raises(autopar.MicrobatchError, match=r"1/mask has shape \(8,\).* 3 microbatches"):
        trace(step_of(mean_loss), (PARAMS, BATCH), (1,), num_micro_batches=3)


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (2, "different things for batches of different size"),
        (8, "something else for a microbatch of 1 than for 2 examples"),
    ],
)
def test_steps_that_compute_otherwise_for_a_microbatch_are_refused(count, words):
    def loss(params, batch):
        errors = per_example(params, batch) * nearly_ones(len(batch["mask"]))
        if errors.shape[0] == 8 // count:
            return (errors * batch["mask"]).mean()
        return errors.mean()

    with pytest.raises(autopar.MicrobatchError, match=words):
        trace(step_of(loss), (PARAMS, BATCH), (1,), num_micro_batches=count)


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (2, "different things for batches of different size at .*: tanh of other values"),
        (8, "something else for a microbatch of 1 than for 2 examples"),
    ],
)
def test_steps_that_compute_from_other_values_for_a_microbatch_are_refused(count, words):
    def step(params, batch):
        def loss(params):
            values = per_example(params, batch)
            return values.mean(), values

        (_, values), gradients = autopar.value_and_grad(loss, has_aux=True)(params)
        seen = batch["mask"] if len(values) == 8 // count else values
        weights = nearly_ones(len(values))
        return gradients, jnp.tanh(seen).sum(), values, (weights * batch["mask"]).sum()

    with pytest.raises(autopar.MicrobatchError, match=words):
        trace(step, (PARAMS, BATCH), (1,), num_micro_batches=count)


def test_steps_that_return_other_values_for_a_microbatch_are_refused():
    def step(params, batch):
        value, gradients = autopar.value_and_grad(mean_loss)(params, batch)
        means = batch["mask"].mean(), value
        return gradients, means[::-1] if len(batch["mask"]) == 8 else means

    with pytest.raises(autopar.MicrobatchError, match="other results"):
        trace(step, (PARAMS, BATCH), (1,), num_micro_batches=2)
