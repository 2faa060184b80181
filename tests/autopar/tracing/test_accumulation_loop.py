"""Steps that accumulate gradients in a loop of their own: its chunks are the microbatches."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.ir.graph import is_backward
from autopar.ir.step_graph import MicrobatchError
from autopar.testing import assert_allclose
from autopar.tracing.chunk_step import OwnMicrobatchesError
from tests.tiers import slow

CHUNKS, EXAMPLES, WIDTH = 4, 4, 8
_RNG = np.random.default_rng(0)


def normal(*shape):
    return _RNG.normal(size=shape).astype(np.float32)


PARAMS = [{"w": 0.3 * normal(WIDTH, WIDTH), "b": np.zeros(WIDTH, np.float32)} for _ in range(4)]
BATCH = {"x": normal(CHUNKS * EXAMPLES, WIDTH), "y": normal(CHUNKS * EXAMPLES, WIDTH)}
KEY = jax.random.key(1)


def model(params, x, key=None):
    for number, layer in enumerate(params):
        x = jnp.tanh(x @ layer["w"] + layer["b"])
        if key is not None:
            x *= jax.random.bernoulli(jax.random.fold_in(key, number), 0.8, x.shape)
    return x


def loss(params, batch, key=None):
    return jnp.mean((model(params, batch["x"], key) - batch["y"]) ** 2)


def chunks(batch):
    return jax.tree.map(lambda rows: rows.reshape(CHUNKS, EXAMPLES, *rows.shape[1:]), batch)


def updated(params, gradients):
    return jax.tree.map(lambda p, g: p - 0.1 * g / CHUNKS, params, gradients)


def zeros(params):
    return jax.tree.map(jnp.zeros_like, params)


def added(sums, *values):
    return jax.tree.map(jnp.add, sums, values)


def scan(params, batch):
    def body(sums, chunk):
        return added(sums, *jax.value_and_grad(loss)(params, chunk)), None

    (total, gradients), _ = jax.lax.scan(body, (0.0, zeros(params)), chunks(batch))
    return updated(params, gradients), total / CHUNKS


def checkpointed_chunks(params, batch):
    def body(sums, chunk):
        return added(sums, *jax.value_and_grad(jax.checkpoint(loss))(params, chunk)), None

    (total, gradients), _ = jax.lax.scan(body, (0.0, zeros(params)), chunks(batch))
    return updated(params, gradients), total / CHUNKS


def reversed_scan(params, batch):
    def body(carry, chunk):
        params, sums, count = carry
        value, gradients = jax.value_and_grad(loss)(params, chunk)
        rows = {"loss": value, "norm": jnp.linalg.norm(chunk["x"])}
        return (params, *added((sums, count), gradients, 1)), rows

    carry = params, zeros(params), 0
    (params, gradients, count), rows = jax.lax.scan(body, carry, chunks(batch), reverse=True)
    return updated(params, gradients), rows, count


def fori_loop(params, batch):
    x = (batch["x"] - batch["x"].mean()) / batch["x"].std()

    def body(i, sums):
        chunk = {
            "x": jax.lax.dynamic_slice_in_dim(x, i * EXAMPLES, EXAMPLES),
            "y": batch["y"][i * EXAMPLES + jnp.arange(EXAMPLES)],
        }
        key = jax.random.fold_in(KEY, i)
        return added(sums, *jax.value_and_grad(loss)(params, chunk, key))

    total, gradients = jax.lax.fori_loop(0, CHUNKS, body, (0.0, zeros(params)))
    return updated(params, gradients), total / CHUNKS


def indexed_chunks(params, batch):
    parts = chunks(batch)

    def body(i, sums):
        chunk = jax.tree.map(lambda rows: rows[i], parts)
        return added(sums, *jax.value_and_grad(loss)(params, chunk))

    total, gradients = jax.lax.fori_loop(0, CHUNKS, body, (0.0, zeros(params)))
    return updated(params, gradients), total / CHUNKS


def reshaped_literal(params, batch):
    def body(sums, chunk):
        scale = jax.lax.reshape(0.5, (1, 1))
        scaled = jax.tree.map(lambda rows: scale * rows, chunk)
        return added(sums, *jax.value_and_grad(loss)(params, scaled)), None

    (total, gradients), _ = jax.lax.scan(body, (0.0, zeros(params)), chunks(batch))
    return updated(params, gradients), total / CHUNKS


def split_keys(params, batch):
    def body(carry, chunk):
        key, *sums = carry
        key, own = jax.random.split(key)
        return (key, *added((*sums,), *jax.value_and_grad(loss)(params, chunk, own))), None

    carry = KEY, 0.0, zeros(params)
    (key, total, gradients), _ = jax.lax.scan(body, carry, chunks(batch))
    return updated(params, gradients), jax.random.key_data(key), total / CHUNKS


def masked_means(params, batch):
    """Divide the losses of each chunk by the weights of this chunk."""
    weights = (jnp.abs(batch["y"]) > 0.5).astype(jnp.float32)

    def mean(params, chunk, weights):
        errors = (model(params, chunk["x"]) - chunk["y"]) ** 2
        return (errors * weights).sum() / weights.sum()

    def body(sums, chunk):
        return added(sums, *jax.value_and_grad(mean)(params, *chunk)), None

    sums = 0.0, zeros(params)
    (total, gradients), _ = jax.lax.scan(body, sums, chunks((batch, weights)))
    return updated(params, gradients), total / CHUNKS, weights.sum()


def all_examples(params, batch):
    """Compare each chunk with all examples."""

    def contrast(params, chunk):
        scores = model(params, chunk["x"]) @ batch["x"].T
        return jax.nn.logsumexp(scores, axis=1).mean() + loss(params, chunk)

    def body(sums, chunk):
        return added(sums, *jax.value_and_grad(contrast)(params, chunk)), None

    (total, gradients), _ = jax.lax.scan(body, (0.0, zeros(params)), chunks(batch))
    return updated(params, gradients), total / CHUNKS


def running_statistics(params, batch):
    """Normalize by the statistics of a chunk, and average them over the chunks in turn."""

    def normalized(params, chunk):
        x = model(params, chunk["x"])
        mean, deviation = x.mean(0), x.std(0)
        return jnp.mean(((x - mean) / (deviation + 0.1) - chunk["y"]) ** 2), mean

    def body(carry, chunk):
        *sums, average, number, _ = carry
        (value, mean), gradients = jax.value_and_grad(normalized, has_aux=True)(params, chunk)
        average = average + (mean - average) / (number + 1)
        return (*added((*sums,), value, gradients), average, number + 1, value), None

    carry = 0.0, zeros(params), params[0]["b"], 0, 0.0
    (total, gradients, *statistics), _ = jax.lax.scan(body, carry, chunks(batch))
    return updated(params, gradients), total / CHUNKS, statistics


def first_chunk_before(params, batch):
    """big_vision/utils.py, accumulate_gradient: the sums start with the first chunk."""
    x, y = batch["x"], batch["y"]
    total, gradients = jax.value_and_grad(loss)(params, {"x": x[:EXAMPLES], "y": y[:EXAMPLES]})

    def body(i, sums):
        rows = jax.lax.dynamic_slice(x, (i * EXAMPLES, 0), (EXAMPLES, WIDTH))
        wanted = jax.lax.dynamic_slice(y, (i * EXAMPLES, 0), (EXAMPLES, WIDTH))
        return added(sums, *jax.value_and_grad(loss)(params, {"x": rows, "y": wanted}))

    total, gradients = jax.lax.fori_loop(1, CHUNKS, body, (total, gradients))
    return updated(params, gradients), total / CHUNKS


def first_chunk_with_keys(params, batch):
    """Split a key for each chunk, and count the examples with a positive value."""
    key, own = jax.random.split(KEY)
    first, *_ = parts = [jax.tree.map(lambda rows, i=i: rows[i], chunks(batch)) for i in range(4)]
    others = jax.tree.map(lambda *rows: jnp.stack(rows), *parts[1:])
    sums = jax.value_and_grad(loss)(params, {**first, "x": jnp.sin(first["x"])}, own)
    sums = added((0.0, zeros(params)), *sums)

    def body(carry, chunk):
        key, sums, count = carry
        key, own = jax.random.split(key)
        sums = added(sums, *jax.value_and_grad(loss)(params, chunk, own))
        return (key, sums, count + (chunk["x"] > 0).sum()), chunk["y"].sum()

    others["x"] = jnp.sin(others["x"])
    start = key, sums, (first["x"] > 0).sum()
    (key, (total, gradients), count), rows = jax.lax.scan(body, start, others, reverse=True)
    return updated(params, gradients), total, count, rows, jax.random.key_data(key)


STEPS = [
    first_chunk_before,
    first_chunk_with_keys,
    scan,
    checkpointed_chunks,
    reversed_scan,
    fori_loop,
    indexed_chunks,
    reshaped_literal,
    split_keys,
    masked_means,
    all_examples,
    running_statistics,
]


def pipeline(count=CHUNKS, schedule="1f1b", **options):
    layers = autopar.AutoLayerOption(options.pop("layer_num", 2))
    return autopar.PipeshardParallel(
        4, count, pipeline_schedule=schedule, layer_option=layers, **options
    )


def assert_equals_one_device(step, method, params=PARAMS):
    parallel = autopar.parallelize(step, method=method, batch_argnums=(1,), donate_argnums=())
    assert_allclose(parallel(params, BATCH), jax.jit(step)(params, BATCH), rtol=1e-5, atol=1e-6)
    return parallel.get_last_executable()


METHODS = [
    pipeline(),
    *slow(
        pipeline(schedule="zero_bubble_h1"),
        pipeline(schedule="interleaved_1f1b", layer_num=4, num_chunks=2),
        autopar.ShardParallel((2, 2), CHUNKS),
        autopar.Zero3Parallel(4, CHUNKS),
    ),
]


def in_turn(params, batch):
    """Add what a loop of Python computes for each chunk, each with a key of its own."""
    key, sums, losses = KEY, zeros(params), []
    for rows, wanted in zip(jnp.split(batch["x"], 4), jnp.split(batch["y"], 4), strict=True):
        key, own = jax.random.split(key)
        value, gradients = jax.value_and_grad(loss)(params, {"x": rows, "y": wanted}, own)
        sums = jax.tree.map(lambda total, each: total + each / 2, sums, gradients)
        losses.append(value)
    return updated(params, sums), jnp.mean(jnp.array(losses))


def with_rows(params, batch):
    """Concatenate the predictions of all chunks, and stack their clipped gradients."""

    def own_loss(params, rows, wanted):
        predictions = model(params, rows)
        return jnp.mean((predictions - wanted) ** 2), predictions

    losses, rows, stacks = [], [], []
    for k in range(CHUNKS):
        chunk = jax.tree.map(lambda array: array[k::CHUNKS], batch)  # noqa: B023
        (value, predictions), gradients = jax.value_and_grad(own_loss, has_aux=True)(
            params, chunk["x"], chunk["y"]
        )
        losses.append(value)
        rows.append(predictions)
        stacks.append(jax.tree.map(lambda each: jnp.clip(each, -0.01, 0.01), gradients))
    gradients = jax.tree.map(lambda *parts: jnp.stack(parts).sum(0), *stacks)
    return updated(params, gradients), jnp.concatenate(rows), sum(losses) / CHUNKS


def chunk_of(batch, k):
    return jax.tree.map(
        lambda rows: jax.lax.dynamic_slice_in_dim(rows, k * EXAMPLES, EXAMPLES), batch
    )


def other_weight_for_each_chunk(params, batch):
    sums = zeros(params)
    for k in range(CHUNKS):
        weighted = jax.grad(lambda *args: (2.0 + k) * loss(*args))  # noqa: B023
        (sums,) = added((sums,), weighted(params, chunk_of(batch, k)))
    return updated(params, sums)


def other_loss_for_each_chunk(params, batch):
    """Weight the loss of each chunk, and scale and move its examples, by numbers."""

    def weighted(params, chunk, k):
        outputs = model(params, chunk["x"] + float(k)) * (1.5 - k)
        return 0.1 * (k + 1) * jnp.mean((outputs - chunk["y"]) ** 2)

    sums = 0.0, zeros(params)
    for k in range(CHUNKS):
        sums = added(sums, *jax.value_and_grad(weighted)(params, chunk_of(batch, k), k))
    return updated(params, sums[1]), sums[0]


def magnitude(params, chunk):
    return jnp.mean(jnp.abs(model(params[:-1], chunk["x"])))


def two_losses(params, batch):
    """Take two gradients of each chunk, one of which has no gradient of the last layer."""
    sums, losses = zeros(params), []
    for k in range(CHUNKS):
        for each in (loss, magnitude):
            value, gradients = jax.value_and_grad(each)(params, chunk_of(batch, k))
            (sums,) = added((sums,), gradients)
            losses.append(value)
    return updated(params, sums), jnp.stack(losses), sum(losses)


def losses_in_turn(params, batch):
    """Add the gradients of one loss, and then those of another one."""
    sums = [zeros(params), zeros(params)]
    for n, each in enumerate((loss, magnitude)):
        for k in range(CHUNKS):
            (sums[n],) = added((sums[n],), jax.grad(each)(params, chunk_of(batch, k)))
    return updated(params, *added((sums[0],), sums[1]))


def with_lookups(params, batch):
    """Look up rows of a weight; what is out of range is NaN, which does not equal itself."""

    def own_loss(params, chunk):
        numbers = jnp.argmax(chunk["x"], axis=-1)
        return loss(params, chunk | {"x": chunk["x"] + jnp.take(params[0]["w"], numbers, axis=0)})

    sums = 0.0, zeros(params)
    for k in range(CHUNKS):
        sums = added(sums, *jax.value_and_grad(own_loss)(params, chunk_of(batch, k)))
    return updated(params, sums[1]), sums[0]


def two_views(params, batch):
    """Take the same loss of two views of half as many chunks, whose labels are the same."""
    sums = 0.0, zeros(params)
    halves = jax.tree.map(lambda rows: rows.reshape(2, -1, *rows.shape[1:]), batch)
    for k in range(2):
        for view in (halves["x"][k], halves["x"][k, :, ::-1]):
            chunk = {"x": view, "y": halves["y"][k]}
            sums = added(sums, *jax.value_and_grad(loss)(params, chunk))
    return updated(params, sums[1]), sums[0]


UNROLLED = [
    in_turn,
    with_rows,
    other_weight_for_each_chunk,
    other_loss_for_each_chunk,
    two_losses,
    losses_in_turn,
    with_lookups,
    two_views,
]


@pytest.mark.parametrize("step", UNROLLED, ids=lambda step: step.__name__)
@pytest.mark.parametrize("method", METHODS)
def test_gradients_that_a_step_adds_without_a_loop_are_of_microbatches(step, method):
    executable = assert_equals_one_device(step, method)
    assert any(is_backward(eqn) for _, eqn in executable.step.microbatching.body)
    assert not any("no gradients" in warning for warning in executable.plan.warnings)


def weights_in_turn(params, batch):
    for k in range(CHUNKS):
        params = updated(params, jax.grad(loss)(params, chunk_of(batch, k)))
    return params


def evaluated_in_chunks(params, batch):
    """Add the losses of the chunks again, with the new weights."""
    parts = [chunk_of(batch, k) for k in range(CHUNKS)]
    sums = [jax.grad(loss)(params, each) for each in parts]
    params = updated(params, jax.tree.map(lambda *each: sum(each), *sums))
    return params, sum(loss(params, each) for each in parts)


@pytest.mark.parametrize(
    "step",
    [weights_in_turn, evaluated_in_chunks],
    ids=lambda step: step.__name__,
)
def test_a_step_whose_microbatches_compute_no_gradients_says_so(step):
    executable = assert_equals_one_device(step, autopar.ShardParallel((2, 2), CHUNKS))
    (warning,) = (each for each in executable.plan.warnings if "no gradients" in each)
    assert re.search(r"whole batch at once, at .*test_accumulation_loop.py:\d+", warning)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
@pytest.mark.parametrize("method", METHODS)
def test_the_chunks_of_a_loop_are_microbatches(step, method):
    executable = assert_equals_one_device(step, method)
    assert executable.step.num_micro_batches == CHUNKS
    assert executable.plan.num_micro_batches == CHUNKS


def test_a_gradient_that_is_repeated_is_none_of_chunks():
    def step(params, batch):
        def update(_, params):
            return updated(params, jax.grad(loss)(params, batch))

        gradient = jax.grad(loss)(params, batch)[0]["b"]
        params = jax.lax.fori_loop(0, 2, update, params)
        return params, jnp.concatenate([gradient, gradient])

    with pytest.raises(MicrobatchError, match="is not linear in a gradient of the batch"):
        assert_equals_one_device(step, pipeline())


def test_the_examples_of_indexed_chunks_are_sharded():
    plan = assert_equals_one_device(indexed_chunks, autopar.Zero3Parallel(4, CHUNKS)).plan
    prepared = [each for each in plan.stages[0].inputs if each.path.startswith("prepared")]
    assert [each.shape for each in prepared] == [(CHUNKS * EXAMPLES, WIDTH)] * 2
    assert [each.spec[0] for each in prepared] == [("x",), ("x",)]


def test_layers_in_a_scan_are_cut_in_a_loop_that_accumulates():
    def deep(params, batch):
        def own_loss(params, chunk):
            def layer(x, weights):
                return jnp.tanh(x @ weights["w"] + weights["b"]), None

            x, _ = jax.lax.scan(layer, chunk["x"], params)
            return jnp.mean((x - chunk["y"]) ** 2)

        def body(sums, chunk):
            return added(sums, *jax.value_and_grad(own_loss)(params, chunk)), None

        (total, gradients), _ = jax.lax.scan(body, (0.0, zeros(params)), chunks(batch))
        return updated(params, gradients), total / CHUNKS

    stacked = jax.tree.map(lambda *layers: np.stack(layers), *PARAMS)
    executable = assert_equals_one_device(deep, pipeline(), stacked)
    assert len(executable.step.jaxpr.invars) > len(jax.tree.leaves((stacked, BATCH)))


def searched(step):
    method = autopar.PipeshardParallel(4, "auto", layer_option="auto", stage_option="uniform")
    return assert_equals_one_device(step, method).plan


def test_the_search_takes_the_number_of_chunks():
    assert searched(scan).num_micro_batches == CHUNKS


def test_the_search_takes_the_layers_of_one_chunk():
    plan = searched(other_weight_for_each_chunk)
    assert plan.schedule.layer_option.layer_num == len(PARAMS)


def other_power_for_each_chunk(params, batch):
    sums = zeros(params)
    for k in range(CHUNKS):
        powers = jax.grad(lambda *args: loss(*args) ** (k + 3))  # noqa: B023
        (sums,) = added((sums,), powers(params, chunk_of(batch, k)))
    return updated(params, sums)


def test_what_differs_between_chunks_is_named():
    message = r"the 4 gradients that are added at .*_loop.py:\d+ .*integer_pow at .*y=2 and y=3"
    with pytest.raises(MicrobatchError, match=message):
        assert_equals_one_device(other_power_for_each_chunk, pipeline())


@pytest.mark.parametrize(
    "method", [pipeline(2), pipeline(1), autopar.ShardParallel((2, 2), 2)], ids=["2", "1", "shards"]
)
def test_another_number_of_microbatches_is_refused(method):
    with pytest.raises(
        OwnMicrobatchesError, match=r"itself, at .*use num_micro_batches=4, not [12]"
    ):
        assert_equals_one_device(scan, method)


def weighted_by_the_last_loss(params, batch):
    def body(carry, chunk):
        sums, last = carry
        value, gradients = jax.value_and_grad(loss)(params, {**chunk, "x": last * chunk["x"]})
        return (added(sums, *gradients), value), None

    (gradients, value), _ = jax.lax.scan(body, ((*zeros(params),), 1.0), chunks(batch))
    return updated(params, [*gradients]), value


def first_layer_before(params, batch):
    batch = {**batch, "x": batch["x"] @ params[0]["w"]}
    return scan(params, batch)


def evaluation_after(params, batch):
    params, _ = scan(params, batch)
    return params, loss(params, batch)


def other_loss_before(params, batch):
    """Start with the gradient of the first chunk, with another weight."""
    first, *others = (jax.tree.map(lambda rows, i=i: rows[i], chunks(batch)) for i in range(4))
    total, gradients = jax.value_and_grad(lambda *args: 2 * loss(*args))(params, first)

    def body(sums, chunk):
        return added(sums, *jax.value_and_grad(lambda *args: 3 * loss(*args))(params, chunk)), None

    others = jax.tree.map(lambda *rows: jnp.stack(rows), *others)
    (total, gradients), _ = jax.lax.scan(body, (total, gradients), others)
    return updated(params, gradients), total


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (other_loss_before, r"needs the whole batch, .* compute that in the loop"),
        (
            weighted_by_the_last_loss,
            r"depend on what its iteration before .* at .*loop.py:\d+: only add",
        ),
        (first_layer_before, r"slices is computed with weights .*: compute that in the loop"),
        (evaluation_after, r"dot_general at .* needs the whole batch, .* compute that in the loop"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_other_loops_are_refused(step, message):
    with pytest.raises(MicrobatchError, match=message):
        assert_equals_one_device(step, pipeline())


@pytest.mark.parametrize(("step", "warned"), [(scan, False), (fori_loop, True)])
def test_chunks_are_warned_of_only_if_more_than_their_shape_is_computed(step, warned):
    method = autopar.ShardParallel(1, num_micro_batches=CHUNKS)
    executable = autopar.parallelize(step, method=method).get_executable(PARAMS, BATCH)
    assert executable.step.preparation is not None
    assert any("whole batch before" in each for each in executable.plan.warnings) is warned
