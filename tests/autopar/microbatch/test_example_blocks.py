"""Examples that are the minor part of a dim, as after merging (time, batch)."""

from fractions import Fraction
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.core import Var

import autopar
from autopar.ir.flatten import flatten
from autopar.microbatch.batch_rows import cut_rows
from autopar.microbatch.batch_scaling import BatchScalings
from autopar.microbatch.batch_scaling_rules import BatchScaling
from autopar.microbatch.example_runs import num_parts, num_runs
from autopar.microbatch.same_step import DifferentStepsError
from autopar.testing import assert_allclose

TIME, WIDTH = 6, 4
EXAMPLES, COUNT = 12, 3
MOVES = (
    *("transpose", "merge", "split", "tile", "reverse", "join"),
    *("cut", "part", "pad", "shift", "stride", "spread"),
)


def spread(xp, x, dim, first):
    """Put a zero between neighbours along a dim, and another one before or behind all of them."""
    shape = tuple(2 * size if each == dim else size for each, size in enumerate(x.shape))
    every_second = (slice(None),) * dim + (slice(first, None, 2),)
    if xp is jnp:
        doubled = jax.ShapeDtypeStruct(shape, x.dtype)
        return jax.linear_transpose(lambda rows: rows[every_second], doubled)(x)[0]
    result = np.zeros(shape, x.dtype)
    result[every_second] = x
    return result


