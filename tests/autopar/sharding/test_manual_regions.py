"""Regions of `jax.shard_map` keep their shardings, and the rest is planned around them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import autopar
from autopar.devices import logical_mesh
from autopar.ir.spec import LogicalMesh
from autopar.planning.step_planner import make_planned
from autopar.sharding.options import AUTO
from autopar.sharding.pins import ShardingError
from autopar.sharding.plan_shardings import plan_shardings
from autopar.testing import assert_allclose
from autopar.tracing.trace import trace
from simulator.hardware.cluster import Cluster
from tests.toy_costs import BandwidthOnly

COSTS = BandwidthOnly(bandwidth=1e9, flop_per_s=1e11)
RANDOM = np.random.default_rng(0)


def megatron_step(shape, axis_names):
    """Return a step in which two of four layers are a `shard_map` with Megatron's shardings."""
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
    ("manual_shape", "axis_names", "mesh_shape"),
    [
        ((8,), ("m",), (8,)),
        ((8,), ("m",), (2, 4)),
        ((2, 4), ("d", "m"), (2, 4)),
        ((8,), ("x",), (1, 8)),
    ],
)
def test_a_manual_region_keeps_its_specs_and_equals_one_device(
    manual_shape, axis_names, mesh_shape
):
    step, params, x = megatron_step(manual_shape, axis_names)
    traced = trace(step, (params, x), (1,))
    plan = make_planned(
        traced, logical_mesh(mesh_shape), Cluster.load("cpu-virtual"), AUTO, "ShardParallel", COSTS
    ).plan
    regions = [
        number for number, eqn in enumerate(traced.jaxpr.eqns) if eqn.primitive.name == "shard_map"
    ]
    assert len(regions) == 2  # forward and backward
    sharded = (
        tuple(a for a, n in logical_mesh(mesh_shape).sizes.items() if n > 1)
        if len(manual_shape) == 1
        else ("y",)
    )
    specs = {value.path: value.spec for value in plan.stages[0].inputs}
    assert specs["0/up"] == ((), sharded)
    assert specs["0/down"] == (sharded, ())
    run = autopar.parallelize(step, method=autopar.PlanMethod(plan, mesh_shape), donate_argnums=())
    assert_allclose(run(params, x), jax.jit(step)(params, x), rtol=1e-3, atol=1e-4)


def test_a_manual_region_costs_its_kernels_and_collectives():
    step, params, x = megatron_step((8,), ("m",))
    traced = trace(step, (params, x), (1,))
    seconds = [
        plan_shardings(
            traced, LogicalMesh((8,), ("x",)), BandwidthOnly(bandwidth, flop_per_s=1e11)
        ).seconds
        for bandwidth in (1e9, 1e6)
    ]
    # bytes that each device sends for the all_reduce of hidden values, in the forward pass
    all_reduce = 2 * 7 / 8 * 16 * 64 * 4
    assert seconds[1] - seconds[0] > 0.9 * all_reduce / 1e6


def test_the_error_of_a_manual_region_on_another_mesh_names_the_mesh_shape_to_use():
    step, params, x = megatron_step((2, 4), ("d", "m"))
    traced = trace(step, (params, x), (1,))
    with pytest.raises(ShardingError, match=r"d=2 x m=4.*x=8.*plan on a mesh of shape \(2, 4\)"):
        plan_shardings(traced, LogicalMesh((8,), ("x",)), COSTS)
