"""Deferred synchronization of gradients: its seconds, its memory, and plans without it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.ir.spec import LogicalMesh
from autopar.sharding.deferred_sync import candidates, check_parts, fits, leads, synchronizations
from autopar.sharding.options import AUTO, DATA_PARALLEL, ZERO2, ShardingOptions
from autopar.sharding.plan_shardings import plan_shardings
from autopar.sharding.solve_within_memory import MemoryBudgetError
from autopar.tracing.trace import trace

LINE = LogicalMesh((4,), ("x",))
SQUARE = LogicalMesh((2, 2), ("x", "y"))
SIZE = 32
PARAMS = {"a": np.ones((SIZE, SIZE), np.float32), "b": np.ones((SIZE, SIZE), np.float32)}
GRADIENTS = 2 * 4 * SIZE * SIZE  # bytes


class Bytes:
    """A cost model whose seconds are the bytes of reductions."""

    def kernel(self, kernel, /, device=0):
        return 0.0

    def collective(self, kind, num_bytes, groups):
        return num_bytes if kind in ("all_reduce", "reduce_scatter") else 0.0


def step(state, batch):
    params, momentum = state["params"], state["momentum"]
    grads = autopar.grad(lambda p: jnp.mean(jnp.tanh(batch @ p["a"]) @ p["b"]))(params)
    momentum = jax.tree.map(jnp.add, momentum, grads)
    return {"params": jax.tree.map(jnp.subtract, params, momentum), "momentum": momentum}


def traced(count, rows=64):
    state = {"params": PARAMS, "momentum": PARAMS}
    return trace(step, (state, np.ones((rows, SIZE), np.float32)), (1,), count)


@pytest.mark.parametrize("options", [DATA_PARALLEL, ZERO2])
@pytest.mark.parametrize("count", [2, 4, 8])
def test_gradients_are_all_reduced_once_for_any_number_of_microbatches(options, count):
    plan = plan_shardings(traced(count), LINE, Bytes(), options)
    assert plan.deferred == ("x",)
    assert plan.seconds == pytest.approx(GRADIENTS)


def test_without_memory_for_deferral_gradients_are_reduced_in_every_microbatch(monkeypatch):
    """ZeRO-2 scatters the gradients of each microbatch if whole gradients exceed the budget.

    They are small here, and would wait for each other to be combined.
    """
    monkeypatch.setattr("autopar.sharding.value_lifetimes.COMBINED_BYTES", 1.0)
    plan = plan_shardings(traced(4), LINE, Bytes(), ZERO2)
    small_plan = plan_shardings(traced(4), LINE, Bytes(), ZERO2, plan.peak_bytes * 0.95)
    assert small_plan.deferred == ()
    assert small_plan.seconds == pytest.approx(4 * GRADIENTS)
    assert small_plan.peak_bytes < plan.peak_bytes
    assert small_plan.warnings[0].startswith(
        "gradients are completed in every microbatch: no plan for"
    )
    with pytest.raises(MemoryBudgetError):
        plan_shardings(traced(4), LINE, Bytes(), ZERO2, small_plan.peak_bytes / 4)


def test_deferral_needs_memory_for_whole_gradients():
    """The least is parameters, a quarter of the momentum, a share of the rows, and gradients."""
    plan = plan_shardings(traced(4), LINE, Bytes(), ZERO2)
    least = GRADIENTS + GRADIENTS / 4 + 64 / 4 * SIZE * 4 + GRADIENTS
    assert least <= plan.peak_bytes < least + GRADIENTS


def test_a_step_without_microbatches_is_not_deferred():
    plan = plan_shardings(traced(1), LINE, Bytes(), DATA_PARALLEL)
    assert plan.deferred == ()
    assert plan.warnings == ()
    assert plan.seconds == pytest.approx(GRADIENTS)  # the step does not return the loss


def test_deferred_axes_divide_the_examples_of_a_microbatch():
    assert list(candidates(traced(4, 64), SQUARE, False)) == [("x", "y"), ("x",), ("y",)]
    assert list(candidates(traced(4, 64), SQUARE, True)) == [("x", "y")]
    assert list(candidates(traced(4, 8), SQUARE, False)) == [("x",), ("y",)]
    assert list(candidates(traced(4, 4), SQUARE, False)) == []
    assert list(candidates(traced(1), SQUARE, False)) == []


@pytest.mark.parametrize("prints_in_loss", [True, False])
def test_a_loop_that_prints_for_each_microbatch_defers_all_axes_or_none(prints_in_loss):
    def print_twice(value):
        jax.lax.fori_loop(0, 2, lambda i, _: jax.debug.print("{} {}", i, value), None)

    def printing(params, batch):
        def loss(params):
            hidden = jnp.tanh(batch @ params["a"])
            if prints_in_loss:
                print_twice((hidden**2).sum())
            return jnp.mean(hidden @ params["b"])

        value, grads = autopar.value_and_grad(loss)(params)
        if not prints_in_loss:
            print_twice(value)
        return jax.tree.map(jnp.subtract, params, grads)

    step = trace(printing, (PARAMS, np.ones((64, SIZE), np.float32)), (1,), 4)
    some = [] if prints_in_loss else [("x",), ("y",)]
    assert list(candidates(step, SQUARE, False)) == [("x", "y"), *some]


def test_parts_of_one_example_have_the_equations_of_more():
    """JAX keeps the dim of a single example in a sum over dims, such as a bias gradient.

    A trace that does not follow from those for more examples is one by JAX.
    """

    def step_of(weights_of):
        def add_bias(bias, batch):
            weights = weights_of(batch.shape[0])
            return bias - autopar.grad(lambda b: jnp.mean(weights * (batch + b) ** 2))(bias)

        args = np.ones(4, np.float32), np.ones((8, 2, 4), np.float32)
        return trace(add_bias, args, (1,), 4)

    check_parts(step_of(lambda rows: 1.0), SQUARE, ("x",))
    check_parts(step_of(lambda rows: np.ones((rows, 1, 1), np.float32)), SQUARE, ("x",))
    nearly_one = np.nextafter(np.float32(1), np.float32(2))
    by_jax = step_of(
        lambda rows: np.append([nearly_one], np.ones(rows - 1, np.float32))[:, None, None]
    )
    check_parts(by_jax, SQUARE, ())
    with pytest.raises(autopar.MicrobatchError, match="different things for the few examples"):
        check_parts(by_jax, SQUARE, ("x",))


def test_a_batch_pinned_on_another_dim_is_not_deferred():
    pins = {"1": jax.sharding.PartitionSpec(None, "x")}
    plan = plan_shardings(traced(2), LINE, Bytes(), ShardingOptions(pins=pins))
    assert plan.deferred == ()
    assert plan.inputs[-1] == ((), ("x",))
    assert plan.warnings == ()  # no examples are divided, so no gradient needs completing


def test_the_automatic_plan_is_at_most_as_expensive_as_zero2():
    plan = plan_shardings(traced(4), SQUARE, Bytes(), AUTO)
    assert plan.seconds <= plan_shardings(traced(4), SQUARE, Bytes(), ZERO2).seconds


def test_a_spec_fits_deferral_if_the_axes_divide_only_the_batch_dim():
    batch = frozenset({0})
    assert fits((("x",), ("y",)), batch, ("x",))
    assert not fits((("y",), ("x",)), batch, ("x",))
    assert not fits(((), ()), batch, ("x",))
    assert fits(((), ("y",)), frozenset(), ("x",))
    assert not fits(((), ("x",)), frozenset(), ("x",))
    assert leads((("x", "y"), ()), ("x",))
    assert not leads((("x", "y"), ()), ("y",))


def test_a_deferred_sum_is_all_reduced_or_scattered_from_its_spec():
    """The value is (8, 6) of 4 bytes with its first dim split over y; it is summed over x."""
    ways = synchronizations((8, 6), 4, ((("y",), ()),), True, SQUARE, ("x",))
    assert [(way.results[0], way.collectives) for _, way in ways] == [
        ((("y",), ()), (("all_reduce", 96, ("x",)),)),
        ((("x", "y"), ()), (("reduce_scatter", 96, ("x",)),)),
        ((("y",), ("x",)), (("reduce_scatter", 96, ("x",)),)),
    ]
    assert {source for source, _ in ways} == {(("y",), ())}
    assert len(synchronizations((8, 6), 4, ((("y",), ()),), False, SQUARE, ("x",))) == 1
