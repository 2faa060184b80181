"""What a step creates for its examples is the same in microbatches, or the step is refused."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax import lax

import autopar
from autopar.ir.flatten import flatten
from autopar.pipeline.pipeline_schedules import has_backward, schedule_names
from autopar.primitives import op_factors
from autopar.testing import assert_allclose
from autopar.tracing.trace import trace
from tests.tiers import slow

RNG = np.random.default_rng(0)
ROWS = 16
PARAMS = {
    "first": RNG.standard_normal((6, 8)).astype(np.float32),
    "second": RNG.standard_normal((8, 8)).astype(np.float32),
    "token": RNG.standard_normal((1, 8)).astype(np.float32),
    "table": RNG.standard_normal((32, 8)).astype(np.float32),
}
BATCH = {
    "x": RNG.standard_normal((ROWS, 6)).astype(np.float32),
    "label": RNG.integers(0, 8, ROWS).astype(np.int32),
}
KEY = np.asarray(jax.random.PRNGKey(3))
NUM_MICRO_BATCHES = 4
METHODS = {
    "shards": autopar.ShardParallel(devices=(2, 4), num_micro_batches=NUM_MICRO_BATCHES),
    "local accumulation": autopar.DataParallel(devices=2, num_micro_batches=NUM_MICRO_BATCHES),
    "pipeline": autopar.PipeshardParallel(
        devices=4,
        num_micro_batches=NUM_MICRO_BATCHES,
        layer_option=autopar.AutoLayerOption(2),
        stage_option=autopar.UniformStageOption(2),
    ),
}

type Change = Callable[[jax.Array, jax.Array, dict[str, jax.Array], dict[str, Any]], jax.Array]
"""(hidden, key, params, batch) -> other hidden values, with an example in each row."""


def dropout(key, hidden):
    return jnp.where(jax.random.bernoulli(key, 0.8, hidden.shape), hidden / 0.8, 0)


def rows_of(hidden):
    return jnp.arange(hidden.shape[0])


def in_scan(hidden, key):
    return lax.scan(lambda h, k: (dropout(k, jnp.tanh(h)), None), hidden, jax.random.split(key, 3))[
        0
    ]


def in_nested_scans(hidden, key):
    def outer(h, k):
        return lax.scan(lambda h, k: (dropout(k, h), None), h, jax.random.split(k, 2))[0], None

    return lax.scan(outer, hidden, jax.random.split(key, 2))[0]


def in_while_loop(hidden, key):
    def body(carry):
        number, noise = carry
        return number + 1, noise + jax.random.normal(jax.random.fold_in(key, number), noise.shape)

    start = 0, jnp.zeros_like(hidden)
    return hidden + lax.while_loop(lambda carry: carry[0] < 3, body, start)[1]


def in_branches(hidden, key, params):
    return lax.cond(
        params["token"][0, 0] > 0,
        lambda h: dropout(key, h),
        lambda h: h * jax.random.uniform(key, h.shape),
        hidden,
    )


def sampled(hidden, key):
    choice = jax.random.categorical(key, lax.stop_gradient(hidden))
    return hidden * jnp.take_along_axis(hidden, choice[:, None], 1)


def with_keys(keys, hidden):
    return hidden * jax.vmap(lambda k: jax.random.gumbel(k, hidden.shape[1:]))(keys)


def with_first_rows_marked(hidden):
    return jnp.where((rows_of(hidden) % 3 == 0)[:, None], hidden, 0.5)


CHANGES: dict[str, Change] = {
    "bernoulli": lambda h, k, p, b: dropout(k, h),
    "typed key": lambda h, k, p, b: dropout(jax.random.wrap_key_data(k), h),
    "normal": lambda h, k, p, b: h * jax.random.normal(k, h.shape),
    "uniform": lambda h, k, p, b: h * jax.random.uniform(k, h.shape),
    "bfloat16": lambda h, k, p, b: h * jax.random.uniform(k, h.shape, jnp.bfloat16),
    "bytes": lambda h, k, p, b: h * (jax.random.bits(k, h.shape, jnp.uint8) / 255),
    "truncated normal": lambda h, k, p, b: h * jax.random.truncated_normal(k, -2, 2, h.shape),
    "integers": lambda h, k, p, b: h * jax.random.randint(k, h.shape, 0, 5),
    "gumbel": lambda h, k, p, b: h * jax.random.gumbel(k, h.shape),
    "exponential": lambda h, k, p, b: h * jax.random.exponential(k, h.shape),
    "categorical": lambda h, k, p, b: sampled(h, k),
    "a number for each example": lambda h, k, p, b: h * jax.random.uniform(k, (len(h), 1)),
    "examples last": lambda h, k, p, b: (h.T * jax.random.normal(k, h.T.shape)).T,
    "examples in the middle": lambda h, k, p, b: h * jax.random.normal(k, (3, *h.shape)).mean(0),
    "several rows per example": lambda h, k, p, b: (
        h.reshape(-1, 2) * jax.random.normal(k, (h.size // 2, 2))
    ).reshape(h.shape),
    "a row for two examples": lambda h, k, p, b: (
        h.reshape(-1, 2, h.shape[1]) * jax.random.normal(k, (len(h) // 2, 1, 1))
    ).reshape(h.shape),
    "a key for each example": lambda h, k, p, b: with_keys(jax.random.split(k, len(h)), h),
    "positions folded into a key": lambda h, k, p, b: with_keys(
        jax.vmap(lambda i: jax.random.fold_in(k, i))(rows_of(h)), h
    ),
    "keys of layers": lambda h, k, p, b: (
        h * jax.vmap(lambda k: jax.random.normal(k, h.shape))(jax.random.split(k, 3)).sum(0)
    ),
    "joined arrays": lambda h, k, p, b: dropout(k, jnp.concatenate([h, -h]))[: len(h)],
    "a key for each row of joined arrays": lambda h, k, p, b: with_keys(
        jax.random.split(k, 2 * len(h)), jnp.concatenate([-h, h])
    )[len(h) :],
    "in a scan": lambda h, k, p, b: in_scan(h, k),
    "index in a loop": lambda h, k, p, b: lax.fori_loop(
        0, 3, lambda t, h: jnp.tanh(h + b["x"][:, t, None]), h
    ),
    "in nested scans": lambda h, k, p, b: in_nested_scans(h, k),
    "in a while loop": lambda h, k, p, b: in_while_loop(h, k),
    "in branches": lambda h, k, p, b: in_branches(h, k, p),
    "checkpointed": lambda h, k, p, b: jax.checkpoint(dropout)(k, h),
    "position as a number": lambda h, k, p, b: h + rows_of(h)[:, None] / 10,
    "mask by position": lambda h, k, p, b: with_first_rows_marked(h),
    "position in a table": lambda h, k, p, b: h + p["table"][rows_of(h)],
    "nan beyond the end of a table": lambda h, k, p, b: (
        h + p["table"].at[jnp.arange(len(p["table"]))].get(mode="fill").sum(0)
    ),
    "position by the size of the batch": lambda h, k, p, b: h * (rows_of(h) / len(h))[:, None],
    "halves of the batch": lambda h, k, p, b: (
        h * jnp.where(rows_of(h) < len(h) // 2, 1.0, 2.0)[:, None]
    ),
    "integers below the size of the batch": lambda h, k, p, b: (
        h * jax.random.randint(k, (len(h),), 0, len(h))[:, None] / 10
    ),
    "a while loop for each example": lambda h, k, p, b: (
        h * jax.vmap(lambda x: halved(x, lambda _, x: (x > 0.1).any()))(b["x"])[:, :1]
    ),
    "a Poisson variable for each example": lambda h, k, p, b: (
        h * jax.vmap(lambda k: jax.random.poisson(k, 2.0))(jax.random.split(k, len(h)))[:, None]
    ),
    "element of each row": lambda h, k, p, b: h * h[rows_of(h), b["label"]][:, None],
    "elements of each row": lambda h, k, p, b: (
        h * h[rows_of(h)[:, None], jnp.stack([b["label"], b["label"] // 2], 1)].sum(1)[:, None]
    ),
    "element changed in each row": lambda h, k, p, b: h.at[rows_of(h), b["label"]].set(0.5),
    "element added in each row": lambda h, k, p, b: h.at[rows_of(h), b["label"]].add(h[:, 0]),
    "elements of each row in a scan": lambda h, k, p, b: lax.scan(
        lambda h, i: (jnp.sin(h.at[rows_of(h), i].add(h[rows_of(h), i // 2])), None),
        h,
        jnp.stack([b["label"], b["label"] // 2]),
    )[0],
    "all rows": lambda h, k, p, b: h * h[rows_of(h)],
    "tiled token": lambda h, k, p, b: h + jnp.tile(p["token"], (len(h), 1)),
    "repeated rows": lambda h, k, p, b: h * jnp.repeat(h, 3, axis=0).reshape(-1, 3, 8).sum(1),
}


def step_with(*changes: Change) -> Callable[..., Any]:
    """Return a training step that applies the changes after its first layer."""

    def step(params, batch, key):
        def loss(p):
            hidden = jnp.tanh(batch["x"] @ p["first"])
            for number, change in enumerate(changes):
                hidden = jnp.tanh(change(hidden, jax.random.fold_in(key, number), p, batch))
            return (dropout(key, hidden @ p["second"]) ** 2).mean()

        value, gradients = autopar.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    return step


def assert_equals_one_device(step: Callable[..., Any], method: Any, args: Any) -> Any:
    """Run a step by `method`, compare it with one device, and return its executable."""
    parallel = autopar.parallelize(step, method=method, donate_argnums=())
    assert_allclose(parallel(*args), jax.jit(step)(*args), rtol=2e-5, atol=2e-6)
    return parallel.get_last_executable()


SOME = (
    "typed key",
    "examples last",
    "a key for each example",
    "index in a loop",
    "elements of each row in a scan",
    "in nested scans",
    "halves of the batch",
    "element of each row",
    "nan beyond the end of a table",
)
"""Changes of different kinds, which the fast tests combine in one step."""


@pytest.mark.parametrize(
    "method", [*slow(METHODS["shards"]), METHODS["pipeline"]], ids=["shards", "pipeline"]
)
def test_whatever_is_created_for_the_examples_equals_one_device(method):
    args = (PARAMS, BATCH, KEY)
    executable = assert_equals_one_device(
        step_with(*(CHANGES[name] for name in SOME)), method, args
    )
    assert executable.step.positions == len(jax.tree.leaves(args))


@pytest.mark.parametrize("method", slow(*METHODS.values()), ids=METHODS.keys())
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_each_array_created_for_the_examples_equals_one_device(change, method):
    assert_equals_one_device(step_with(change), method, (PARAMS, BATCH, KEY))


@pytest.mark.parametrize("schedule", slow(*filter(has_backward, schedule_names())))
def test_dropout_in_every_stage_equals_one_device_in_every_schedule(schedule):
    method = autopar.PipeshardParallel(
        devices=4,
        num_micro_batches=NUM_MICRO_BATCHES,
        layer_option=autopar.AutoLayerOption(2),
        stage_option=autopar.UniformStageOption(2),
        pipeline_schedule=schedule,
    )
    if method.chunks == 2:
        method = autopar.PipeshardParallel(
            devices=2,
            num_micro_batches=NUM_MICRO_BATCHES,
            layer_option=autopar.AutoLayerOption(4),
            stage_option=autopar.UniformStageOption(4),
            pipeline_schedule=schedule,
        )
    keys = ("typed key", "a key for each example", "element of each row")
    assert_equals_one_device(deep_step(*(CHANGES[k] for k in keys)), method, (PARAMS, BATCH, KEY))


def deep_step(*changes: Change) -> Callable[..., Any]:
    """Return a training step with a layer before each change."""

    def step(params, batch, key):
        def loss(p):
            hidden = jnp.tanh(batch["x"] @ p["first"])
            for number, change in enumerate(changes):
                hidden = change(hidden, jax.random.fold_in(key, number), p, batch)
                hidden = jnp.tanh(hidden @ p["second"])
            return (hidden**2).mean()

        value, gradients = autopar.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    return step


@pytest.mark.parametrize("remat", slow(False, True))
def test_dropout_in_layers_of_a_scan_that_stages_share_equals_one_device(remat):
    def step(params, batch, key):
        def layer(hidden, scanned):
            weights, key = scanned
            return dropout(key, jnp.tanh(hidden @ weights)), None

        def loss(weights):
            body = jax.checkpoint(layer) if remat else layer
            hidden, _ = lax.scan(body, batch["x"], (weights, jax.random.split(key, 4)))
            return (hidden**2).mean()

        return autopar.value_and_grad(loss)(params)

    weights = RNG.standard_normal((4, 6, 6)).astype(np.float32)
    assert_equals_one_device(step, METHODS["pipeline"], (weights, BATCH, KEY))


@pytest.mark.slow
def test_dropout_of_linen_equals_one_device_with_remat_layers():
    model = nn.Sequential(
        [
            nn.Dense(16),
            nn.relu,
            nn.Dropout(0.2, deterministic=False),
            nn.Dense(8),
            nn.Dropout(0.2, deterministic=False),
        ]
    )

    def step(state, batch, key):
        def loss(params):
            logits: Any = model.apply(params, batch["x"], rngs={"dropout": key})
            rows = jnp.arange(len(logits))
            return -jax.nn.log_softmax(logits)[rows, batch["label"]].mean()

        value, gradients = autopar.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=gradients), value

    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    params = model.init(keys, BATCH["x"])
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.1))
    method = autopar.PipeshardParallel(
        devices=4,
        num_micro_batches=2,
        layer_option=autopar.AutoLayerOption(2, remat_layer=True),
        stage_option=autopar.UniformStageOption(2),
    )
    assert_equals_one_device(step, method, (state, BATCH, jax.random.key(5)))


@pytest.mark.parametrize("method", slow(METHODS["shards"], METHODS["pipeline"]))
def test_dropout_of_nnx_equals_one_device(method):
    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.first = nnx.Linear(6, 16, rngs=rngs)
            self.dropout = nnx.Dropout(0.3, rngs=rngs)
            self.second = nnx.Linear(16, 8, rngs=rngs)

        def __call__(self, x):
            return self.second(self.dropout(nnx.relu(self.first(x))))

    graph, params, rest = nnx.split(Model(nnx.Rngs(0, dropout=1)), nnx.Param, ...)

    def step(state, batch):
        def loss(params):
            model = nnx.merge(graph, params, state["rest"], copy=True)
            value = (model(batch["x"]) ** 2).mean()
            return value, nnx.split(model, nnx.Param, ...)[2]

        (value, rest), gradients = autopar.value_and_grad(loss, has_aux=True)(state["params"])
        params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], gradients)
        return {"params": params, "rest": rest}, value

    assert_equals_values(step, method, ({"params": params, "rest": rest}, BATCH))


def assert_equals_values(step: Callable[..., Any], method: Any, args: Any) -> None:
    """Compare a step with one device; random keys are compared as their data."""

    def of_data(*args):
        return jax.tree.map(
            lambda a: jax.random.key_data(a) if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else a,
            step(*args),
        )

    assert_equals_one_device(of_data, method, args)


def refused(change: Change, **options: Any) -> str:
    with pytest.raises(autopar.MicrobatchError) as error:
        trace(step_with(change), (PARAMS, BATCH, KEY), (1,), NUM_MICRO_BATCHES, **options)
    return str(error.value)


def halved(x, goes_on):
    """Return `x` after as many iterations, which halve it, as `goes_on(number, x)` is true."""
    return lax.while_loop(
        lambda carry: goes_on(*carry), lambda carry: (carry[0] + 1, carry[1] / 2), (0, x)
    )[1]


def on_shards(change: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of hidden values and a key that runs on shards of the examples."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, whole = jax.P("x"), jax.P()
    return jax.shard_map(change, mesh=mesh, in_specs=(rows, whole), out_specs=rows, check_vma=False)


def swapped_for_few(x, key):
    """A sum of functions of `x` that is another one for few examples."""
    pair = (x, jnp.tanh(x))[:: 1 if len(x) > 3 else -1]
    return jnp.sin(pair[0]) + pair[1]


REFUSED: dict[str, tuple[Change, str]] = {
    "shuffled examples": (lambda h, k, p, b: h * jax.random.permutation(k, h), "sort at"),
    "chosen examples": (lambda h, k, p, b: h + h[np.array([0, 2])].sum(), "at"),
    "examples chosen without a sign": (
        lambda h, k, p, b: (
            h + h.at[np.array([0, 2])].get(mode="clip", wrap_negative_indices=False).sum()
        ),
        "gather at .* looks up examples by their positions in the batch",
    ),
    "examples that others choose": (lambda h, k, p, b: h + h[b["label"]], "at"),
    "reversed examples": (lambda h, k, p, b: h + h[::-1], "rev at"),
    "pairs of all examples": (
        lambda h, k, p, b: h + (h @ h.T * jnp.eye(len(h))) @ h,
        "dot_general",
    ),
    "random bits of a shard": (
        lambda h, k, p, b: h + on_shards(lambda x, k: dropout(k, x))(b["x"], k).sum(1)[:, None],
        "shard_map at .* draws random bits for examples",
    ),
    "size of a shard": (
        lambda h, k, p, b: h + on_shards(lambda x, k: x * len(x))(b["x"], k).sum(1)[:, None],
        "shard_map at .* uses the size of the batch inside its body",
    ),
    "another value by the size of a shard": (
        lambda h, k, p, b: h + on_shards(swapped_for_few)(b["x"], k).sum(1)[:, None],
        "shard_map at .* does other things inside its body for a larger batch",
    ),
    "a row of a table by the size of the batch": (
        lambda h, k, p, b: h * p["table"][len(h) - 1],
        "start_indices, .* slice at",
    ),
    "as many iterations as examples": (
        lambda h, k, p, b: lax.fori_loop(0, len(h), lambda _, h: jnp.sin(h), h),
        "a loop at .* carries something other than sums",
    ),
}


COMPLETED: dict[str, Change] = {
    "examples changed by position": lambda h, k, p, b: h.at[np.array([0])].add(
        1, mode="clip", wrap_negative_indices=False
    ),
    "a power by the size of the batch": lambda h, k, p, b: h ** len(h),
    "a while loop over as many numbers as examples": lambda h, k, p, b: (
        h * halved(b["x"][:, :1], lambda number, _: number < len(h))
    ),
    "a while loop until no example is large": lambda h, k, p, b: (
        h * halved(b["x"][:, :1], lambda _, x: (x > 0.1).any())
    ),
}
"""Changes that need all examples, and no layer of the model after that."""


@pytest.mark.parametrize("change", COMPLETED.values(), ids=COMPLETED.keys())
@pytest.mark.parametrize("method", [METHODS["shards"], *slow(METHODS["pipeline"])])
def test_a_first_pass_computes_what_needs_the_other_examples(change, method):
    assert_equals_values(step_with(change), method, (PARAMS, BATCH, KEY))


@pytest.mark.parametrize(("change", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_what_needs_the_other_examples_is_refused_with_its_line(change, reason):
    message = refused(change)
    assert f"{__file__}:" in message
    assert re.search(reason, message), message


def other_generator(hidden, key):
    return hidden * jax.random.normal(key, hidden.shape)


RBG = jax.random.key(0, impl="rbg")


def test_a_generator_that_draws_all_examples_together_is_refused_with_what_to_do():
    message = refused(lambda h, k, p, b: other_generator(h, RBG))
    assert re.search(r"random_bits at .* implementation rbg; .*threefry.* rng='fold_in'", message)


def test_threefry_that_is_not_partitionable_is_refused_with_what_to_do():
    with jax.threefry_partitionable(False):
        message = refused(CHANGES["normal"])
    assert "jax_threefry_partitionable is off" in message


@pytest.mark.parametrize("method", [METHODS["shards"], *slow(METHODS["pipeline"])])
def test_by_choice_other_generators_have_a_key_for_each_microbatch(method):
    """Microbatch k has the examples k, k + 4, ... and the position of its first one in its key."""
    method = replace(method, rng="fold_in")

    def step(params, batch, key):
        def loss(p):
            hidden = jnp.tanh(batch["x"] @ p["first"])
            return (other_generator(hidden, key) @ p["second"]).mean()

        return autopar.value_and_grad(loss)(params)

    def expected(params, batch, key):
        parts = [
            step(
                params,
                {name: array[number::NUM_MICRO_BATCHES] for name, array in batch.items()},
                jax.random.fold_in(key, number),
            )
            for number in range(NUM_MICRO_BATCHES)
        ]
        return jax.tree.map(lambda *values: sum(values) / NUM_MICRO_BATCHES, *parts)

    parallel = autopar.parallelize(step, method=method)
    args = (PARAMS, BATCH, RBG)
    assert_allclose(parallel(*args), jax.jit(expected)(*args), rtol=2e-5, atol=2e-6)
    plan = parallel.get_last_executable().plan
    assert plan.rng == "fold_in"
    assert any("rng='fold_in'" in warning for warning in plan.warnings)


def test_the_choice_of_other_random_bits_is_kept_in_the_plan(tmp_path):
    step = step_with(lambda h, k, p, b: other_generator(h, RBG), CHANGES["normal"])
    args = (PARAMS, BATCH, KEY)
    method = replace(METHODS["local accumulation"], rng="fold_in")
    first = autopar.parallelize(step, method=method, donate_argnums=())
    results = first(*args)
    path = tmp_path / "plan.json"
    first.get_last_executable().plan.save(path)
    again = autopar.parallelize(
        step, method=autopar.PlanMethod(autopar.Plan.load(path)), donate_argnums=()
    )
    assert_allclose(again(*args), results, rtol=1e-6, atol=1e-6)


def test_threefry_draws_the_same_bits_by_either_choice():
    method = replace(METHODS["shards"], rng="fold_in")
    args = (PARAMS, BATCH, KEY)
    step = step_with(CHANGES["normal"])
    plan = autopar.plan_step(step, args, method=method, cluster="dgx_a100_80")
    assert plan.rng == "exact"
    assert not plan.warnings


def test_positions_are_an_input_that_the_plan_shards_like_the_batch():
    args = (PARAMS, BATCH, KEY)
    parallel = autopar.parallelize(
        step_with(CHANGES["normal"]), method=METHODS["local accumulation"], donate_argnums=()
    )
    executable = parallel.get_executable(*args)
    *_, positions = executable.plan.stages[0].inputs
    assert positions.path == "positions of the examples"
    assert (positions.shape, positions.role, positions.spec) == ((ROWS,), "batch", (("x",),))
    assert jax.tree.structure(executable.in_shardings) == jax.tree.structure(args)
    assert jax.tree.structure(executable.get_input_placement_specs()) == jax.tree.structure(args)


@pytest.mark.slow
def test_reports_and_predictions_are_of_the_step_with_its_positions(tmp_path):
    args = (PARAMS, BATCH, KEY)
    for method in METHODS.values():
        step = autopar.parallelize(
            deep_step(CHANGES["normal"], CHANGES["in a scan"]), method=method
        )
        executable = step.get_executable(*args)
        assert executable.dump_debug_info(tmp_path)
        for fidelity in ("analytic", "compiled"):
            prediction = executable.predict("dgx_a100_80", fidelity=fidelity)
            assert prediction.seconds > 0


def test_a_step_that_creates_nothing_for_its_examples_has_no_positions():
    def step(params, batch, seen):
        hidden, gradients = autopar.value_and_grad(
            lambda p: (jnp.tanh(batch["x"] @ p["first"]) ** 2).mean()
        )(params)
        return gradients, hidden, seen + jnp.arange(len(batch["x"]))

    graph = trace(step, (PARAMS, BATCH, np.int32(0)), (1,), NUM_MICRO_BATCHES)
    assert graph.positions is None


def preferences(params, batch, key):
    """A loss of pairs of neighbouring examples, with dropout and a weight for each pair."""
    scores = dropout(key, jnp.tanh(batch["x"] @ params["first"])).sum(1).reshape(-1, 2)
    weights = jax.random.uniform(key, (len(scores),)) + jnp.arange(len(scores))
    return (jax.nn.softplus(scores[:, 1] - scores[:, 0]) * weights).mean()


@pytest.mark.parametrize("method", [METHODS["shards"], *slow(METHODS["local accumulation"])])
def test_neighbours_that_stay_together_keep_their_positions(method):
    def step(params, batch, key):
        return autopar.value_and_grad(preferences)(params, batch, key)

    assert_equals_one_device(step, method, (PARAMS, BATCH, KEY))


@pytest.mark.parametrize("count", slow(1, 2, 8, 16))
@pytest.mark.parametrize("name", ["normal", "position as a number", "element of each row"])
def test_any_number_of_microbatches_equals_one_device(name, count):
    method = autopar.ShardParallel(devices=2, num_micro_batches=count)
    assert_equals_one_device(step_with(CHANGES[name]), method, (PARAMS, BATCH, KEY))
    pipeline = replace(METHODS["pipeline"], num_micro_batches=count)
    assert_equals_one_device(step_with(CHANGES[name]), pipeline, (PARAMS, BATCH, KEY))


def test_a_single_update_is_not_sharded_along_what_it_indexes():
    """XLA's partitioner would write it into every shard."""

    def update(x, column):
        return x.at[jnp.zeros(1, jnp.int32), column].add(1.0)

    (eqn,) = (
        eqn
        for eqn in flatten(jax.make_jaxpr(update)(jnp.ones((2, 8)), jnp.array([3]))).eqns
        if eqn.primitive is lax.scatter_add_p
    )
    factors = op_factors(eqn)
    assert [factors.kinds[dim[0]] for dim in factors.operands[0]] == ["whole", "whole"]


