"""With `fork_rng` each shard draws its own mask; without it masks equal those of one device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.directives import DirectiveError, ModelSchedule, Verify, build, create_schedule
from tests.autopar.directives.scheduled_models import mlp_schedule
from tests.models import Dropping

WAYS = 4
X, KEY = jnp.ones((128, 8)), jax.random.key(1)


def apply(params: Any, x: jax.Array, key: jax.Array) -> Any:
    return Dropping().apply(params, x, rngs={"dropout": key})


PARAMS = jax.tree.map(
    lambda p: jnp.full(p.shape, 0.1),
    jax.eval_shape(Dropping().init, {"params": KEY, "dropout": KEY}, X),
)
HIDDEN, RESULT = apply(PARAMS, X, KEY)


def tensor_parallel(mesh: Any = WAYS, mesh_axis: str = "x") -> ModelSchedule:
    sch = create_schedule(apply, PARAMS, [X, KEY], mesh=mesh)
    sch["up"].shard("kernel", axis=1, mesh_axis=mesh_axis).shard(
        "bias", axis=0, mesh_axis=mesh_axis
    )
    sch["down"].shard("kernel", axis=0, mesh_axis=mesh_axis).sync(
        "fwd_post", "all_reduce", mesh_axis=mesh_axis
    )
    return sch


def shards_of(hidden: jax.Array) -> list[np.ndarray]:
    return np.split(np.asarray(hidden), WAYS, axis=1)


def test_without_fork_rng_masks_equal_those_of_one_device() -> None:
    hidden, result = build(tensor_parallel()).apply(PARAMS, X, KEY)
    np.testing.assert_array_equal(hidden != 0, HIDDEN != 0)
    np.testing.assert_allclose(result, RESULT, rtol=1e-5)


def test_shards_draw_different_masks_and_replicated_values_the_same_mask() -> None:
    sch = tensor_parallel()
    sch.fork_rng()
    built = build(sch)
    hidden, result = built.apply(PARAMS, X, KEY)
    masks = [part != 0 for part in shards_of(hidden)]
    # Independent masks agree in 1 - 2 * 0.25 * 0.75 = 0.625 of all elements. The mean over 2048
    # elements has a standard deviation of 0.011.
    agree = [np.mean(one == other) for k, one in enumerate(masks) for other in masks[:k]]
    np.testing.assert_allclose(agree, 0.625, atol=0.05)
    assert not any(
        np.array_equal(mask, part != 0) for mask, part in zip(masks, shards_of(HIDDEN), strict=True)
    )
    # The result is replicated, so that every device has the model's outer mask.
    for shard in result.addressable_shards:
        np.testing.assert_array_equal(shard.data != 0, RESULT != 0)
    assert not built.same_draws
    assert build(tensor_parallel()).same_draws


def test_forked_dropout_keeps_the_expectation() -> None:
    sch = tensor_parallel()
    sch["inner"].fork_rng()
    run = jax.jit(build(sch).apply)
    keys = jax.random.split(KEY, 8)
    hidden = np.mean([run(PARAMS, X, key)[0] for key in keys], 0)
    expected = jax.nn.relu(X @ PARAMS["params"]["up"]["kernel"] + 0.1)
    # each hidden feature has 8 * 128 draws: a deviation of sqrt(0.25 / 0.75 / 1024) = 1.8 %
    np.testing.assert_allclose(hidden.mean(0), expected.mean(0), rtol=0.08)


def test_devices_draw_no_more_than_their_shards() -> None:
    sch = tensor_parallel()
    whole = str(jax.make_jaxpr(build(sch).apply)(PARAMS, X, KEY))
    sch["inner"].fork_rng()
    forked = str(jax.make_jaxpr(build(sch).apply)(PARAMS, X, KEY))
    assert "u32[128,64]" in whole
    assert "u32[128,64]" not in forked


def test_shards_along_the_batch_axis_draw_different_masks() -> None:
    sch = tensor_parallel((2, 2), "y")
    sch["inner"].fork_rng()
    hidden, result = build(sch, batch_axis="x").apply(PARAMS, X, KEY)
    blocks = [
        block != 0
        for rows in np.split(np.asarray(hidden), 2)
        for block in np.split(rows, 2, axis=1)
    ]
    assert not any(
        np.array_equal(one, other) for k, one in enumerate(blocks) for other in blocks[:k]
    )
    np.testing.assert_array_equal(result != 0, RESULT != 0)  # `outer` is not forked


def test_a_draw_with_split_and_whole_uses_is_not_forked() -> None:
    def model(params: Any, x: jax.Array, key: jax.Array) -> Any:
        noise = jax.random.normal(key, (8, 16))
        with jax.named_scope("up"):
            return (x @ params["w"]) * noise, jnp.max(noise)

    x, params = jnp.ones((8, 4)), {"w": jnp.ones((4, 16))}
    sch = create_schedule(model, params, [x, KEY], mesh=WAYS)
    sch.shard("w", axis=1).fork_rng()
    for result, expected in zip(
        build(sch).apply(params, x, KEY), model(params, x, KEY), strict=True
    ):
        np.testing.assert_allclose(result, expected, rtol=1e-5)


@pytest.mark.parametrize(
    "positive",
    [
        jax.nn.relu,
        jax.nn.relu6,
        lambda x: jax.nn.relu(jax.nn.silu(x) + 1),
        jax.checkpoint(lambda x: jax.nn.relu(x)),
    ],
    ids=["relu", "relu6", "nested", "recomputed"],
)
def test_a_draw_is_split_through_functions_with_a_custom_derivative(positive: Any) -> None:
    def model(params: Any, x: jax.Array, key: jax.Array) -> jax.Array:
        return (x @ params["w"]) * positive(jax.random.normal(key, (8, 16)))

    x, params = jnp.ones((8, 4)), {"w": jnp.ones((4, 16))}
    sch = create_schedule(model, params, [x, KEY], mesh=WAYS)
    sch.shard("w", axis=1).fork_rng()
    run = build(sch).apply
    draws = np.asarray(run(params, x, KEY)) / 4
    shards = shards_of(draws)
    assert not any(np.allclose(one, other) for k, one in enumerate(shards) for other in shards[:k])
    assert "u32[8,16]" not in str(jax.make_jaxpr(run)(params, x, KEY))
    gradient = jax.grad(lambda p: jnp.sum(run(p, x, KEY)))(params)["w"]
    np.testing.assert_allclose(gradient, np.broadcast_to(draws.sum(0), (4, 16)), rtol=1e-4)


@pytest.mark.parametrize("backend", ["gspmd", "auto"])
def test_other_backends_draw_as_one_device_does(backend: Any) -> None:
    sch = tensor_parallel()
    sch.fork_rng()
    built = build(sch, backend)
    assert built.same_draws
    hidden, _ = jax.jit(built.apply)(PARAMS, X, KEY)
    np.testing.assert_array_equal(hidden != 0, HIDDEN != 0)


def test_gradients_are_those_of_the_mask_that_was_drawn() -> None:
    """The gradient of a bias is the sum over rows of 2 * hidden / size / (1 - rate)."""
    sch = tensor_parallel()
    sch["inner"].fork_rng()
    run = build(sch).apply
    gradients = jax.jit(jax.grad(lambda p: jnp.mean(run(p, X, KEY)[0] ** 2)))(PARAMS)
    hidden = run(PARAMS, X, KEY)[0]
    expected = (2 * hidden / hidden.size / (1 - Dropping.rate)).sum(0)
    np.testing.assert_allclose(gradients["params"]["up"]["bias"], expected, rtol=1e-4)


def test_verify_passes_with_a_forked_mask() -> None:
    sch = tensor_parallel()
    sch["inner"].fork_rng()
    Verify(sch, [X, KEY]).check()


def test_forking_a_module_without_random_numbers_is_refused() -> None:
    with pytest.raises(
        DirectiveError, match="linear1 draws no random numbers: put fork_rng on what has dropout"
    ):
        mlp_schedule()["linear1"].fork_rng()
    sch = tensor_parallel()
    sch["inner"].fork_rng()
    with pytest.raises(DirectiveError, match=r"inner has fork_rng.* already"):
        sch["inner"].fork_rng()
