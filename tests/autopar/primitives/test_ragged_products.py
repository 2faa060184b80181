"""Ragged products, of tokens sorted by expert, are sharded over tokens and over experts."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import autopar
from autopar.primitives import kernel_of
from autopar.testing import assert_allclose
from autopar.tracing.trace import trace
from tests.autopar.sharding.equation_cases import ints
from tests.autopar.sharding.shard_by_shard import equations
from tests.tiers import slow

NUM_EXPERTS, TOP = 8, 2


def experts(params: Any, tokens: Any) -> Any:
    """Send each token to two experts, without a capacity."""
    weights, chosen = lax.top_k(jax.nn.softmax(tokens @ params["router"]), TOP)
    order = jnp.argsort(chosen.reshape(-1))
    sizes = jnp.bincount(chosen.reshape(-1), length=NUM_EXPERTS).astype(jnp.int32)
    hidden = jax.nn.silu(lax.ragged_dot(tokens[order // TOP], params["in"], sizes))
    out = lax.ragged_dot(hidden, params["out"], sizes)
    by_token = out[jnp.argsort(order)].reshape(-1, TOP, out.shape[-1])
    return (by_token * weights[..., None]).sum(1)


def step(params: Any, batch: Any) -> Any:
    value, grads = jax.value_and_grad(lambda p: jnp.mean((experts(p, batch) - batch) ** 2))(params)
    return jax.tree.map(lambda p, g: p - g, params, grads), value


def arguments() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    shapes = {
        "router": (16, NUM_EXPERTS),
        "in": (NUM_EXPERTS, 16, 32),
        "out": (NUM_EXPERTS, 32, 16),
    }
    params = {k: rng.standard_normal(shape).astype(np.float32) / 4 for k, shape in shapes.items()}
    return params, rng.standard_normal((64, 16)).astype(np.float32)


def by_experts(axis: Any) -> Any:
    return {"router": P(), "in": P(axis), "out": P(axis)}


@pytest.mark.parametrize(
    "method",
    [
        autopar.ShardParallel((2, 4)),
        *slow(
            autopar.Zero3Parallel(8),
            autopar.ManualShardParallel((8,), in_specs=(by_experts("x"), P("x"))),
        ),
        autopar.ManualShardParallel((2, 4), in_specs=(by_experts("x"), P("y"))),
    ],
    ids=["microbatches", "zero3", "an expert per device", "experts and tokens on other axes"],
)
def test_a_mixture_of_experts_equals_one_device(method):
    args = arguments()
    planned = autopar.parallelize(step, method=method)
    assert_allclose(planned(*args), jax.jit(step)(*args), rtol=1e-5, atol=1e-5)
    warnings = planned.get_executable(*args).plan.warnings
    assert not any("computed whole" in warning for warning in warnings)


def test_tokens_of_a_single_expert_each_equal_one_device():
    """The groups of the rows are the keys of the sort, as they are."""

    def expert(params, tokens):
        scores = jax.nn.softmax(tokens @ params["router"])
        chosen = scores.argmax(-1)
        order = jnp.argsort(chosen)
        sizes = jnp.bincount(chosen, length=NUM_EXPERTS).astype(jnp.int32)
        rows = lax.ragged_dot(tokens[order], params["in"], sizes)
        return rows[jnp.argsort(order)].sum(-1) * scores.max(-1)

    assert_equals_one_device(expert)


def assert_equals_one_device(layer):
    def step(params, batch):
        value, grads = jax.value_and_grad(lambda p: (layer(p, batch) ** 2).mean())(params)
        return jax.tree.map(lambda p, g: p - g, params, grads), value

    args = arguments()
    planned = autopar.parallelize(step, method=autopar.ShardParallel((2, 4), num_micro_batches=2))
    assert_allclose(planned(*args), jax.jit(step)(*args), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("beneath", ["zeros", "rows"])
def test_tokens_that_are_written_back_equal_one_device(beneath):
    """JAX differentiates the updates that were written last: here, all of them."""

    def layer(params, tokens):
        weights, chosen = lax.top_k(jax.nn.softmax(tokens @ params["router"]), TOP)
        order = jnp.argsort(chosen.reshape(-1))
        counts = jax.nn.one_hot(chosen.reshape(-1), NUM_EXPERTS).sum(0)
        sorted_rows = tokens[order // TOP]
        rows = lax.ragged_dot(sorted_rows, params["in"][..., :16], counts.astype(jnp.int32))
        start = jnp.zeros_like(rows) if beneath == "zeros" else sorted_rows
        by_token = start.at[order].set(rows).reshape(-1, TOP, 16)
        return (by_token * weights[..., None]).sum(1)

    assert_equals_one_device(layer)


def test_experts_that_are_larger_than_the_tokens_stay_where_they_are():
    """To gather experts of 4096 by 8192 takes longer than to gather 256 tokens."""
    shapes = {"router": (4096, 8), "in": (8, 4096, 8192), "out": (8, 8192, 4096)}
    params = {k: jax.ShapeDtypeStruct(shape, np.float32) for k, shape in shapes.items()}
    tokens = jax.ShapeDtypeStruct((256, 4096), np.float32)
    plan = autopar.plan_step(step, (params, tokens), cluster="dgx_h100", mesh_shape=(8,))
    assert all(
        any(value.spec) for value in plan.stages[0].inputs if value.path in ("0/in", "0/out")
    )
    gathered = [
        c
        for c in plan.stages[0].constraints
        if c.side == "in" and c.shape[0] == NUM_EXPERTS and len(c.shape) == 3 and not any(c.spec)
    ]
    assert not gathered


@pytest.mark.parametrize(
    ("shards", "share"),
    [
        ([(32, 4), (8, 4, 6), (8,), (32, 6)], 1 / 2),
        ([(64, 4), (2, 4, 6), (8,), (64, 6)], 1 / 4),
        ([(32, 4), (2, 4, 6), (8,), (32, 6)], 1 / 8),
        ([(64, 4), (8, 4, 3), (8,), (64, 3)], 1 / 2),
    ],
    ids=["rows", "groups", "rows and groups", "columns"],
)
def test_a_device_multiplies_its_rows_of_its_groups(shards, share):
    sizes = np.full(8, 8, np.int32)
    args = ints(64, 4), ints(8, 4, 6)
    ((eqn, _),) = equations("ragged_dot_general", lambda x, y: lax.ragged_dot(x, y, sizes), args)
    # XLA:GPU multiplies each row with the matrices of all 8 groups.
    assert kernel_of(eqn).flops == 8 * (2 * 64 * 4 * 6)
    assert kernel_of(eqn, 0.0, shards).flops == share * kernel_of(eqn).flops


def primitives(layer: Any, tokens: int = 64) -> set[str]:
    return {eqn.primitive.name for eqn in gradient_eqns(layer, tokens)}


def gradient_eqns(layer: Any, tokens: int = 64) -> list[Any]:
    params, _ = arguments()
    batch = jax.ShapeDtypeStruct((tokens, 16), np.float32)

    def loss(params: Any, batch: Any) -> Any:
        return (layer(params, batch) ** 2).sum()

    return trace(jax.grad(loss), (params, batch), (1,)).jaxpr.eqns


def routed(params: Any, tokens: Any) -> tuple[Any, Any, Any]:
    _, chosen = lax.top_k(tokens @ params["router"], TOP)
    chosen = chosen.reshape(-1)
    return jnp.argsort(chosen), jnp.bincount(chosen, length=NUM_EXPERTS).astype(jnp.int32), chosen


def by_segment_sum(params: Any, tokens: Any) -> Any:
    order, sizes, _ = routed(params, tokens)
    rows = lax.ragged_dot(tokens[order // TOP], params["in"], sizes)
    return jax.ops.segment_sum(rows, order // TOP, len(tokens))


@pytest.mark.parametrize("layer", [experts, by_segment_sum])
def test_tokens_are_not_sorted_where_only_products_need_their_order(layer):
    names = primitives(layer)
    assert "grouped_dot" in names
    assert not names & {"sort", "ragged_dot_general"}


def first_rows(params: Any, tokens: Any) -> Any:
    order, sizes, _ = routed(params, tokens)
    return lax.ragged_dot(tokens[order // TOP], params["in"], sizes)[:16]


def other_sizes(params: Any, tokens: Any) -> Any:
    order, sizes, _ = routed(params, tokens)
    return lax.ragged_dot(tokens[order // TOP], params["in"], jnp.minimum(sizes, 4)).sum(0)


def weighted_by_place(params: Any, tokens: Any) -> Any:
    order, sizes, _ = routed(params, tokens)
    rows = lax.ragged_dot(tokens[order // TOP], params["in"], sizes)
    return (rows * jnp.arange(2.0 * len(tokens))[:, None]).sum(0)


def compared(keys: Any) -> Any:
    return keys == jnp.arange(NUM_EXPERTS).reshape(-1, *[1] * keys.ndim)


def places_of(groups: Any, side: Any, more: int = 0) -> Any:
    """Return where each expert's rows start or end among sorted rows."""
    experts = jnp.arange(NUM_EXPERTS + more)
    return jnp.searchsorted(groups, experts, side=side, method="compare_all")