@pytest.mark.slow
def test_batch_inputs_with_several_rows_per_example_have_positions_of_their_own():
    def loss(params, batch, key):
        first = dropout(key, jnp.tanh(batch["x"] @ params["first"]))
        views = jnp.tanh(batch["views"] @ params["first"])
        views = dropout(jax.random.fold_in(key, 1), views) + jnp.arange(len(views))[:, None] / 9
        return (views.reshape(-1, 2, 8).sum(1) * first).mean()

    def step(params, batch, key):
        return autopar.value_and_grad(loss)(params, batch, key)

    batch = BATCH | {"views": RNG.standard_normal((2 * ROWS, 6)).astype(np.float32)}
    for method in METHODS.values():
        assert_equals_one_device(step, method, (PARAMS, batch, KEY))


def test_a_choice_of_integers_by_a_constant_condition_is_traced_in_microbatches() -> None:
    def step(w, x):
        choice = jax.lax.select_n(np.bool_(True), jnp.int32(1), jnp.int32(2))
        return autopar.grad(lambda w: jnp.mean((x * w) ** 2) * choice)(w)

    args = jnp.ones(4), jnp.arange(32.0).reshape(8, 4)
    parallel = autopar.parallelize(step, method=autopar.ShardParallel((8,), 4))
    np.testing.assert_allclose(parallel(*args), step(*args), rtol=1e-5)


def passes_messages(num_layers):
    """Return a step of a graph network whose messages follow each layer, and its arguments."""

    def step(weights, graph):
        def loss(layers):
            hidden = graph["nodes"]
            for w in layers:
                hidden = jnp.tanh(hidden @ w)
                sent = hidden[graph["senders"]]
                hidden += jax.ops.segment_sum(sent, graph["receivers"], len(hidden))
            return jnp.mean(hidden**2)

        return autopar.value_and_grad(loss)(weights)

    edges = RNG.integers(0, 16, 24).astype(np.int32)
    graph = {"nodes": BATCH["x"], "senders": edges, "receivers": edges}
    return step, ([PARAMS["first"], PARAMS["second"]][:num_layers], graph)


def test_edges_that_refer_to_nodes_are_refused_with_the_inputs_and_what_to_write() -> None:
    step, args = passes_messages(2)
    with pytest.raises(
        autopar.MicrobatchError,
        match=r"1/nodes has 16 rows, 1/receivers has 24 rows(.|\n)*jax\.vmap",
    ):
        trace(step, args, (1,), 4)


def test_a_first_pass_sends_messages_after_the_last_layer() -> None:
    step, args = passes_messages(1)
    assert_equals_values(step, METHODS["shards"], args)
