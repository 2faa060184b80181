"""Loops with an iteration for each example, or for some neighbouring rows, in microbatches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopar
from autopar.ir.graph import is_backward
from autopar.testing import assert_allclose
from tests.tiers import slow

RNG = np.random.default_rng(0)
EXAMPLES, TIME, WIDTH, CLASSES = 16, 6, 8, 5
PARAMS = {
    "first": (RNG.standard_normal((WIDTH, WIDTH)) / 3).astype(np.float32),
    "last": RNG.standard_normal((WIDTH, CLASSES)).astype(np.float32),
}
BATCH = {
    "x": RNG.standard_normal((EXAMPLES, TIME, WIDTH)).astype(np.float32),
    "label": RNG.integers(0, CLASSES, (EXAMPLES, TIME)),
    "count": RNG.integers(1, 4, EXAMPLES).astype(np.int32),
}
KEY = jax.random.key(0)


def cross_entropy(params, hidden, label):
    logits = jax.nn.log_softmax(hidden @ params["last"])
    return -jnp.take_along_axis(logits, label[..., None], -1).sum()


def of_example(params):
    return jax.checkpoint(lambda pair: cross_entropy(params, *pair))


def mapped(params, hidden, batch):
    return lax.map(of_example(params), (hidden, batch["label"])).sum()


def mapped_four_at_a_time(params, hidden, batch):
    return lax.map(of_example(params), (hidden, batch["label"]), batch_size=4).sum()


def in_chunks_of_tokens(params, hidden, batch):
    """Chunks of two examples, as a loss does whose logits would take too much memory."""
    chunks = hidden.reshape(-1, 2 * TIME, WIDTH), batch["label"].reshape(-1, 2 * TIME)
    return lax.map(of_example(params), chunks).sum()


def in_chunks_of_an_example(params, hidden, batch):
    chunks = hidden.reshape(-1, TIME // 2, WIDTH), batch["label"].reshape(-1, TIME // 2)
    return lax.scan(lambda total, pair: (total + of_example(params)(pair), None), 0.0, chunks)[0]


def summed_and_counted(params, hidden, batch):
    def add(sums, example):
        total, count = sums
        hidden, label = example
        return (total + of_example(params)(example), count + (label > 1).sum() / 2), hidden * 2

    sums, doubled = lax.scan(add, (0.0, 0.0), (hidden, batch["label"]))
    return sums[0] + 0.1 * sums[1] + (doubled**2).sum()


def summed_in_a_checkpoint(params, hidden, batch):
    def add(total, example):
        return total + cross_entropy(params, *example), None

    return lax.scan(jax.checkpoint(add), 0.0, (hidden, batch["label"]))[0]


def with_keys(params, hidden, batch):
    def noisy(example):
        hidden, label, key = example
        return cross_entropy(params, hidden * jax.random.uniform(key, hidden.shape), label)

    return lax.map(noisy, (hidden, batch["label"], jax.random.split(KEY, len(hidden)))).sum()


def with_loops_and_branches(params, hidden, batch):
    """Each example iterates as often, and chooses the branch, that it says itself."""

    def of(example):
        hidden, label, count = example
        scale = lax.stop_gradient(
            lax.while_loop(lambda c: c[0] < count, lambda c: (c[0] + 1, c[1] * 0.7), (0, 1.0))[1]
        )
        hidden = lax.scan(lambda h, _: (jnp.tanh(h @ params["first"]), None), hidden, None, 2)[0]
        chosen = lax.cond(label[0] > 2, jnp.sin, lambda h: h * 2, hidden)
        return cross_entropy(params, scale * chosen, label)

    return lax.map(of, (hidden, batch["label"], batch["count"])).sum()


LOSSES = {
    loss.__name__: loss
    for loss in (
        mapped,
        mapped_four_at_a_time,
        in_chunks_of_tokens,
        in_chunks_of_an_example,
        summed_and_counted,
        summed_in_a_checkpoint,
        with_keys,
        with_loops_and_branches,
    )
}


def step_of(loss_of):
    def step(params, batch):
        def loss(params):
            hidden = jnp.tanh(batch["x"] @ params["first"])
            return loss_of(params, hidden, batch) / batch["label"].size

        value, gradients = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    return step


METHODS = {
    "shards": autopar.ShardParallel((2, 2), num_micro_batches=2),
    "local accumulation": autopar.DataParallel(2, num_micro_batches=2),
    "pipeline": autopar.PipeshardParallel(4, 2, layer_option=autopar.AutoLayerOption(2)),
}


@pytest.mark.parametrize("method", [METHODS["shards"], *slow(*list(METHODS.values())[1:])])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
def test_a_loop_over_examples_equals_one_device(loss, method):
    step = step_of(loss)
    parallel = autopar.parallelize(step, method=method, donate_argnums=())
    assert_allclose(parallel(PARAMS, BATCH), jax.jit(step)(PARAMS, BATCH), rtol=1e-4, atol=1e-5)


def model_in_chunks(params, hidden, batch):
    def of_example(pair):
        x, label = pair
        return cross_entropy(params, jnp.tanh(x @ params["first"]), label)

    return lax.map(of_example, (batch["x"], batch["label"]), batch_size=4).sum()


def test_a_microbatch_of_one_chunk_takes_its_gradients():
    """A dim of one chunk does not tell whether the chunks or their rows are the examples."""
    step = step_of(model_in_chunks)
    method = autopar.ShardParallel((2,), num_micro_batches=4)
    parallel = autopar.parallelize(step, method=method, donate_argnums=())
    assert_allclose(parallel(PARAMS, BATCH), jax.jit(step)(PARAMS, BATCH), rtol=1e-4, atol=1e-5)
    microbatching = parallel.get_last_executable().step.microbatching
    assert any(is_backward(eqn) for _, eqn in microbatching.body)


def test_a_pipeline_with_a_loop_over_examples_equals_one_device():
    test_a_loop_over_examples_equals_one_device(in_chunks_of_tokens, METHODS["pipeline"])


def largest(params, hidden, batch):
    return lax.scan(lambda m, h: (jnp.maximum(m, h.sum()), None), -1e9, hidden)[0]


def running_total(params, hidden, batch):
    def add(total, h):
        total = total + h.sum()
        return total, total

    return (lax.scan(add, 0.0, hidden)[1] ** 2).sum()


def decayed(params, hidden, batch):
    return lax.scan(lambda mean, h: (0.9 * mean + 0.1 * h.sum(), None), 0.0, hidden)[0]


def decayed_in_halves(params, hidden, batch):
    """Each row of the loop is half an example."""
    halves = hidden.reshape(-1, TIME // 2, WIDTH)

    def step(mean, h):
        return 0.9 * mean + jnp.sin(h @ params["last"]).sum(), h.sum()

    mean, sums = lax.scan(step, 0.0, halves)
    return mean + (sums**2).sum()


def numbered(params, hidden, batch):
    def weigh(carry, h):
        number, total = carry
        return (number + 1, total + number * h.sum()), None

    return lax.scan(weigh, (0, 0.0), hidden)[0][1]


def beside_the_others(params, hidden, batch):
    return lax.map(lambda h: (h * hidden.mean(0)).sum() ** 2, hidden).sum()


def from_one(params, hidden, batch):
    return lax.scan(lambda total, h: (total + h.sum(), None), 1.0, hidden)[0] ** 2


def by_index(params, hidden, batch):
    return lax.fori_loop(0, len(hidden), lambda i, total: total + jnp.sin(hidden[i]).sum() * i, 0.0)


ORDERED = [
    largest,
    running_total,
    decayed,
    decayed_in_halves,
    numbered,
    beside_the_others,
    by_index,
    from_one,
]


@pytest.mark.parametrize("loss", ORDERED)
def test_a_loop_that_carries_more_than_sums_is_exact_or_refused(loss):
    """It is exact if a first pass gives the loop the values of all examples."""
    step = step_of(loss)
    method = autopar.ShardParallel(1, num_micro_batches=2)
    try:
        result = autopar.parallelize(step, method=method, donate_argnums=())(PARAMS, BATCH)
    except autopar.MicrobatchError:
        return
    assert_allclose(result, jax.jit(step)(PARAMS, BATCH), rtol=1e-4, atol=1e-5)


def test_a_carry_that_is_no_sum_is_refused_with_what_to_write():
    """An example's row in two halves can't be given to the loop by a first pass."""
    method = autopar.ShardParallel(1, num_micro_batches=2)
    words = r"loop at .*test_loops_over_examples.py.* carries .*add it to a sum"
    with pytest.raises(autopar.MicrobatchError, match=words):
        autopar.parallelize(step_of(decayed_in_halves), method=method)(PARAMS, BATCH)
