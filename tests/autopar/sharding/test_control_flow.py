"""Loops and branches are planned with the rest of the step, and equal one device."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import autopar
from autopar.devices import logical_mesh
from autopar.planning.step_planner import make_planned
from autopar.sharding.options import AUTO, DATA_PARALLEL, ZERO3
from autopar.testing import assert_allclose
from autopar.tracing.trace import trace
from simulator.hardware.cluster import Cluster
from tests.tiers import tiers
from tests.toy_costs import BandwidthOnly

COSTS = BandwidthOnly(bandwidth=1e9, flop_per_s=1e11)
CLUSTER = Cluster.load("cpu-virtual")
RANDOM = np.random.default_rng(0)


def normal(*shape, scale=1.0):
    return (scale * RANDOM.normal(size=shape)).astype(np.float32)


def sgd_step(loss):
    """Return an SGD step of `loss(params, batch)`."""

    def step(params, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def layers_in_a_scan():
    """Return a step with a scan over blocks of two matrices, which the backward pass recomputes."""
    params = {
        "up": normal(4, 64, 256, scale=0.1),
        "down": normal(4, 256, 64, scale=0.1),
        "bias": normal(4, 256),
    }

    @jax.checkpoint
    def layer(x, p):
        return x + jnp.tanh(x @ p["up"] + p["bias"]) @ p["down"], None

    def loss(params, x):
        return (lax.scan(layer, x, params)[0] ** 2).mean()

    return sgd_step(loss), params, normal(16, 64)


def lstm():
    """Return a step with a scan over time: the carry is the hidden state, weights are constants."""
    model = nn.RNN(nn.OptimizedLSTMCell(64))
    x, y = normal(16, 6, 32), normal(16, 64)
    params = jax.jit(model.init)(jax.random.key(0), x)
    optimizer = optax.adam(1e-2)

    def step(state, batch):
        params, opt = state

        def loss(params):
            return ((model.apply(params, batch["x"])[:, -1] - batch["y"]) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt = optimizer.update(grads, opt)
        return (optax.apply_updates(params, updates), opt), value

    return step, (params, optimizer.init(params)), {"x": x, "y": y}


def branch_and_while():
    """Return a step that skips large gradients and loops until a norm is small enough."""

    def step(state, x):
        def loss(w):
            return (jnp.tanh(x @ w["a"]) @ w["b"]).mean()

        value, grads = jax.value_and_grad(loss)(state["w"])
        norm = optax.tree.norm(grads)
        w = lax.cond(
            norm < 1e3,
            lambda w: jax.tree.map(lambda p, g: p - 0.1 * g, w, grads),
            lambda w: w,
            state["w"],
        )
        scaled, count = lax.while_loop(
            lambda c: (c[0] ** 2).sum() > 1.0,
            lambda c: (c[0] * 0.5, c[1] + 1),
            (w["a"] @ w["b"], 0),
        )
        return {"w": w, "scaled": scaled, "count": count}, value

    state = {
        "w": {"a": normal(64, 256), "b": normal(256, 64)},
        "scaled": normal(64, 64),
        "count": np.int32(0),
    }
    return step, state, normal(16, 64)


def examples_in_a_map():
    """Return a step with a loop over the batch: each iteration has one example."""

    def loss(w, x):
        return lax.map(lambda row: (jnp.tanh(row @ w) ** 2).sum(), x).mean()

    return sgd_step(loss), normal(64, 256), normal(8, 64)


STEPS = {f.__name__: f for f in (layers_in_a_scan, lstm, branch_and_while, examples_in_a_map)}

OPTIONS = {"auto": AUTO, "data": DATA_PARALLEL, "zero3": ZERO3}
BATCHED = [
    (name, kind)
    for name in STEPS
    for kind in OPTIONS
    if name != "examples_in_a_map" or kind == "auto"
]
"""Only the automatic plan supports a loop over examples, which has no batch dim inside."""


@pytest.mark.parametrize(
    ("name", "kind", "mesh"),
    tiers([(*batched, mesh) for batched in BATCHED for mesh in [(8,), (2, 4)]]),
    ids=str,
)
def test_a_planned_loop_equals_one_device(name, kind, mesh):
    step, state, batch = STEPS[name]()
    options = OPTIONS[kind]
    plan = make_planned(
        trace(step, (state, batch), (1,)),
        logical_mesh(mesh),
        CLUSTER,
        options,
        "ShardParallel",
        COSTS,
    ).plan
    planned = autopar.parallelize(step, method=autopar.PlanMethod(plan, mesh), donate_argnums=())
    assert_allclose(planned(state, batch), jax.jit(step)(state, batch), rtol=1e-3, atol=1e-4)


def plan_of(build, mesh=(8,), options=AUTO):
    step, state, batch = build()
    traced = trace(step, (state, batch), (1,))
    return traced, make_planned(
        traced, logical_mesh(mesh), CLUSTER, options, "ShardParallel", COSTS
    ).plan


def test_a_layer_in_a_scan_is_planned_like_an_unrolled_layer():
    """The leading dim, that of the loop, is not sharded."""
    _, plan = plan_of(layers_in_a_scan)
    specs = {value.path: value.spec for value in plan.stages[0].inputs}
    assert specs["0/up"] == ((), (), ("x",))
    assert specs["0/down"] == ((), ("x",), ())
    assert specs["0/bias"] == ((), ("x",))


def test_zero3_shards_each_layer_of_a_scan_instead_of_the_dim_of_layers():
    def eight_layers():
        def loss(w, x):
            return (lax.scan(lambda c, p: (jnp.tanh(c @ p), None), x, w)[0] ** 2).mean()

        return sgd_step(loss), normal(8, 64, 64), normal(16, 64)

    _, plan = plan_of(eight_layers, options=ZERO3)
    assert plan.stages[0].inputs[0].spec[0] == ()
    assert not [
        c for c in plan.stages[0].constraints if c.side == "in" and c.name.endswith("loop_slice")
    ]


def test_the_seconds_of_a_loop_grow_with_its_length():
    def build(length):
        def loss(params, x):
            return (lax.scan(lambda c, p: (jnp.tanh(c @ p), None), x, params)[0] ** 2).mean()

        return lambda: (sgd_step(loss), normal(length, 64, 64), normal(16, 64))

    seconds = [
        plan_of(build(length), options=DATA_PARALLEL)[1].predicted_seconds for length in (2, 4, 8)
    ]
    assert seconds[2] - seconds[1] == pytest.approx(2 * (seconds[1] - seconds[0]), rel=0.05)


def test_the_carry_has_the_same_spec_before_and_after_each_iteration():
    """No reshard is necessary between iterations."""
    traced, plan = plan_of(lstm, (2, 4))
    eqns = traced.jaxpr.eqns
    specs = {(c.eqn, c.side, c.index): c.spec for c in plan.stages[0].constraints}
    results = [n for n, eqn in enumerate(eqns) if eqn.primitive.name == "loop_result"]
    assert results
    number_of = {var: n for n, eqn in enumerate(eqns) for var in eqn.outvars}
    for n in results:
        carry, after = (number_of.get(atom) for atom in eqns[n].invars[:2])
        carry_spec = specs[carry, "out", 0]
        result_spec = specs.get((n, "in", 1), specs.get((after, "out", 0)))
        assert result_spec in (carry_spec, None)


def test_a_while_loop_is_counted_once_with_a_warning():
    _, plan = plan_of(branch_and_while)
    assert any("while_loop" in warning and "once" in warning for warning in plan.warnings)