@pytest.mark.parametrize(
    "count",
    [
        lambda chosen, order: compared(chosen).sum((1, 2)),
        lambda chosen, order: compared(chosen.reshape(-1)).sum(1),
        lambda chosen, order: compared(chosen.reshape(-1)[order]).sum(1),
        lambda chosen, order: jax.vmap(lambda e: (chosen == e).sum())(jnp.arange(NUM_EXPERTS)),
        lambda chosen, order: jnp.bincount(chosen.reshape(-1)[order], length=NUM_EXPERTS),
        lambda chosen, order: jnp.bincount(jnp.sort(chosen.reshape(-1)), length=NUM_EXPERTS),
        lambda chosen, order: jnp.diff(places_of(chosen.reshape(-1)[order], "right"), prepend=0),
        lambda chosen, order: (
            places_of(jnp.sort(chosen.reshape(-1)), "right")
            - places_of(jnp.sort(chosen.reshape(-1)), "left")
        ),
        lambda chosen, order: jnp.diff(places_of(chosen.reshape(-1)[order], "left", 1)),
    ],
)
def test_tokens_of_experts_may_be_counted_in_any_order(count):
    def layer(params, tokens):
        weights, chosen = lax.top_k(tokens @ params["router"], TOP)
        order = jnp.argsort(chosen.reshape(-1))
        sizes = count(chosen, order).astype(jnp.int32)
        rows = lax.ragged_dot(tokens[order // TOP], params["in"], sizes)
        by_token = rows[jnp.argsort(order)].reshape(len(tokens), TOP, -1)
        return (by_token * weights[..., None]).sum(1)

    assert "sort" not in primitives(layer)
    assert_equals_one_device(layer)


def starts_of(sizes: Any) -> Any:
    return jnp.cumsum(sizes) - sizes


def groups_of_rows(sizes: Any, rows: int) -> Any:
    started = jnp.zeros(rows, jnp.int32).at[starts_of(sizes)].add(1)
    return jnp.cumsum(started) - 1


def repeated(sizes: Any, rows: int) -> Any:
    return jnp.repeat(jnp.arange(len(sizes)), sizes, total_repeat_length=rows)


def ended_groups(sizes: Any, rows: int) -> Any:
    return (jnp.arange(rows)[:, None] >= jnp.cumsum(sizes)).sum(1)


@pytest.mark.parametrize(
    ("find", "num_experts", "groups"),
    [
        (lax.top_k, NUM_EXPERTS, repeated),
        (lax.top_k, NUM_EXPERTS - 2, repeated),
        (lax.approx_max_k, NUM_EXPERTS, groups_of_rows),
        (lax.top_k, NUM_EXPERTS, ended_groups),
    ],
    ids=["repeat", "tokens of no expert", "cumsum", "comparison"],
)
def test_a_scale_of_each_expert_is_looked_up_for_sorted_tokens(find, num_experts, groups):
    def layer(params, tokens):
        weights, chosen = find(tokens @ params["router"], TOP)
        order = jnp.argsort(chosen.reshape(-1))
        sizes = jax.nn.one_hot(chosen, num_experts, dtype=jnp.int32).sum((0, 1))
        rows = lax.ragged_dot(tokens[order // TOP], params["in"][:num_experts], sizes)
        of_row = groups(sizes, len(rows))
        rows = rows * params["out"][of_row, 0, :1] + params["out"][of_row, 1, :1]
        by_token = rows[jnp.argsort(order)].reshape(len(tokens), TOP, -1)
        return (by_token * weights[..., None]).sum(1)

    assert "sort" not in primitives(layer)
    assert_equals_one_device(layer)


def test_rows_of_no_expert_are_masked_where_they_would_be_sorted():
    def layer(params, tokens):
        order, _, chosen = routed(params, tokens)
        sizes = jnp.bincount(chosen, length=NUM_EXPERTS - 2).astype(jnp.int32)
        has_expert = jnp.arange(len(order))[:, None] < sizes.sum()
        rows = jnp.where(has_expert, tokens[order // TOP], 0)
        rows = lax.ragged_dot(rows, params["in"][:-2], sizes)
        rows = jnp.where(has_expert, rows, 1)
        return rows[jnp.argsort(order)].reshape(len(tokens), -1)

    assert "sort" not in primitives(layer)
    assert_equals_one_device(layer)


def test_equal_rows_need_no_order():
    """A scale of each expert may be looked up by a product of ones."""

    def layer(params, tokens):
        order, sizes, _ = routed(params, tokens)
        rows = lax.ragged_dot(tokens[order // TOP], params["in"], sizes)
        rows *= lax.ragged_dot(jnp.ones((len(rows), 1)), params["out"][:, :1, :1], sizes)
        return jax.ops.segment_sum(rows, order // TOP, len(tokens))

    assert "sort" not in primitives(layer)
    assert_equals_one_device(layer)


@pytest.mark.parametrize(
    "groups",
    [
        lambda sizes, rows: groups_of_rows(sizes[::-1], rows),
        lambda sizes, rows: ended_groups(sizes[::-1], rows),
        lambda sizes, rows: (jnp.arange(rows)[:, None] > jnp.cumsum(sizes)).sum(1),
        lambda sizes, rows: (jnp.arange(1, rows + 1)[:, None] >= jnp.cumsum(sizes)).sum(1),
        lambda sizes, rows: groups_of_rows(jnp.minimum(sizes, 4), rows),
        lambda sizes, rows: jnp.cumsum(
            jnp.zeros(rows, jnp.int32).at[starts_of(sizes)].add(1, mode="clip")
        ),
    ],
    ids=[
        "other order",
        "ends in another order",
        "rows after the ends",
        "other places",
        "other sizes",
        "an empty last group starts in a row of another",
    ],
)
def test_tokens_are_sorted_where_other_groups_than_theirs_are_looked_up(groups):
    def layer(params, tokens):
        order, sizes, _ = routed(params, tokens)
        rows = lax.ragged_dot(tokens[order // TOP], params["in"], sizes)
        of_row = jnp.clip(groups(sizes, len(rows)), 0, NUM_EXPERTS - 1)
        rows = rows * params["out"][of_row, 0, :1]
        return jax.ops.segment_sum(rows, order // TOP, len(tokens))

    assert "sort" in primitives(layer)


def test_indices_of_unsorted_tokens_are_not_declared_sorted():
    def layer(params, tokens):
        order, sizes, chosen = routed(params, tokens)
        experts = chosen[order]
        rows = lax.ragged_dot(tokens[order // TOP], params["in"], sizes)
        return jax.ops.segment_sum(rows, experts, NUM_EXPERTS, indices_are_sorted=True)

    assert "sort" not in primitives(layer)
    assert not any(eqn.params.get("indices_are_sorted") for eqn in gradient_eqns(layer))


def sizes_in_other_order(params: Any, tokens: Any) -> Any:
    order, _, chosen = routed(params, tokens)
    sizes = jnp.diff(places_of(chosen[order], "right"), prepend=0)[::-1].astype(jnp.int32)
    return lax.ragged_dot(tokens[order // TOP], params["in"], sizes).sum(0)


def sizes_of_next_experts(params: Any, tokens: Any) -> Any:
    order, _, chosen = routed(params, tokens)
    ends = places_of(chosen[order], "right")
    sizes = jnp.diff(ends, append=len(order)).astype(jnp.int32)
    return lax.ragged_dot(tokens[order // TOP], params["in"], sizes).sum(0)


@pytest.mark.parametrize(
    "layer",
    [first_rows, other_sizes, weighted_by_place, sizes_in_other_order, sizes_of_next_experts],
)
def test_tokens_are_sorted_where_something_else_depends_on_their_order(layer):
    assert {"sort", "ragged_dot_general"} <= primitives(layer)


@pytest.mark.parametrize(("tokens", "is_sorted"), [(1024, False), (1025, True)])
def test_tokens_are_sorted_where_their_counts_may_be_rounded(tokens, is_sorted):
    """float16 has no number between 2048 and 2050."""

    def layer(params, tokens):
        order, _, chosen = routed(params, tokens)
        sizes = jax.nn.one_hot(chosen, NUM_EXPERTS, dtype=jnp.float16).sum(0).astype(jnp.int32)
        rows = lax.ragged_dot(tokens[order // TOP], params["in"], sizes)
        return jax.ops.segment_sum(rows, order // TOP, len(tokens))

    assert ("sort" in primitives(layer, tokens)) is is_sorted
