"""Halves and other parts of the batch run in microbatches that can be divided alike."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopar
from autopar.testing import assert_allclose

RNG = np.random.default_rng(0)
EXAMPLES, WIDTH = 16, 6
PARAMS = {
    "in": RNG.standard_normal((5, WIDTH)).astype(np.float32),
    "out": RNG.standard_normal((WIDTH, 3)).astype(np.float32),
}
X = RNG.standard_normal((EXAMPLES, 5)).astype(np.float32)
Y = RNG.standard_normal((EXAMPLES, 3)).astype(np.float32)
KEY = jax.random.key(0)
METHODS = {
    "shards": autopar.ShardParallel(devices=(2, 2), num_micro_batches=2),
    "local accumulation": autopar.DataParallel(devices=2, num_micro_batches=2),
    "pipeline": autopar.PipeshardParallel(
        devices=2, num_micro_batches=2, layer_option=autopar.AutoLayerOption(2)
    ),
}


def outputs(params, x):
    return jnp.tanh(jnp.tanh(x @ params["in"]) @ params["out"])


def two_views(params, x, y):
    first, second = jnp.split(outputs(params, x), 2)
    return jnp.mean((first - second) ** 2)


def real_and_generated(params, x, y):
    out, half = outputs(params, x), len(x) // 2
    noise = jax.random.normal(KEY, (half, 3))
    weights = jnp.arange(half)[:, None] / len(x)
    return jnp.mean((out[:half] + noise) ** 2) + jnp.mean(weights * (out[half:] - y[half:]) ** 2)


def a_quarter_with_other_targets(params, x, y):
    """Shortcut models make the targets of some examples with the model."""
    few = len(x) // 4
    target = lax.stop_gradient(outputs(params, x[:few]))
    target = jnp.concatenate([target, y[few:]])
    return jnp.mean((outputs(params, jnp.tanh(x)) - target) ** 2)


def deviation_over_groups(params, x, y):
    """StyleGAN2 adds the deviation over groups of distant examples to each of them."""
    groups = outputs(params, x).reshape(4, -1, 3)
    deviation = jnp.sqrt(jnp.var(groups, 0) + 1e-6).mean(-1, keepdims=True)
    return jnp.mean((outputs(params, x) * jnp.tile(deviation, (4, 1)) - y) ** 2)


def chunks_in_a_scan(params, x, y):
    """A loss in a fixed number of chunks, so that the logits of one chunk exist at a time."""
    hidden = jnp.tanh(x @ params["in"])

    def add(total, chunk):
        hidden, y = chunk
        return total + jnp.sum((hidden @ params["out"] - y) ** 2), None

    chunks = hidden.reshape(4, -1, WIDTH), y.reshape(4, -1, 3)
    return lax.scan(jax.checkpoint(add), 0.0, chunks)[0] / len(x)


def rolled_by_half(params, x, y):
    out = outputs(params, x)
    return jnp.mean((out - jnp.roll(out, len(x) // 2, 0)) ** 2 * y)


def halves_of_pairs(params, x, y):
    out = outputs(params, x)
    pairs, halves = out.reshape(-1, 2, 3), out.reshape(2, -1, 3)
    return jnp.mean(pairs[:, 0] * pairs[:, 1]) + jnp.mean(halves[0] * halves[1])


LOSSES = [
    two_views,
    real_and_generated,
    a_quarter_with_other_targets,
    deviation_over_groups,
    chunks_in_a_scan,
    rolled_by_half,
    halves_of_pairs,
]


def step_of(loss):
    def step(params, x, y):
        value, gradients = jax.value_and_grad(loss)(params, x, y)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    return step


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_parts_of_the_batch_equal_those_of_the_whole_batch(loss, method):
    step = step_of(loss)
    planned = autopar.parallelize(step, method=method, donate_argnums=())
    assert_allclose(planned(PARAMS, X, Y), step(PARAMS, X, Y), rtol=1e-4, atol=1e-5)
    assert planned.get_last_executable().plan.num_passes == 1


def test_first_passes_of_devices_complete_what_the_first_pass_of_the_microbatch_does():
    """The first pass of a device's few examples completes other values, so it can't stand in."""

    def centred(params, x, y):
        hidden = jnp.tanh(x @ params["in"])
        groups = hidden.reshape(4, -1, *hidden.shape[1:])
        centred = (groups - groups.mean(0)).reshape(hidden.shape)
        return jnp.mean(hidden**2) + jnp.mean(centred @ params["out"])

    step, x = step_of(centred), np.repeat(X[:, None], 3, 1)
    planned = autopar.parallelize(
        step, method=METHODS["local accumulation"], donate_argnums=(), batch_argnums=(1,)
    )
    assert_allclose(planned(PARAMS, x, Y), step(PARAMS, x, Y), rtol=1e-4, atol=1e-5)


def test_halves_of_the_batch_are_gradients_of_one_half():
    def step(params, x, y):
        def loss(params, x, y):
            return jnp.mean((outputs(params, x) - y) ** 2)

        half = len(x) // 2
        first, second = (
            jax.grad(loss)(params, x[rows], y[rows]) for rows in (slice(half), slice(half, None))
        )
        return jax.tree.map(lambda a, b: jnp.sum((a - b) ** 2), first, second)

    planned = autopar.parallelize(step, method=METHODS["shards"], donate_argnums=())
    assert_allclose(planned(PARAMS, X, Y), step(PARAMS, X, Y), rtol=1e-4, atol=1e-5)


def contrastive_halves(params, x, y):
    """Both halves are views of the same examples, each compared with all of the other half."""
    first, second = jnp.split(outputs(params, x), 2)
    similar = first @ second.T
    return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(similar)))


def decorrelated_halves(params, x, y):
    """Barlow Twins standardizes each half by its own mean and deviation."""
    halves = jnp.split(outputs(params, x), 2)
    first, second = ((half - half.mean(0)) / half.std(0) for half in halves)
    return jnp.mean((first.T @ second / len(first) - jnp.eye(3)) ** 2)


def largest_of_each_half(params, x, y):
    return jnp.mean(outputs(params, x).reshape(2, -1).max(1) ** 2)


@pytest.mark.parametrize("loss", [contrastive_halves, decorrelated_halves, largest_of_each_half])
def test_a_first_pass_reads_what_the_parts_are_taken_from(loss):
    step = step_of(loss)
    planned = autopar.parallelize(step, method=METHODS["shards"], donate_argnums=())
    assert_allclose(planned(PARAMS, X, Y), step(PARAMS, X, Y), rtol=1e-4, atol=1e-5)
    assert planned.get_last_executable().plan.num_passes == 2


def test_rows_of_a_part_are_returned_if_the_gradient_does_not_need_them():
    def step(params, x, y):
        def loss(params):
            out = outputs(params, x)
            return jnp.mean((out - y) ** 2), jnp.exp(out[: len(x) // 2])

        return jax.value_and_grad(loss, has_aux=True)(params)

    planned = autopar.parallelize(step, method=METHODS["shards"], donate_argnums=())
    assert_allclose(planned(PARAMS, X, Y), step(PARAMS, X, Y), rtol=1e-4, atol=1e-5)


def test_returned_rows_of_a_part_that_the_gradient_needs_are_refused():
    def step(params, x, y):
        def loss(params):
            half = outputs(params, x)[: len(x) // 2]
            return jnp.mean(half**2), half

        return jax.value_and_grad(loss, has_aux=True)(params)

    planned = autopar.parallelize(step, method=METHODS["shards"], donate_argnums=())
    with pytest.raises(autopar.MicrobatchError, match=r"slice at .*test_parts_of_batch.py.*part"):
        planned(PARAMS, X, Y)


def assert_refused(loss, words, examples=EXAMPLES, count=2):
    method = autopar.ShardParallel(devices=1, num_micro_batches=count)
    planned = autopar.parallelize(step_of(loss), method=method, donate_argnums=())
    with pytest.raises(autopar.MicrobatchError, match=words):
        planned(PARAMS, X[:examples], Y[:examples])


def test_a_microbatch_with_a_single_example_of_each_part_is_refused():
    assert_refused(chunks_in_a_scan, "use fewer microbatches", count=4)


def of_pairs(params, x):
    """Return a row for each two neighbouring examples."""
    return jnp.tanh(outputs(params, x).reshape(-1, 6))


def test_runs_of_examples_that_cannot_be_divided_into_the_parts_are_refused():
    """A microbatch of six examples has three pairs, which have no halves."""

    def loss(params, x, y):
        first, second = jnp.split(outputs(params, x), 2)
        return jnp.mean(of_pairs(params, x)) + jnp.mean((first - second) ** 2)

    words = rf"{__file__}:\d+ takes one of 2 equal parts of the batch.* 3 runs of examples"
    assert_refused(loss, words, examples=12)


def test_rows_that_are_joined_with_half_a_batch_of_zeros_are_in_halves():
    def loss(params, x, y):
        out = outputs(params, x)
        zeros = jnp.zeros((len(x) // 2, 3))
        shifted = jnp.concatenate([zeros, y, zeros])
        return jnp.mean(of_pairs(params, x)) + jnp.mean(shifted * jnp.concatenate([out, out]))

    words = rf"{__file__}:\d+ takes one of 2 equal parts of the batch.* 3 runs of examples"
    assert_refused(loss, words, examples=12)


def test_rows_that_a_pad_shifts_are_not_all_equal():
    """A pad that cuts as many rows as it adds keeps the shape."""

    def loss(params, x, y):
        half = len(x) // 2
        shifted = lax.pad(jnp.ones((len(x), 1)), 0.0, [(half, -half, 0), (0, 0, 0)])
        return jnp.mean(of_pairs(params, x)) + jnp.mean(outputs(params, x) * shifted)

    step, args = step_of(loss), (PARAMS, X[:12], Y[:12])
    method = autopar.ShardParallel(devices=1, num_micro_batches=2)
    planned = autopar.parallelize(step, method=method, donate_argnums=())
    assert_allclose(planned(*args), step(*args), rtol=1e-4, atol=1e-5)


def test_a_first_pass_completes_each_value_once():
    """A layer in two chunks precedes a sort of the examples, and one in groups of four follows."""

    def loss(params, x, y):
        def add(total, chunk):
            chunk = jnp.tanh(chunk @ params["in"][:3, :3])
            return total + chunk.sum(0), chunk

        out = outputs(params, x)
        chunks = lax.scan(jax.checkpoint(add), jnp.zeros(3), out.reshape(2, -1, 3))[1]
        chunked = chunks.reshape(out.shape)
        ordered = chunked[jnp.argsort(chunked[:, 0])] + out
        weights = (y[: len(x) // 4, 0] > 0).astype(y.dtype)
        means = jnp.tanh(ordered @ params["in"][:3]).reshape(len(weights), -1).mean(-1)
        return (means * weights).sum() / weights.sum()

    assert_refused(loss, "sort at")
