"""Syncs at random places of random functions keep values and gradients of one device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.directives import (
    DirectiveError,
    ModelSchedule,
    VerificationError,
    Verify,
    build,
    create_schedule,
)
from tests.autopar.directives.scheduled_models import collectives, mlp_schedule

# (op, axis, backward) of the sync of the first layer, whose output is split by features; the value
# says whether the second kernel is split
FIRST = {
    ("all_gather", None, "scatter"): False,
    ("all_gather", 1, "reduce_scatter"): True,
    ("all_gather", -1, None): False,
    ("RS->RR", None, "scatter"): False,
    ("RS->RR", None, "reduce_scatter"): True,
    ("RS->SR", None, None): False,
    (None, None, None): True,
}
# (op, axis) of the sync of the second layer, if its kernel is split and if it is not
SECOND = {
    True: [("all_reduce", None), ("reduce_scatter", 0), ("reduce_scatter", -1)],
    False: [(None, None), ("scatter", 0), ("RR->SR", None), ("RR->RS", None)],
}
# (op, axis) of the sync of the second layer if its input is split by rows
SPLIT_BY_ROWS = [(None, None), ("SR->RS", None), ("SR->RR", None), ("all_gather", 0)]


def layers(params: Any, x: jax.Array) -> jax.Array:
    with jax.named_scope("first"):
        x = jnp.tanh(x @ params["first"])
    with jax.named_scope("second"):
        return x @ params["second"]


def layers_schedule(rows: int, hidden: int, out: int, ways: Any) -> tuple[ModelSchedule, jax.Array]:
    params = {"first": jnp.ones((8, hidden)), "second": jnp.ones((hidden, out))}
    x = jax.random.normal(jax.random.key(0), (rows, 8))
    return create_schedule(layers, params, [x], mesh=ways), x


@pytest.mark.slow
@settings(max_examples=12)
@given(st.data())
def test_any_valid_sync_keeps_the_value_and_every_gradient(data: st.DataObject) -> None:
    ways = data.draw(st.sampled_from([1, 2, 4]))
    sch, x = layers_schedule(*(ways * data.draw(st.integers(1, 3)) for _ in range(3)), ways)
    sch.shard("first", axis=1)
    op, axis, backward = data.draw(st.sampled_from(list(FIRST)))
    contracts = FIRST[op, axis, backward]
    # a sync after the first layer and one before the second are equivalent
    path, mode = data.draw(st.sampled_from([("first", "fwd_post"), ("second", "fwd_pre")]))
    if op is not None:
        sch[path].sync(
            mode, op, axis=axis, backward=backward or ("scatter" if not contracts else None)
        )
    if contracts:
        sch.shard("second", axis=0)
    op, axis = data.draw(st.sampled_from(SPLIT_BY_ROWS if op == "RS->SR" else SECOND[contracts]))
    if op is not None:
        sch["second"].sync("fwd_post", op, axis=axis)
    Verify(sch, [x]).check()


@pytest.mark.parametrize(
    ("op", "options", "forward", "backward"),
    [
        ("scatter", {"axis": 0}, {}, {"all-gather": 1}),
        ("RR->SR", {}, {}, {"all-gather": 1}),
    ],
)
def test_gradients_of_a_scatter_are_gathered(
    op: str, options: Any, forward: Any, backward: Any
) -> None:
    sch, x = layers_schedule(4, 16, 8, 4)
    sch["first"].sync("fwd_post", op, **options)
    Verify(sch, [x]).check()
    run = build(sch).apply
    assert collectives(jax.jit(run).lower(sch.params, x).compile()) == forward
    loss = jax.jit(jax.grad(lambda x, params: jnp.sum(run(params, x) ** 2)))
    assert collectives(loss.lower(x, sch.params).compile()) == backward


@pytest.mark.parametrize("backward", ["scatter", "reduce_scatter"])
def test_backward_selects_the_collective_of_an_all_gathers_gradient(backward: Any) -> None:
    """Replicated consumers let each device keep its part; sharded consumers need a sum."""
    sch, x = layers_schedule(4, 16, 8, 4)
    sch.shard("first", axis=1)
    sch["second"].sync("fwd_pre", "all_gather", backward=backward)
    if backward == "reduce_scatter":
        sch.shard("second", axis=1)
        sch["second"].sync("fwd_post", "RS->RR")
    Verify(sch, [x]).check()
    loss = jax.jit(jax.grad(lambda p: jnp.sum(build(sch).apply(p, x) ** 2)))
    assert ("reduce-scatter" in collectives(loss.lower(sch.params).compile())) == (
        backward == "reduce_scatter"
    )


@pytest.mark.parametrize(
    ("mode", "op", "options", "message"),
    [
        (
            "fwd_mid",
            "all_reduce",
            {},
            "sync mode 'fwd_mid', expected 'fwd_pre', 'fwd_post' or 'bwd_post'",
        ),
        ("bwd_post", "all_gather", {}, "of gradients: expected 'all_reduce', or a function"),
        ("bwd_post", "SR->RS", {}, "of gradients: expected 'all_reduce', or a function"),
        (
            "fwd_pre",
            "all_reduce",
            {},
            "before a module: put it after the module that makes the partial sum",
        ),
        ("fwd_post", "reduce_scatter", {}, "needs axis=, the array dim to scatter along"),
        ("fwd_post", "scatter", {}, "needs axis="),
        ("fwd_post", "RS->SRR", {}, "expected the same dims on both sides, at most one of them S"),
        ("fwd_post", "SS->RR", {}, "at most one of them S"),
        ("fwd_post", "RS->RS", {}, "expected the same dims on both sides"),
        (
            "fwd_post",
            "psum",
            {},
            "expected one of all_reduce, all_gather, reduce_scatter, scatter, a change of layout",
        ),
    ],
)
def test_an_invalid_sync_is_refused_when_it_is_given(
    mode: Any, op: str, options: Any, message: str
) -> None:
    with pytest.raises(DirectiveError, match=message):
        mlp_schedule()["linear1"].sync(mode, op, **options)


@pytest.mark.parametrize(
    ("op", "options", "message"),
    [
        (
            "scatter",
            {"axis": 0},
            "dim 0 of first/tanh has size 6, which 4 devices can't split evenly",
        ),
        ("scatter", {"axis": 2}, "dim 2 can't be split over 'x'"),
        ("SR->RR", {}, "it is whole, not SR over 'x'"),
    ],
)
def test_the_error_of_a_sync_that_does_not_fit_has_the_layout_of_the_value(
    op: str, options: Any, message: str
) -> None:
    sch, _ = layers_schedule(6, 16, 8, 4)
    sch["first"].sync("fwd_post", op, **options)
    with pytest.raises(DirectiveError, match=message):
        build(sch)


def test_a_sync_function_whose_results_differ_between_devices_is_refused() -> None:
    sch, x = layers_schedule(4, 16, 8, 4)
    sch.shard("first", axis=1).shard("second", axis=0)
    sch["second"].sync("fwd_post", lambda value: value * 2)
    with pytest.raises(
        DirectiveError, match="returns values that still differ between the devices of 'x'"
    ):
        build(sch).apply(sch.params, np.asarray(x))


@pytest.mark.parametrize("mesh", [4, (2, 2)])
def test_a_sync_function_of_gradients_must_be_an_all_reduce(mesh: Any) -> None:
    """Slapo's backward hook may be written as a psum. Verify detects other functions."""
    axis = {"mesh_axis": "y"} if mesh == (2, 2) else {}

    def schedule_with_sync(function: Any) -> tuple[ModelSchedule, jax.Array]:
        sch, x = layers_schedule(8, 16, 8, mesh)
        sch["first"].sync("bwd_post", function, **axis)
        sch.shard("first", axis=1, **axis).shard("second", axis=0, **axis)
        sch["second"].sync("fwd_post", "all_reduce", **axis)
        return sch, x

    name = axis.get("mesh_axis", "x")
    sch, x = schedule_with_sync(lambda gradient: jax.lax.psum(gradient, name))
    Verify(sch, [x], batch_axis="x" if axis else None).check()
    run = build(sch).apply
    gradient = jax.jit(jax.grad(lambda x, params: jnp.sum(run(params, x) ** 2)))
    assert collectives(gradient.lower(x, sch.params).compile()) == {"all-reduce": 2}
    sch, x = schedule_with_sync(lambda gradient: 2 * jax.lax.psum(gradient, name))
    with pytest.raises(
        VerificationError,
        match=r"gradient of argument 0 differs .* at fault is sync\(mode=bwd_post",
    ):
        Verify(sch, [x]).check()
    sch, x = schedule_with_sync(lambda gradient: gradient)
    with pytest.raises(
        DirectiveError, match=f"returns values that still differ between the devices of '{name}'"
    ):
        Verify(sch, [x]).check()
    sch, x = schedule_with_sync(lambda gradient: jax.lax.psum(gradient.sum(), name))
    with pytest.raises(
        DirectiveError, match=r"makes float32\[\] of a gradient that is float32\[8, 8\]"
    ):
        Verify(sch, [x]).check()
    with pytest.raises(
        DirectiveError, match="a sync function, runs on shards: build with backend='manual'"
    ):
        build(sch, "gspmd")


def test_a_sync_function_of_gradients_that_are_no_partial_sums_is_refused() -> None:
    sch, _ = layers_schedule(8, 16, 8, 4)
    sch.shard("first", axis=1).shard("second", axis=0)
    sch["second"].sync("fwd_post", "all_reduce").sync(
        "bwd_post", lambda gradient: jax.lax.psum(gradient, "x")
    )
    with pytest.raises(DirectiveError, match="its gradients are no partial sums over 'x'"):
        build(sch)
