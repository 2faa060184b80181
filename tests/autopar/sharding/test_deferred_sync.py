"""What deferring costs, in time and memory, and when a plan does without."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.ir.spec import LogicalMesh
from autopar.sharding.deferred_sync import candidates, fits, leads, synchronisations
from autopar.sharding.options import AUTO, DATA_PARALLEL, ZERO2, ShardingOptions
from autopar.sharding.plan_shardings import plan_shardings
from autopar.sharding.solve_within_memory import MemoryBudgetError
from autopar.tracing.trace import trace

LINE = LogicalMesh((4,), ("x",))
SQUARE = LogicalMesh((2, 2), ("x", "y"))
SIZE = 32
PARAMS = {"a": np.ones((SIZE, SIZE), np.float32), "b": np.ones((SIZE, SIZE), np.float32)}
GRADIENTS = 2 * 4 * SIZE * SIZE  # bytes
LOSS = 4


class Bytes:
    """Bytes of collectives in place of seconds; kernels cost nothing."""

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
def test_gradients_are_completed_once_however_many_microbatches(options, count):
    found = plan_shardings(traced(count), LINE, Bytes(), options)
    assert found.deferred == ("x",)
    assert found.seconds == pytest.approx(GRADIENTS + LOSS)


def test_without_deferring_every_microbatch_pays():
    """A budget below a whole gradient leaves ZeRO-2 to scatter the gradients of each microbatch."""
    found = plan_shardings(traced(4), LINE, Bytes(), ZERO2)
    lean = plan_shardings(traced(4), LINE, Bytes(), ZERO2, found.peak_bytes * 0.95)
    assert lean.deferred == ()
    assert lean.seconds == pytest.approx(4 * (GRADIENTS + LOSS))
    assert lean.peak_bytes < found.peak_bytes
    assert lean.warnings[0].startswith("gradients are completed in every microbatch: no plan for")
    with pytest.raises(MemoryBudgetError):
        plan_shardings(traced(4), LINE, Bytes(), ZERO2, lean.peak_bytes / 4)


def test_whole_accumulators_take_the_memory_of_whole_gradients():
    """Beside parameters and momentum, of which ZeRO-2 keeps a quarter: gradients of both, and the whole batch's share of 64 rows."""
    found = plan_shardings(traced(4), LINE, Bytes(), ZERO2)
    least = GRADIENTS + GRADIENTS / 4 + 64 / 4 * SIZE * 4 + GRADIENTS
    assert least <= found.peak_bytes < least + GRADIENTS


def test_one_batch_needs_no_deferring():
    found = plan_shardings(traced(1), LINE, Bytes(), DATA_PARALLEL)
    assert found.deferred == ()
    assert found.warnings == ()
    assert found.seconds == pytest.approx(GRADIENTS)  # nobody reads the loss


def test_microbatches_that_are_too_small_are_not_divided():
    assert list(candidates(traced(4, 64), SQUARE, False)) == [("x", "y"), ("x",), ("y",)]
    assert list(candidates(traced(4, 64), SQUARE, True)) == [("x", "y")]
    assert list(candidates(traced(4, 8), SQUARE, False)) == [("x",), ("y",)]
    assert list(candidates(traced(4, 4), SQUARE, False)) == []
    assert list(candidates(traced(1), SQUARE, False)) == []


def test_a_pinned_batch_keeps_its_place():
    pins = {"1": jax.sharding.PartitionSpec(None, "x")}
    found = plan_shardings(traced(2), LINE, Bytes(), ShardingOptions(pins=pins))
    assert found.deferred == ()
    assert found.inputs[-1] == ((), ("x",))
    assert found.warnings == ()  # no examples are divided, so no gradient needs completing


def test_the_automatic_plan_is_the_cheapest_of_all():
    found = plan_shardings(traced(4), SQUARE, Bytes(), AUTO)
    assert found.seconds <= plan_shardings(traced(4), SQUARE, Bytes(), ZERO2).seconds


def test_deferred_axes_divide_examples_and_nothing_else():
    batch = frozenset({0})
    assert fits((("x",), ("y",)), batch, ("x",))
    assert not fits((("y",), ("x",)), batch, ("x",))
    assert not fits(((), ()), batch, ("x",))
    assert fits(((), ("y",)), frozenset(), ("x",))
    assert not fits(((), ("x",)), frozenset(), ("x",))
    assert leads((("x", "y"), ()), ("x",))
    assert not leads((("x", "y"), ()), ("y",))


def test_every_way_to_complete_starts_from_where_the_value_is():
    """(8, 6) of 4 bytes, its first dim in two along y: completed along x by an all_reduce of half of it, or scattered over a dim."""
    ways = synchronisations((8, 6), 4, ((("y",), ()),), True, SQUARE, ("x",))
    assert [(way.results[0], way.collectives) for _, way in ways] == [
        ((("y",), ()), (("all_reduce", 96, ("x",)),)),
        ((("x", "y"), ()), (("reduce_scatter", 96, ("x",)),)),
        ((("y",), ("x",)), (("reduce_scatter", 96, ("x",)),)),
    ]
    assert {source for source, _ in ways} == {(("y",), ())}
    assert len(synchronisations((8, 6), 4, ((("y",), ()),), False, SQUARE, ("x",))) == 1
