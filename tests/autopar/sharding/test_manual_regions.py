"""What a user sharded by hand with `jax.shard_map` stays so, and the rest is planned around it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import autopar
from autopar.devices import logical_mesh
from autopar.ir.spec import LogicalMesh
from autopar.planning.step_planner import make_plan
from autopar.sharding.options import AUTO
from autopar.sharding.pins import ShardingError
from autopar.sharding.plan_shardings import plan_shardings
from autopar.testing import assert_allclose
from autopar.tracing.trace import trace
from simulator.costs.cost_model import BandwidthOnly
from simulator.hardware.cluster import Cluster

COSTS = BandwidthOnly(bandwidth=1e9, flop_per_s=1e11)
RANDOM = np.random.default_rng(0)


def by_hand(shape, axis_names):
    """A step in which two layers of four are Megatron's, by hand, on a mesh of the user's own."""
    mesh = Mesh(np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape), axis_names)
    data, model = axis_names if len(axis_names) == 2 else (None, axis_names[0])

    def block(up, down, x):
        return jax.lax.psum(jnp.tanh(x @ up) @ down, model)

    sharded = jax.shard_map(
        block,
        mesh=mesh,
        in_specs=(P(None, model), P(model, None), P(data, None)),
        out_specs=P(data, None),
    )

    def step(params, x):
        def loss(params):
            hidden = sharded(params["up"], params["down"], jnp.tanh(x @ params["first"]))
            return ((hidden @ params["last"]) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    shapes = {"first": (32, 64), "up": (64, 128), "down": (128, 64), "last": (64, 32)}
    params = {
        name: (0.1 * RANDOM.normal(size=shape)).astype(np.float32) for name, shape in shapes.items()
    }
    return step, params, RANDOM.normal(size=(16, 32)).astype(np.float32)


@pytest.mark.parametrize(
    ("own", "names", "planned"),
    [
        ((8,), ("m",), (8,)),
        ((8,), ("m",), (2, 4)),
        ((2, 4), ("d", "m"), (2, 4)),
        ((8,), ("x",), (1, 8)),
    ],
)
def test_a_region_by_hand_keeps_its_specs_and_its_result(own, names, planned):
    step, params, x = by_hand(own, names)
    traced = trace(step, (params, x), (1,))
    plan = make_plan(
        traced, logical_mesh(planned), Cluster.load("cpu-virtual"), AUTO, "ShardParallel", COSTS
    )
    regions = [
        number for number, eqn in enumerate(traced.jaxpr.eqns) if eqn.primitive.name == "shard_map"
    ]
    assert len(regions) == 2  # forward and backward
    sharded = (
        tuple(a for a, n in logical_mesh(planned).sizes.items() if n > 1)
        if len(own) == 1
        else ("y",)
    )
    shapes = {value.path: value.spec for value in plan.stages[0].inputs}
    assert shapes["0/up"] == ((), sharded)
    assert shapes["0/down"] == (sharded, ())
    run = autopar.parallelize(step, method=autopar.PlanMethod(plan, planned), donate_argnums=())
    assert_allclose(run(params, x), jax.jit(step)(params, x), rtol=1e-3, atol=1e-4)


def test_a_region_by_hand_costs_its_kernels_and_collectives():
    step, params, x = by_hand((8,), ("m",))
    traced = trace(step, (params, x), (1,))
    seconds = [
        plan_shardings(
            traced, LogicalMesh((8,), ("x",)), BandwidthOnly(bandwidth, flop_per_s=1e11)
        ).seconds
        for bandwidth in (1e9, 1e6)
    ]
    all_reduce = (
        2 * 7 / 8 * 16 * 64 * 4
    )  # one forward, of the hidden values; bytes that each device sends
    assert seconds[1] - seconds[0] > 0.9 * all_reduce / 1e6


def test_a_region_on_a_mesh_that_does_not_fit_is_refused_with_the_shape_that_does():
    step, params, x = by_hand((2, 4), ("d", "m"))
    traced = trace(step, (params, x), (1,))
    with pytest.raises(ShardingError, match=r"d=2 x m=4.*x=8.*plan on a mesh of shape \(2, 4\)"):
        plan_shardings(traced, LogicalMesh((8,), ("x",)), COSTS)
