"""Layers that run in a `scan` are stages of a pipeline, which store the weights of their layers."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import autopar
from autopar.ir.joined_array import JoinedArray
from tests.autopar.pipeline.scan_steps import (
    WIDTH,
    Scanned,
    X,
    llama_step,
    momentum_state,
    momentum_step,
    scanned_step,
    stages,
    weights,
)
from tests.autopar.pipeline.stack_steps import assert_as_serial

JAX = jax.value_and_grad
SAVE_DOTS = partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)

FULL = {
    "5 layers, 2 stages": (2, lambda: llama_step(5)),
    "7 layers, 4 stages": (4, lambda: llama_step(7)),
    "4 stages of one layer": (4, lambda: llama_step(4)),
    "remat": (2, lambda: llama_step(4, remat=True)),
    "unrolled": (2, lambda: llama_step(5, unroll=2)),
    "reversed": (2, lambda: llama_step(5, reverse=True)),
    "flax": (2, lambda: scanned_step(Scanned(5))),
    "flax with remat": (4, lambda: scanned_step(Scanned(6, remat=True))),
    "flax, layers in dim 1": (2, lambda: scanned_step(Scanned(5, axis=1))),
    "flax, unrolled": (4, lambda: scanned_step(Scanned(7, unroll=3))),
    "jax.grad, 7 layers, 4 stages": (4, lambda: llama_step(7, JAX)),
    "jax.grad, remat": (2, lambda: llama_step(4, JAX, remat=True)),
    "jax.grad, unrolled": (2, lambda: llama_step(5, JAX, unroll=2)),
    "jax.grad, reversed": (2, lambda: llama_step(5, JAX, reverse=True)),
    "jax.grad, flax": (4, lambda: scanned_step(Scanned(6, axis=1), value_and_grad=JAX)),
    "recomputed as a whole": (2, lambda: llama_step(5, around=jax.checkpoint)),
    "jax.grad, recomputed as a whole": (4, lambda: llama_step(4, JAX, around=jax.checkpoint)),
    "jax.grad, recomputed but for products": (4, lambda: llama_step(7, JAX, around=SAVE_DOTS)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FULL)
def test_three_steps_equal_those_of_one_device(name):
    count, make = FULL[name]
    step, state, batch = make()
    parallel = assert_as_serial(step, stages(count, 2 * count), state, batch, steps=3, rtol=1e-4)
    assert_stores_only_its_layers(parallel.get_last_executable(), count)


def assert_stores_only_its_layers(executable, count):
    """Assert that the stages share the arrays of all layers, and that no array is in two stages."""
    plan = executable.plan
    assert len(plan.stages) == count
    paths = [value.path for stage in plan.stages for value in stage.inputs]
    assert all(paths.count(path) == 1 for path in paths if "layers" in path)
    leaves = jax.tree.leaves(executable.get_input_placement_specs()[0])
    joined = [leaf for leaf in leaves if not isinstance(leaf, autopar.report.PlacementSpec)]
    assert joined
    for leaf in joined:
        assert sorted(piece.mesh_ids[0] for piece in leaf.pieces) == [*range(count)]


def loss_step(loss, width=WIDTH):
    """Return a step of plain gradient descent on `loss(params, x)`."""

    def step(params, batch):
        value, gradients = autopar.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    return step


def encoder_decoder(params, x):
    """Run two stacks; the second one reads the result of the first in every layer."""
    h, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["encoder"])
    y, _ = lax.scan(lambda y, w: (jnp.tanh(y @ w + h), None), x, params["decoder"])
    return jnp.mean(y**2)


def cast_stack(params, x):
    """Cast and rearrange the stack before its layers read it; decay it in the loss."""
    stack = jnp.moveaxis(params["stack"].astype(jnp.bfloat16), 1, 0)
    y, _ = lax.scan(lambda y, w: (y + jnp.tanh(y @ w.astype(jnp.float32)), None), x, stack)
    return jnp.mean(y**2) + 1e-2 * jnp.sum(params["stack"] ** 2)


def tied_stack(params, x):
    """Read all weights again after the layers."""
    y, norms = lax.scan(lambda y, w: (jnp.tanh(y @ w), jnp.mean(y**2)), x, params["stack"])
    return jnp.mean((y @ params["stack"][0]) ** 2) + norms[-1] + norms[1]


def nested(params, x):
    """Run groups of layers, each in a scan of its own."""

    def group(y, ws):
        return lax.scan(lambda y, w: (jnp.tanh(y @ w), None), y, ws)

    return jnp.mean(lax.scan(group, x, params["stack"])[0] ** 2)


def several_carries(params, x):
    """Carry a count and two arrays; the second stack has no products."""

    def layer(carry, slices):
        y, z, count = carry
        w, scale = slices
        return (jnp.tanh(y @ w) * scale, z + y, count + 1), None

    carry = x, jnp.zeros_like(x), jnp.int32(0)
    (y, z, count), _ = lax.scan(layer, carry, (params["stack"], params["scale"]))
    return jnp.mean((y + z) ** 2) * count.astype(jnp.float32)


LOSSES = {
    "encoder and decoder": (
        encoder_decoder,
        {"encoder": weights(3, WIDTH, WIDTH), "decoder": weights(4, WIDTH, WIDTH)},
    ),
    "cast": (cast_stack, {"stack": weights(WIDTH, 5, WIDTH)}),
    "tied": (tied_stack, {"stack": weights(5, WIDTH, WIDTH)}),
    "nested": (nested, {"stack": weights(5, 2, WIDTH, WIDTH)}),
    "several carries": (
        several_carries,
        {"stack": weights(5, WIDTH, WIDTH), "scale": weights(5, WIDTH)},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", LOSSES)
def test_other_ways_to_use_a_stack_give_the_same_numbers(name, count):
    loss, params = LOSSES[name]
    rtol = 2e-3 if name == "cast" else 2e-5  # each microbatch rounds its gradients to bfloat16
    assert_as_serial(loss_step(loss), stages(count), params, X, steps=3, rtol=rtol)


def recurrent(params, x):
    """Scan over time, with the same weights in every iteration."""
    steps = jnp.stack([x, 2 * x, 3 * x])
    h, _ = lax.scan(lambda h, x: (jnp.tanh(h @ params["u"] + x @ params["w"]), None), x, steps)
    return jnp.mean(h**2)


def indexed(params, x):
    """Pick the weights of each layer by its number."""
    return jnp.mean(lax.fori_loop(0, 4, lambda i, y: jnp.tanh(y @ params["stack"][i]), x) ** 2)


def checkpointed(params, x):
    """Recompute the whole stack."""
    run = jax.checkpoint(lambda ws: lax.scan(lambda y, w: (jnp.tanh(y @ w), None), x, ws)[0])
    return jnp.mean(run(params["stack"]) ** 2)


def test_a_scan_that_jax_differentiates_and_recomputes_as_a_whole_trains_in_stages():
    def step(params, batch):
        value, gradients = jax.value_and_grad(checkpointed)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    params = {"stack": weights(5, WIDTH, WIDTH)}
    parallel = assert_as_serial(step, stages(2), params, X)
    (stack,) = jax.tree.leaves(parallel(params, X)[0])
    assert sorted(piece.shape[0] for piece in stack.pieces) == [2, 3]


def test_layers_are_recomputed_by_one_of_two_means():
    params = {"stack": weights(4, WIDTH, WIDTH)}
    method = replace(stages(4), layer_option=autopar.AutoLayerOption(4, remat_layer=True))
    with pytest.raises(autopar.LayerError, match=r"test_layers_in_a_scan.py:\d+ already; use one"):
        autopar.plan_step(loss_step(checkpointed), (params, X), method=method, cluster="dgx_h100")


@pytest.mark.parametrize("loss", [recurrent, indexed])
def test_a_scan_that_slices_no_weights_is_one_layer_and_a_warning_names_its_line(loss):
    params = {name: weights(4, WIDTH, WIDTH) for name in ("stack",)}
    if loss is recurrent:
        params = {name: weights(WIDTH, WIDTH) for name in ("u", "w")}
    parallel = assert_as_serial(loss_step(loss), stages(4), params, X)
    (warning,) = parallel.get_last_executable().plan.warnings
    assert re.search(r"each loop is in one layer, at .*test_layers_in_a_scan.py:\d+", warning)


def test_five_layers_in_a_scan_train_in_two_stages_that_store_their_own_layers():
    state = momentum_state()
    parallel = assert_as_serial(momentum_step, stages(2), state, X, steps=3)
    executable = parallel.get_executable(state, X)
    results, _ = parallel(state, X)
    for array in jax.tree.leaves(results):
        assert isinstance(array, JoinedArray)
        assert array.shape == (5, WIDTH, WIDTH)
        assert sorted(piece.shape[0] for piece in array.pieces) == [2, 3]
        assert len({device for piece in array.pieces for device in piece.devices()}) == 2
    of_a_layer = 4 * WIDTH**2
    for memory in executable.memory:
        assert memory.roles["parameters"] <= 3 * of_a_layer
        assert memory.roles["optimizer"] <= 3 * of_a_layer


def test_a_pin_of_a_stack_holds_for_its_pieces():
    options = autopar.ShardingOptions(pins={"0/0/stack": P(None, None, "x")})
    method = stages(2, 4, default_auto_sharding_option=options)
    args = momentum_state(), X
    plan = autopar.plan_step(momentum_step, args, method=method, cluster="dgx_h100")
    specs = {
        value.path: value.spec
        for stage in plan.stages
        for value in stage.inputs
        if value.path.startswith("0/0/stack")
    }
    assert set(specs.values()) == {((), (), ("x",))}
    assert sorted(specs) in (
        ["0/0/stack[0:2]", "0/0/stack[2:5]"],
        ["0/0/stack[0:3]", "0/0/stack[3:5]"],
    )


def test_a_checkpoint_of_layers_in_stages_is_restored_for_any_plan(tmp_path):
    parallel = autopar.parallelize(momentum_step, method=stages(2), donate_argnums=())
    state, _ = parallel(momentum_state(), X)
    autopar.save_checkpoint(tmp_path, state, 1)
    specs = parallel.get_executable(state, X).get_input_placement_specs()[0]
    restored = autopar.restore_checkpoint(tmp_path, 1, specs)
    for one, other in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        assert [piece.sharding for piece in one.pieces] == list(other.sharding)
        assert (np.asarray(one) == np.asarray(other)).all()
    assert autopar.restore_checkpoint(tmp_path, 1)["[0]['stack']"].shape == (5, WIDTH, WIDTH)
    method = autopar.ShardParallel(devices=2)
    whole = autopar.parallelize(momentum_step, method=method, donate_argnums=())
    expected = parallel(restored, X)[1]
    assert np.allclose(whole(restored, X)[1], expected, rtol=1e-5)
    specs = whole.get_executable(state, X).get_input_placement_specs()[0]
    assert np.allclose(parallel(autopar.restore_checkpoint(tmp_path, 1, specs), X)[1], expected)


def test_random_keys_of_layers_are_in_their_stages(tmp_path):
    """The keys of dropout that the modules of nnx store are split with their weights."""

    def step(state, batch):
        def loss(stack):
            def layer(x, own):
                weights, key = own
                key, mask = jax.random.split(key)
                return jnp.tanh(x @ weights) * jax.random.bernoulli(mask, 0.8, x.shape), key

            x, keys = lax.scan(layer, batch, (stack, state["keys"]))
            return (x**2).mean(), keys

        (value, keys), gradients = jax.value_and_grad(loss, has_aux=True)(state["stack"])
        return {"stack": state["stack"] - 0.1 * gradients, "keys": keys}, value

    state = {"stack": weights(4, WIDTH, WIDTH), "keys": jax.random.split(jax.random.key(0), 4)}
    parallel = autopar.parallelize(step, method=stages(2), donate_argnums=())
    first, value = parallel(state, X)
    expected, expected_value = jax.jit(step)(state, X)
    assert np.allclose(value, expected_value, rtol=1e-5)
    assert (jnp.asarray(first["keys"]) == expected["keys"]).all()
    autopar.save_checkpoint(tmp_path, first, 1)
    specs = parallel.get_executable(first, X).get_input_placement_specs()[0]
    restored = autopar.restore_checkpoint(tmp_path, 1, specs)
    second, value = parallel(restored, X)
    expected, expected_value = jax.jit(step)(expected, X)
    assert np.allclose(value, expected_value, rtol=1e-5)
    assert (jnp.asarray(second["keys"]) == expected["keys"]).all()


def test_a_state_is_created_in_the_stages_of_its_layers():
    parallel = autopar.parallelize(momentum_step, method=stages(2), donate_argnums=())

    def make(batch):
        params = {"stack": jax.random.normal(jax.random.key(0), (5, WIDTH, WIDTH))}
        return params, jax.tree.map(jnp.zeros_like, params)

    create = autopar.parallelize(make, method=autopar.CreateStateParallel(parallel, [X]))
    created = create(X)
    assert all(isinstance(leaf, JoinedArray) for leaf in jax.tree.leaves(created))
    for one, other in zip(jax.tree.leaves(created), jax.tree.leaves(make(X)), strict=True):
        assert np.allclose(np.asarray(one), other, atol=1e-6)
    executable = parallel.get_executable(created, X)
    executable(created, *executable.shard_args(created, X)[1:])
