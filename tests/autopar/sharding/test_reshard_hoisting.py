"""Reshards are hoisted above operations that only reverse values or widen their dtype."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from autopar.ir.spec import LogicalMesh
from autopar.sharding.imposed_constraints import Constraint
from autopar.sharding.options import ShardingOptions
from autopar.sharding.plan_shardings import plan_shardings
from autopar.sharding.reshard_hoisting import moved_bytes, passes_moves
from autopar.tracing.trace import trace
from tests.toy_costs import BandwidthOnly

LINE = LogicalMesh((4,), ("x",))


def planned(fun):
    """Plan `fun` of a float16 matrix that is sharded by rows, with a result sharded by columns."""
    step = trace(fun, (jax.ShapeDtypeStruct((64, 64), "float16"),), ())
    options = ShardingOptions(
        pins={"0": P("x"), "result": P(None, "x"), "by_columns": P(None, "x")}
    )
    return step, plan_shardings(step, LINE, BandwidthOnly(1e9), options)


def test_a_value_is_resharded_before_it_is_widened():
    step, shardings = planned(lambda x: checkpoint_name(x.astype(jnp.float32), "by_columns"))
    convert = next(
        n for n, eqn in enumerate(step.jaxpr.eqns) if eqn.primitive.name == "convert_element_type"
    )
    assert Constraint(convert, "in", 0, ((), ("x",))) in shardings.constraints
    # Each device has a quarter of 64 x 64 float16 values and sends three quarters of it at 1 GB/s.
    assert shardings.seconds == pytest.approx(64 * 64 * 2 / 4 * (3 / 4) / 1e9)


def test_a_value_with_a_reader_of_its_old_spec_is_not_resharded_early():
    def fun(x):
        wide = x.astype(jnp.float32)
        return checkpoint_name(wide, "by_columns"), jnp.sin(wide).sum()

    step = trace(fun, (jax.ShapeDtypeStruct((64, 64), "float16"),), ())
    options = ShardingOptions(
        pins={"0": P("x"), "result/0": P(None, "x"), "by_columns": P(None, "x")}
    )
    shardings = plan_shardings(step, LINE, BandwidthOnly(1e9), options)
    convert = next(
        n for n, eqn in enumerate(step.jaxpr.eqns) if eqn.primitive.name == "convert_element_type"
    )
    assert not [c for c in shardings.constraints if c.eqn == convert and c.side == "in"]


def test_a_reshard_does_not_move_before_a_narrowing_conversion():
    step = trace(
        lambda x: (x.astype(jnp.float16), lax.rev(x, (0,))),
        (jax.ShapeDtypeStruct((8,), "float32"),),
        (),
    )
    narrow, reverse = step.jaxpr.eqns
    assert not passes_moves(narrow)
    assert moved_bytes(narrow, narrow.outvars[0]) == 16
    assert passes_moves(reverse)
    assert moved_bytes(None, step.jaxpr.invars[0]) == 32
