"""Pipelined steps equal one device: schedules, losses, state, skip connections, tied weights."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar import ManualStageOption, UniformStageOption
from autopar.pipeline.pipeline_schedules import has_backward, schedule_kind, schedule_names
from simulator.program import Send
from tests.autopar.pipeline.stack_steps import (
    WIDTH,
    assert_as_serial,
    descend,
    pipeline,
    stack,
    stack_batch,
    stack_loss,
    stack_params,
    stack_step,
)
from tests.tiers import fast, pairs, slow

TRAINING = [name for name in schedule_names() if has_backward(name)]


@pytest.mark.parametrize(("schedule", "stages"), pairs(TRAINING, [2, 4]))
def test_every_schedule_equals_one_device(schedule: str, stages: int) -> None:
    chunks = schedule_kind(schedule).num_chunks or 2
    method = pipeline(
        pipeline_schedule=schedule,
        num_chunks=chunks,
        stage_option=UniformStageOption(stages),
        devices=stages // chunks,
    )
    assert_as_serial(stack_step, method, stack_params(), stack_batch())


def test_stages_have_meshes_of_different_logical_shape() -> None:
    stages = ManualStageOption([[0], [1, 2], [3]], [(1, 1), (1, 2), (1, 4)], [(1,), (1, 2), (2, 2)])
    step = assert_as_serial(
        stack_step, pipeline(stage_option=stages, devices=7), stack_params(), stack_batch()
    )
    plan = step.get_executable(stack_params(), stack_batch()).plan
    assert [stage.mesh_shape for stage in plan.stages] == [(1,), (1, 2), (2, 2)]
    assert [stage.devices for stage in plan.stages] == [(0,), (1, 2), (3, 4, 5, 6)]


def tied_step(params: dict[str, Any], batch: dict[str, Any]) -> tuple[Any, jax.Array]:
    """Take a step with an embedding that the first and the last layer share."""

    @autopar.manual_layer_construction
    def loss(params: Any) -> jax.Array:
        x = stack(params, params["embedding"][batch["words"]])
        autopar.mark_pipeline_boundary()
        logits = x @ params["embedding"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["next"]).mean()

    return descend(params, autopar.value_and_grad(loss)(params))


def tied_args() -> tuple[dict[str, Any], dict[str, Any]]:
    rng = np.random.default_rng(2)
    embedding = rng.normal(0, 0.3, (48, WIDTH)).astype(np.float32)
    batch = {name: rng.integers(0, 48, (16, 8)).astype(np.int32) for name in ("words", "next")}
    return {"embedding": embedding, **stack_params(2)}, batch


def test_the_gradient_of_a_tied_embedding_is_sent_once_per_step() -> None:
    step = assert_as_serial(tied_step, pipeline(devices=3), *tied_args())
    program = step.get_executable(*tied_args()).program
    sizes = [
        i.num_bytes
        for row in program.instructions
        for i in row
        if isinstance(i, Send) and i.num_bytes == 48 * WIDTH * 4
    ]
    # once per step, the embedding is sent to the last stage and its gradient is sent back
    assert len(sizes) == 2


def test_a_tied_embedding_is_in_the_memory_of_the_stage_that_receives_it_once() -> None:
    args = tied_args()
    plan = autopar.plan_step(tied_step, args, method=pipeline(devices=3), cluster="dgx_a100_80")
    program = autopar.compile_step(tied_step, args, plan, "dgx_a100_80", fidelity="analytic")
    last = program.memory[-1]
    assert last.arguments == args[1]["next"].nbytes
    assert last.roles["inputs"] == args[1]["next"].nbytes + args[0]["embedding"].nbytes


def test_skip_connections_pass_over_stages() -> None:
    def step(params: Any, batch: Any) -> Any:
        @autopar.manual_layer_construction
        def loss(params: Any) -> jax.Array:
            first = jnp.tanh(batch["x"] @ params["w0"])
            autopar.mark_pipeline_boundary()
            second = jnp.tanh(first @ params["w1"])
            autopar.mark_pipeline_boundary()
            third = jnp.tanh(second @ params["w2"])
            autopar.mark_pipeline_boundary()
            last = (third + first) @ params["w3"] + batch["x"]
            return jnp.mean((last - batch["y"]) ** 2)

        return descend(params, autopar.value_and_grad(loss)(params))

    assert_as_serial(step, pipeline(), stack_params(), stack_batch())


def test_the_global_norm_is_clipped_over_all_stages() -> None:
    tx = optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(1.0, momentum=0.9))

    def step(state: Any, batch: Any) -> Any:
        @autopar.manual_layer_construction
        def loss(params: Any) -> jax.Array:
            return stack_loss(params, batch)

        params, opt_state = state
        value, gradients = autopar.value_and_grad(loss)(params)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value, optax.tree.norm(gradients)

    params = stack_params()
    assert_as_serial(step, pipeline(), (params, tx.init(params)), stack_batch())


@pytest.mark.parametrize("scale", [8.0, 3e38])
def test_a_dynamic_loss_scale_is_halved_on_all_stages_if_one_overflows(scale: float) -> None:
    def step(state: Any, batch: Any) -> Any:
        @autopar.manual_layer_construction
        def loss(params: Any) -> jax.Array:
            return jnp.mean((stack(params, batch["x"]) - 900 * batch["y"]) ** 2) * state["scale"]

        gradients = autopar.grad(loss)(state["params"])
        gradients = jax.tree.map(lambda g: g / state["scale"], gradients)
        finite = functools.reduce(
            jnp.logical_and, [jnp.isfinite(g).all() for g in jax.tree.leaves(gradients)]
        )
        params = jax.tree.map(
            lambda p, g: jnp.where(finite, p - 1e-4 * g, p), state["params"], gradients
        )
        scale = jnp.where(finite, state["scale"] * 2, state["scale"] / 2)
        return {"params": params, "scale": scale}, finite

    state = {"params": stack_params(), "scale": np.float32(scale)}
    parallel = assert_as_serial(step, pipeline(), state, stack_batch())
    _, finite = parallel(state, stack_batch())
    assert bool(finite) == (scale == 8.0)


@pytest.mark.parametrize("reduce", [jnp.sum, jnp.mean])
def test_losses_that_are_sums_or_means_equal_one_device(reduce: Any) -> None:
    def step(params: Any, batch: Any) -> Any:
        @autopar.manual_layer_construction
        def loss(params: Any) -> jax.Array:
            return 0.01 * reduce((stack(params, batch["x"]) - batch["y"]) ** 2)

        return descend(params, autopar.value_and_grad(loss)(params))

    assert_as_serial(step, pipeline(), stack_params(), stack_batch())


def masked_step(params: Any, batch: Any, at_least: int = 0) -> Any:
    @autopar.manual_layer_construction
    def loss(params: Any) -> jax.Array:
        error = (stack(params, batch["x"]) - batch["y"]) ** 2
        mask = batch["x"] > 0
        count = jnp.maximum(mask.sum(), at_least) if at_least else mask.sum()
        return (error * mask).sum() / count

    return descend(params, autopar.value_and_grad(loss)(params))


@pytest.mark.parametrize(
    ("schedule", "num_micro_batches"), pairs(["1f1b", "zero_bubble_h1"], [1, 4])
)
def test_a_masked_mean_is_divided_by_the_mask_of_the_whole_batch(
    schedule: str, num_micro_batches: int
) -> None:
    method = pipeline(num_micro_batches, pipeline_schedule=schedule)
    parallel = assert_as_serial(masked_step, method, stack_params(), stack_batch())
    executable = parallel.get_executable(stack_params(), stack_batch())
    rounds = [
        instruction.micro_batch
        for row in executable.program.instructions
        for instruction in row
        if str(instruction)[1:2] == "U"
    ]
    # a first round sends the sum of the mask to the other stages, which divide in a second one
    assert (max(rounds) > 0) == (num_micro_batches > 1)


def test_a_masked_mean_of_at_least_some_examples_equals_one_device() -> None:
    """The bound, more than a microbatch has and less than the batch, holds for the batch."""
    batch = stack_batch()
    step = functools.partial(masked_step, at_least=int((batch["x"] > 0).sum()) - 1)
    assert_as_serial(step, pipeline(), stack_params(), batch, steps=1)
    bounded = functools.partial(masked_step, at_least=batch["x"].size)
    assert_as_serial(bounded, pipeline(), stack_params(), batch, steps=1)


def test_a_step_returns_aux_values_and_uses_keys_integers_and_constants() -> None:
    def step(state: Any, batch: Any, key: jax.Array) -> Any:
        @autopar.manual_layer_construction
        def loss(params: Any) -> tuple[jax.Array, dict[str, Any]]:
            x = stack({"w0": params["w0"], "w1": params["w1"]}, batch["x"])
            mask = jax.random.bernoulli(jax.random.fold_in(key, state["step"]), 0.5, (WIDTH,))
            autopar.mark_pipeline_boundary()
            x = jnp.where(mask, x, 0) @ params["w2"]
            hits = (batch["label"] == 1).sum()
            return jnp.mean((x - batch["y"]) ** 2), {
                "hits": hits,
                "mean": x.mean(),
                "three": 3,
                "mask": mask,
            }

        (value, aux), gradients = autopar.value_and_grad(loss, has_aux=True)(state["params"])
        params = jax.tree.map(lambda p, g: p - 0.5 * g, state["params"], gradients)
        return {"params": params, "step": state["step"] + 1}, value, aux

    batch = stack_batch() | {"label": np.arange(16, dtype=np.int32) % 3}
    state = {"params": stack_params(3), "step": np.int32(0)}
    assert_as_serial(step, pipeline(devices=3), state, batch, jax.random.key(3))


def test_gradients_of_several_losses_are_accumulated() -> None:
    def step(params: Any, batch: Any) -> Any:
        def error(target: str, params: Any) -> jax.Array:
            return jnp.mean((stack(params, batch["x"]) - batch[target]) ** 2)

        layered = autopar.manual_layer_construction
        one, first = autopar.value_and_grad(layered(functools.partial(error, "y")))(params)
        two, second = autopar.value_and_grad(layered(functools.partial(error, "x")))(params)
        return descend(params, (one + two, jax.tree.map(jnp.add, first, second)))

    assert_as_serial(step, pipeline(), stack_params(), stack_batch())


def test_two_pipelines_run_alternately_in_one_process() -> None:
    stack_function = autopar.parallelize(stack_step, method=pipeline())
    tied_function = autopar.parallelize(tied_step, method=pipeline(devices=3))
    losses = [
        [stack_function(stack_params(), stack_batch())[1], tied_function(*tied_args())[1]]
        for _ in range(2)
    ]
    assert losses[0] == losses[1]
    np.testing.assert_allclose(
        losses[0][0], jax.jit(stack_step)(stack_params(), stack_batch())[1], rtol=1e-5
    )


def test_inference_returns_arrays_scalars_and_constants() -> None:
    def infer(params: Any, x: jax.Array) -> Any:
        a = stack(params, x)
        return a, a.sum(), 3

    method = pipeline(pipeline_schedule="inference", layer_option=autopar.ManualLayerOption())
    actual = autopar.parallelize(infer, method=method)(stack_params(), stack_batch()["x"])
    autopar.testing.assert_allclose(actual, jax.jit(infer)(stack_params(), stack_batch()["x"]))


def counter(params: Any, state: Any) -> tuple[Any, Any, Any]:
    """Scale the loss by a counter; return scales of layers, scale of the loss, new state."""
    count = state + 1
    return [1.0, 1.0], 1 / count, count


def split_key(params: Any, state: Any) -> tuple[Any, Any, Any]:
    """Scale layers by a mask that one half of a key draws; the other half is the new state."""
    key, sub = jax.random.split(jax.random.wrap_key_data(state))
    mask = jax.random.bernoulli(sub, 0.8, (WIDTH,)).astype(jnp.float32)
    return [mask, mask], 1.0, jax.random.key_data(key)


def moving_average(params: Any, state: Any) -> tuple[Any, Any, Any]:
    """Scale each layer by a moving average of its weights."""
    average = [0.9 * old + 0.1 * params[f"w{i}"] for i, old in enumerate(state)]
    return [weights.sum(0) for weights in average], 1.0, average


def spectral_norm(params: Any, state: Any) -> tuple[Any, Any, Any]:
    """Scale each layer by its spectral norm, by power iteration whose vectors are the state."""

    def iterate(w: jax.Array, start: jax.Array) -> jax.Array:
        def body(carry: Any) -> Any:
            u = w.T @ (w @ carry[1])
            return carry[0] + 1, u / jnp.linalg.norm(u)

        return jax.lax.while_loop(lambda carry: carry[0] < 3, body, (0, start))[1]

    vectors = [iterate(params[f"w{i}"], u) for i, u in enumerate(state)]
    return [1 / jnp.linalg.norm(params[f"w{i}"] @ u) for i, u in enumerate(vectors)], 1.0, vectors


SHARED = {
    counter: np.float32(2),
    split_key: np.array([0, 7], np.uint32),
    moving_average: [np.full((WIDTH, WIDTH), 0.1, np.float32)] * 2,
    spectral_norm: [np.ones(WIDTH, np.float32)] * 2,
}


@pytest.mark.parametrize("count", [4, *slow(1)])
@pytest.mark.parametrize("kind", fast(SHARED, [counter, moving_average]))
def test_values_computed_before_the_loss_may_be_read_by_it_and_returned(
    kind: Any, count: int
) -> None:
    def step(params_and_state: Any, batch: Any) -> tuple[Any, jax.Array]:
        params, state = params_and_state
        scales, factor, new_state = kind(params, state)

        @autopar.manual_layer_construction
        def loss(params: Any) -> jax.Array:
            x = jnp.tanh(batch["x"] @ params["w0"] * scales[0])
            autopar.mark_pipeline_boundary()
            return factor * jnp.mean((x @ params["w1"] * scales[1] - batch["y"]) ** 2)

        new_params, value = descend(params, autopar.value_and_grad(loss)(params))
        return (new_params, new_state), value

    assert_as_serial(step, pipeline(count), (stack_params(2), SHARED[kind]), stack_batch())


@pytest.mark.parametrize("count", [1, 4])
def test_a_later_round_of_the_update_may_read_a_value_of_the_loss(count: int) -> None:
    """The update reads a value of a layer and waits for the gradients of all stages."""

    def step(params: Any, batch: Any) -> tuple[Any, jax.Array]:
        @autopar.manual_layer_construction
        def loss(params: Any) -> jax.Array:
            x = jnp.tanh(batch["x"] @ params["w0"])
            autopar.mark_pipeline_boundary()
            return jnp.mean((x @ params["w1"] - batch["y"]) ** 2) + jnp.sum(jnp.sin(params["w1"]))

        value, gradients = autopar.value_and_grad(loss)(params)
        norm = optax.tree.norm(gradients)
        rates = {"w0": 0.1, "w1": 0.1 * jnp.sin(params["w1"])}
        return {name: p - rates[name] * gradients[name] / norm for name, p in params.items()}, value

    assert_as_serial(step, pipeline(count), stack_params(2), stack_batch())


@pytest.mark.parametrize(
    "options", [{"stage_option": UniformStageOption(2)}, {}], ids=["uniform", "auto"]
)
def test_a_stage_may_be_empty(options: dict[str, Any]) -> None:
    def step(params: Any, batch: Any) -> tuple[Any, jax.Array]:
        @autopar.manual_layer_construction
        def loss(params: Any) -> jax.Array:
            autopar.mark_pipeline_boundary()
            return jnp.mean((jnp.tanh(batch["x"] @ params["w0"]) @ params["w1"] - batch["y"]) ** 2)

        return descend(params, autopar.value_and_grad(loss)(params))

    assert_as_serial(step, pipeline(4, **options), stack_params(2), stack_batch())
