"""Values move before what only reverses them or widens their type."""

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
from simulator.costs.cost_model import BandwidthOnly

LINE = LogicalMesh((4,), ("x",))


def planned(fun):
    """`fun` of a half-precision matrix sharded by rows, whose result is wanted sharded by columns."""
    step = trace(fun, (jax.ShapeDtypeStruct((64, 64), "float16"),), ())
    options = ShardingOptions(pins={"0": P("x"), "result": P(None, "x"), "there": P(None, "x")})
    return step, plan_shardings(step, LINE, BandwidthOnly(1e9), options)


def test_a_value_moves_before_it_is_widened():
    step, found = planned(lambda x: checkpoint_name(x.astype(jnp.float32), "there"))
    convert = next(
        n for n, eqn in enumerate(step.jaxpr.eqns) if eqn.primitive.name == "convert_element_type"
    )
    assert Constraint(convert, "in", 0, ((), ("x",))) in found.constraints
    # A quarter of 64 x 64 halves is on each device; three quarters of that leave it, at 1 GB/s.
    assert found.seconds == pytest.approx(64 * 64 * 2 / 4 * (3 / 4) / 1e9)


def test_a_value_that_somebody_wants_where_it_is_does_not_move_early():
    def fun(x):
        wide = x.astype(jnp.float32)
        return checkpoint_name(wide, "there"), jnp.sin(wide).sum()

    step = trace(fun, (jax.ShapeDtypeStruct((64, 64), "float16"),), ())
    options = ShardingOptions(pins={"0": P("x"), "result/0": P(None, "x"), "there": P(None, "x")})
    found = plan_shardings(step, LINE, BandwidthOnly(1e9), options)
    convert = next(
        n for n, eqn in enumerate(step.jaxpr.eqns) if eqn.primitive.name == "convert_element_type"
    )
    assert not [c for c in found.constraints if c.eqn == convert and c.side == "in"]


def test_narrowing_does_not_pass_moves():
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