def rearranged(xp, x, moves):
    """Move, merge, split, copy, reverse, join and cut dims by the functions of `jnp` or `np`."""
    for move, number in moves:
        dim = number % x.ndim
        if move == "transpose":
            x = xp.moveaxis(x, dim, number // 3 % x.ndim)
        elif move == "merge" and dim + 1 < x.ndim:
            x = x.reshape(*x.shape[:dim], prod(x.shape[dim : dim + 2]), *x.shape[dim + 2 :])
        elif move == "split" and x.shape[dim] % 2 == 0:
            parts = ((2, -1), (-1, 2))[number % 2]
            x = x.reshape(*x.shape[:dim], *parts, *x.shape[dim + 1 :])
        elif move == "tile":
            x = xp.tile(x, [1 + (each == dim) for each in range(x.ndim)])
        elif move == "reverse":
            x = xp.flip(x, dim)
        elif move == "join":
            x = xp.concatenate([x, x + number][:: 1 - 2 * (number % 2)], dim)
        elif move == "cut" and x.shape[dim] % 2 == 0:
            x = xp.split(x, 2, dim)[number % 2]
        elif move == "part" and x.shape[dim] % 3 == 0:
            third = x.shape[dim] // 3
            start = number // 3 % 3 * third
            x = xp.moveaxis(xp.moveaxis(x, dim, 0)[start : start + third], 0, dim)
        elif move == "shift" and x.shape[dim] % 2 == 0:
            first, second = xp.split(x, 2, dim)
            x = xp.concatenate([xp.ones_like(first), first, second], dim)
        elif move == "pad":
            size = (0, x.shape[dim])[:: 1 - 2 * (number % 2)]
            x = xp.pad(x, [size if each == dim else (0, 0) for each in range(x.ndim)])
        elif move == "stride" and x.shape[dim] % (2 + number % 2) == 0:
            stride = 2 + number % 2
            x = x[(slice(None),) * dim + (slice(number // 4 % stride, None, stride),)]
        elif move == "spread":
            x = spread(xp, x, dim, number % 2)
    return xp.exp(x)


@settings(max_examples=25)
@given(st.lists(st.tuples(st.sampled_from(MOVES), st.integers(0, 10)), max_size=7))
def test_rows_are_where_the_scaling_says(moves):
    whole = np.arange(EXAMPLES * COUNT * 2 * 6.0).reshape(-1, 2, 6) / 1000
    small, large = (
        flatten(jax.make_jaxpr(lambda x: rearranged(jnp, x, moves))(rows))
        for rows in (whole[:EXAMPLES], whole)
    )
    try:
        scalings = BatchScalings(small, large, frozenset({0}), COUNT)
    except DifferentStepsError:
        return  # refused
    (result,) = small.outvars
    assert isinstance(result, Var)
    kind = scalings.kinds[result]
    if not isinstance(kind, BatchScaling):
        return  # refused
    chunks = num_runs(scalings, small.eqns, small.invars, {result})
    if chunks % num_parts(scalings, small.eqns):
        return  # refused
    part = rearranged(np, cut_rows(whole, COUNT, chunks)[1], moves)
    runs = np.moveaxis(rearranged(np, whole, moves), kind.dim, 0)
    num_rows = int(chunks * Fraction(kind.blocks or 1))
    own = runs.reshape(num_rows, COUNT, -1)[:, 1]
    rows = np.moveaxis(part, kind.dim, 0)
    assert_allclose(rows.reshape(num_rows, -1), own)


PARAMS = {
    "in": np.linspace(-1, 1, 32, dtype=np.float32).reshape(WIDTH, 8),
    "out": np.linspace(1, -1, 48, dtype=np.float32).reshape(8, 6),
}
BATCH = {
    "x": np.random.default_rng(0).normal(size=(TIME, 8, WIDTH)).astype(np.float32),
    "y": np.arange(TIME * 8).reshape(TIME, 8) % 6,
}


def time_first(between):
    """Return a step of a model whose products have the dims (time * batch, features)."""

    def step(params, batch):
        def loss_fn(params):
            hidden = jax.nn.relu(batch["x"].reshape(-1, WIDTH) @ params["in"])
            logits = between(hidden) @ params["out"]
            labels = jax.nn.one_hot(batch["y"].reshape(-1), 6)
            losses = -(jax.nn.log_softmax(logits) * labels).sum(-1)
            return losses.mean(), logits.reshape(TIME, -1, 6)

        (loss, logits), gradients = jax.value_and_grad(loss_fn, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss, logits

    return step


def attention_with_heads_first(hidden):
    """Attend over time with the dims (heads * batch, time, features)."""
    heads = hidden.reshape(TIME, -1, 2, 4).transpose(2, 1, 0, 3).reshape(-1, TIME, 4)
    mixed = jax.nn.softmax(heads @ heads.transpose(0, 2, 1)) @ heads
    return mixed.reshape(2, -1, TIME, 4).transpose(2, 1, 0, 3).reshape(-1, 8)


def dropout(key, hidden):
    return jnp.where(jax.random.bernoulli(key, 0.5, hidden.shape), hidden, 0)


def dropped_by_keys(hidden):
    return jax.vmap(dropout)(jax.random.split(jax.random.key(1), len(hidden)), hidden)


def dropped_in_layers(hidden):
    """Dropout in each iteration of a scan, first of (time * batch) and then of (batch * time)."""

    def layer(hidden, key):
        hidden = jnp.tanh(dropout(key, hidden)).reshape(TIME, -1, 8)
        hidden = dropout(jax.random.fold_in(key, 1), hidden.swapaxes(0, 1).reshape(-1, 8))
        return hidden.reshape(-1, TIME, 8).swapaxes(0, 1).reshape(-1, 8), None

    return jax.lax.scan(layer, hidden, jax.random.split(jax.random.key(2), 3))[0]


def counted(hidden):
    return hidden * jnp.arange(len(hidden))[:, None] / len(hidden)


@pytest.mark.parametrize(
    "method",
    [
        autopar.ShardParallel((2, 2), num_micro_batches=2),
        autopar.PipeshardParallel(2, 2, layer_option=autopar.AutoLayerOption(2)),
    ],
    ids=["sharded", "pipeline"],
)
@pytest.mark.parametrize(
    "between",
    [
        attention_with_heads_first,
        partial(dropout, jax.random.key(0)),
        dropped_by_keys,
        dropped_in_layers,
        counted,
    ],
    ids=["attention", "dropout", "a key for each row", "dropout in a scan", "position"],
)
def test_a_batch_that_is_merged_into_another_dim_is_exact(between, method):
    step = time_first(between)
    parallel = autopar.parallelize(step, method=method, batch_argnums={1: 1}, donate_argnums=())
    assert_allclose(parallel(PARAMS, BATCH), jax.jit(step)(PARAMS, BATCH), rtol=1e-4, atol=1e-5)


def in_both_orders(hidden):
    return hidden + hidden.reshape(TIME, -1, 8).swapaxes(0, 1).reshape(-1, 8)


def in_both_orders_of_dropout(hidden):
    """One array of random bits for the rows in both orders."""
    kept = jax.random.bernoulli(jax.random.key(0), 0.5, hidden.shape)
    other = hidden.reshape(TIME, -1, 8).swapaxes(0, 1).reshape(-1, 8)
    return jnp.where(kept, hidden, 0) + jnp.where(kept, other, 0)


def repeated(rows, times):
    return jnp.repeat(rows, times, axis=0)


def in_turns(rows, times):
    return jnp.broadcast_to(rows, (times, *rows.shape)).reshape(-1, WIDTH)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("expand", [repeated, in_turns])
def test_rows_that_parts_of_the_batch_share_are_those_of_the_whole(expand, parts, count):
    """Each of `parts` slices of the batch has weights of its own (Wen et al. 2020)."""

    def step(params, x):
        def loss_fn(params):
            weights = expand(params["part"], len(x) // parts)
            return (jnp.tanh(x * weights) @ params["in"]).mean()

        return jax.value_and_grad(loss_fn)(params)

    random = np.random.default_rng(1)
    part, x = (random.standard_normal((n, WIDTH)).astype(np.float32) for n in (parts, 16))
    args = {"in": PARAMS["in"], "part": part}, x
    method = autopar.ShardParallel(1, num_micro_batches=count)
    parallel = autopar.parallelize(step, method=method, batch_argnums=(1,), donate_argnums=())
    assert_allclose(parallel(*args), jax.jit(step)(*args), rtol=1e-4, atol=1e-6)


def assert_refused(step, words):
    method = autopar.ShardParallel(1, num_micro_batches=2)
    parallel = autopar.parallelize(step, method=method, batch_argnums={1: 1})
    args: tuple[Any, ...] = PARAMS, BATCH
    with pytest.raises(autopar.MicrobatchError, match=words):
        parallel(*args)


@pytest.mark.parametrize(
    ("between", "words"),
    [
        (in_both_orders, r"add at .*test_example_blocks.py.*\(time, batch, \.\.\.\)"),
        (in_both_orders_of_dropout, "merged into it"),
        (lambda hidden: hidden - hidden[0], "examples"),
        (lambda hidden: jnp.cumsum(hidden, 0), "examples"),
    ],
    ids=["both orders", "bits in both orders", "first example", "earlier examples"],
)
def test_rows_in_another_order_are_refused(between, words):
    assert_refused(time_first(between), words)


def test_rows_in_another_order_are_returned_if_the_step_reorders_them_after_the_loss():
    def step(params, batch):
        params, loss, logits = time_first(lambda hidden: hidden)(params, batch)
        return params, loss, jnp.exp(logits.reshape(-1, 6))

    method = autopar.ShardParallel(1, num_micro_batches=2)
    parallel = autopar.parallelize(step, method=method, batch_argnums={1: 1}, donate_argnums=())
    assert_allclose(parallel(PARAMS, BATCH), jax.jit(step)(PARAMS, BATCH), rtol=1e-4, atol=1e-5)


def test_rows_that_the_loss_returns_in_another_order_are_put_together():
    def step(params, batch):
        def loss_fn(params):
            logits = batch["x"].reshape(-1, WIDTH) @ params["in"]
            return (logits**2).mean(), logits

        return jax.value_and_grad(loss_fn, has_aux=True)(params)

    method = autopar.ShardParallel((2, 2), num_micro_batches=2)
    parallel = autopar.parallelize(step, method=method, batch_argnums={1: 1}, donate_argnums=())
    assert_allclose(parallel(PARAMS, BATCH), jax.jit(step)(PARAMS, BATCH), rtol=1e-4, atol=1e-5)


def step_of_pairs(loss_of_scores):
    """Return a step that scores two arrays of examples, joined to one."""

    def step(weights, batch):
        def loss_fn(weights):
            joined = jnp.concatenate([batch["chosen"], batch["rejected"]])
            return loss_of_scores(jnp.tanh(joined @ weights).sum(-1), batch["weight"])

        loss, gradient = jax.value_and_grad(loss_fn)(weights)
        return weights - 0.1 * gradient, loss

    return step


def preferences(scores, weight):
    chosen, rejected = scores[: len(weight)], scores[len(weight) :]
    weights = jnp.concatenate([weight, jnp.ones_like(weight)])
    return -jax.nn.log_sigmoid(chosen - rejected).mean() + (scores * weights).sum() / weights.sum()


def by_array(scores, weight):
    """Weigh each of the joined arrays by a row of a table, repeated for its examples."""
    return (scores * jnp.repeat(jnp.array([1.0, -0.5]), len(weight)) + scores**2).mean()


def without_first(scores, weight):
    return scores[1:].mean()


def across_the_border(scores, weight):
    return (scores[len(weight) // 2 : -len(weight) // 2] ** 2).mean()


PAIRS = {
    "chosen": BATCH["x"][0],
    "rejected": BATCH["x"][1],
    "weight": np.linspace(0.5, 1, 8, dtype=np.float32),
}


def run_on_pairs(loss_of_scores):
    step = step_of_pairs(loss_of_scores)
    method = autopar.ShardParallel(1, num_micro_batches=2)
    parallel = autopar.parallelize(step, method=method, donate_argnums=())
    return parallel(PARAMS["in"], PAIRS), jax.jit(step)(PARAMS["in"], PAIRS)


@pytest.mark.parametrize("loss_of_scores", [preferences, by_array, without_first])
def test_arrays_of_examples_may_be_joined_and_cut_again(loss_of_scores):
    result, expected = run_on_pairs(loss_of_scores)
    assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


def test_every_second_example_takes_no_first_pass():
    def step(weights, x):
        def loss_fn(weights):
            scores = jnp.tanh(x @ weights).sum(-1)
            return -jax.nn.log_sigmoid(scores[0::2] - scores[1::2]).mean()

        return jax.value_and_grad(loss_fn)(weights)

    method = autopar.ShardParallel(1, num_micro_batches=2)
    parallel = autopar.parallelize(step, method=method, donate_argnums=())
    x = BATCH["x"][0]
    assert_allclose(parallel(PARAMS["in"], x), jax.jit(step)(PARAMS["in"], x), rtol=1e-5, atol=1e-6)
    assert parallel.get_last_executable().plan.num_passes == 1


def test_a_first_pass_cuts_between_other_examples():
    result, expected = run_on_pairs(across_the_border)
    assert_allclose(result, expected, rtol=1e-5, atol=1e-6)
