"""What a step computes from the whole batch alone is computed before its microbatches."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.ir.flatten import flatten
from autopar.ir.preparation import TracedValue
from autopar.microbatch.prepared_inputs import prepared_rows
from autopar.testing import assert_allclose
from autopar.tracing.trace import trace
from tests.tiers import fast, slow

RNG = np.random.default_rng(0)
ROWS, CLASSES = 16, 8
PARAMS = {
    "first": RNG.standard_normal((6, 8)).astype(np.float32),
    "second": RNG.standard_normal((8, CLASSES)).astype(np.float32),
}
BATCH = {
    "x": RNG.standard_normal((ROWS, 6)).astype(np.float32),
    "label": RNG.integers(0, CLASSES, ROWS).astype(np.int32),
    "weight": RNG.uniform(0.1, 1.0, ROWS).astype(np.float32),
}
KEY = jax.random.key(3)
ARGS = PARAMS, BATCH, KEY
PIPELINE = autopar.PipeshardParallel(
    devices=4, num_micro_batches=4, layer_option=autopar.AutoLayerOption(2)
)
METHODS = {
    "shards": autopar.ShardParallel(devices=(2, 4), num_micro_batches=4),
    "local accumulation": autopar.DataParallel(devices=2, num_micro_batches=4),
    "pipeline": PIPELINE,
}


def logits_of(params, x):
    return jnp.tanh(x @ params["first"]) @ params["second"]


def losses(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def mixed_with_the_next(params, batch, key):
    """Mixup as in big_vision: with the batch rolled by one."""
    share = jax.random.beta(key, 0.2, 0.2)

    def mixed(rows):
        return share * rows + (1 - share) * jnp.roll(rows, 1, axis=0)

    logits = logits_of(params, mixed(batch["x"]))
    labels = mixed(jax.nn.one_hot(batch["label"], CLASSES))
    return optax.softmax_cross_entropy(logits, labels).mean()


def cut_and_mixed_with_a_permutation(params, batch, key):
    order = jax.random.permutation(key, num_examples(batch))
    is_other = jnp.arange(6) >= jax.random.randint(key, (), 1, 5)
    logits = logits_of(params, jnp.where(is_other, batch["x"][order], batch["x"]))
    share = is_other.mean()
    return (
        (1 - share) * losses(logits, batch["label"]) + share * losses(logits, batch["label"][order])
    ).mean()


def num_examples(batch):
    return batch["x"].shape[0]


def standardized(params, batch, key):
    """Advantages by their mean and deviation, as in PPO."""
    advantage = batch["weight"]
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    return (advantage * losses(logits_of(params, batch["x"]), batch["label"])).mean()


def weighted_by_class_frequency(params, batch, key):
    frequency = jnp.bincount(batch["label"], length=CLASSES) / num_examples(batch)
    weights = 1 / frequency[batch["label"]]
    return (weights * losses(logits_of(params, batch["x"]), batch["label"])).mean()


def weighted_mean_beside_a_mean(params, batch, key):
    """A pipeline makes one pass, so the sum of the weights has to be there before it."""
    logits, weight = logits_of(params, batch["x"]), batch["weight"]
    mean = (weight * losses(logits, batch["label"])).sum() / weight.sum()
    return mean + 0.1 * jnp.mean(jax.nn.logsumexp(logits, -1) ** 2)


def in_the_order_of_weights(params, batch, key):
    order = jnp.argsort(batch["weight"])
    ranks = jnp.zeros(num_examples(batch)).at[order].set(jnp.linspace(0, 1, num_examples(batch)))
    return (ranks * losses(logits_of(params, batch["x"]), batch["label"])).mean()


def logarithm_of_a_weighted_mean(params, batch, key):
    weight = batch["weight"]
    total = (weight * losses(logits_of(params, batch["x"]), batch["label"])).sum()
    return jnp.log(total / weight.sum())


def random_pairs_and_one_row_less(params, batch, key):
    rows = num_examples(batch)
    scale = jax.random.normal(key, (rows, rows)).sum(1) + jax.random.normal(key, (rows - 1,)).sum()
    return (scale * losses(logits_of(params, batch["x"]), batch["label"])).mean()


def summed_up_one_by_one(params, batch, key):
    def add(total, key):
        return total + jax.random.normal(key), total

    _, sums = jax.lax.scan(add, jnp.zeros(()), jax.random.split(key, num_examples(batch)))
    return (sums * losses(logits_of(params, batch["x"]), batch["label"])).mean()


def standardized_in_groups(params, batch, key):
    """Advantages among eight answers to each question, as in GRPO; a microbatch has four."""
    rewards = batch["weight"].reshape(-1, 8)
    center = rewards.mean(axis=1, keepdims=True)
    advantages = (rewards - center) / (rewards.std(axis=1, keepdims=True) + 1e-4)
    of_examples = losses(logits_of(params, batch["x"]), batch["label"])
    return (advantages.reshape(-1) * of_examples).mean() + (center**2).mean()


def counted_for_each_member_of_an_ensemble(params, batch, key):
    """Poisson numbers as in online bagging, whose second dim has the examples."""
    counts = jax.random.poisson(key, 1.0, (3, num_examples(batch)))
    members = jnp.stack(
        [losses(c * logits_of(params, batch["x"]), batch["label"]) for c in (1, 2, 3)]
    )
    return ((counts * members).sum(1) / jnp.maximum(counts.sum(1), 1)).mean()


def weighted_by_a_constant_array(params, batch, key):
    weights = np.arange(num_examples(batch), dtype=np.float32)
    return (weights * losses(logits_of(params, batch["x"]), batch["label"])).mean()


def integrated_over_the_examples(params, batch, key):
    """A backward pass pads an array of equal numbers, which depends on no example."""
    of_examples = losses(logits_of(params, batch["x"]), batch["label"])
    return jnp.trapezoid(of_examples, dx=1 / num_examples(batch))


LOSSES = (
    mixed_with_the_next,
    cut_and_mixed_with_a_permutation,
    standardized,
    weighted_by_class_frequency,
    weighted_mean_beside_a_mean,
    in_the_order_of_weights,
    random_pairs_and_one_row_less,
    summed_up_one_by_one,
    logarithm_of_a_weighted_mean,
    standardized_in_groups,
    counted_for_each_member_of_an_ensemble,
    weighted_by_a_constant_array,
    integrated_over_the_examples,
)


def step_of(*losses):
    def step(params, batch, key):
        def loss(params):
            return sum(loss(params, batch, key) for loss in losses)

        value, gradients = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    return step


def run(step, method):
    """Compare a step with one device, and return its executable."""
    parallel = autopar.parallelize(step, method=method, batch_argnums=1, donate_argnums=())
    assert_allclose(parallel(*ARGS), jax.jit(step)(*ARGS), rtol=2e-5, atol=2e-6)
    return parallel.get_last_executable()


@pytest.mark.parametrize(
    "method",
    [*slow(METHODS["shards"], METHODS["local accumulation"]), METHODS["pipeline"]],
    ids=list(METHODS),
)
def test_several_of_them_equal_one_device(method):
    executable = run(
        step_of(mixed_with_the_next, standardized, weighted_mean_beside_a_mean), method
    )
    (warning,) = [text for text in executable.plan.warnings if "before the step" in text]
    assert __file__ in warning


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
@pytest.mark.slow
def test_each_of_them_equals_one_device_in_a_pipeline(loss):
    run(step_of(loss), PIPELINE)


@pytest.mark.parametrize(
    "loss",
    [
        counted_for_each_member_of_an_ensemble,
        weighted_by_a_constant_array,
        integrated_over_the_examples,
    ],
)
def test_examples_in_another_dim_and_numbers_of_a_backward_pass_are_prepared(loss):
    assert run(step_of(loss), METHODS["shards"]).plan.num_passes == 1


@pytest.mark.parametrize("remat_layer", [False, True])
def test_a_masked_mean_beside_a_mean_takes_one_pass_with_and_without_recomputation(remat_layer):
    """The loss of BERT: of the masked words, and of the next sentence."""

    def step(params, batch, _):
        def loss(params):
            logits = logits_of(params, batch["x"])
            masked = batch["weight"] > 0.5
            words = jnp.sum(losses(logits, batch["label"]) * masked) / masked.sum()
            return words + jnp.mean(logits[:, 0] ** 2)

        value, gradients = autopar.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    layers = autopar.AutoLayerOption(2, remat_layer=remat_layer)
    method = autopar.PipeshardParallel(devices=2, num_micro_batches=4, layer_option=layers)
    assert run(step, method).plan.num_passes == 1


def test_several_rows_of_each_example_are_looked_up_before_the_first_microbatch():
    def step(params, batch, _):
        def loss(params):
            logits = logits_of(params, batch["x"][batch["next"].reshape(-1)])
            return losses(logits, jnp.repeat(batch["label"], 3)).mean()

        return jax.value_and_grad(loss)(params)

    batch = BATCH | {"next": RNG.integers(0, ROWS, (ROWS, 3)).astype(np.int32)}
    planned = autopar.parallelize(step, method=METHODS["shards"], batch_argnums=(1,))
    plan = planned.get_executable(PARAMS, batch, KEY).plan
    assert plan.num_passes == 1
    expected = jax.jit(step)(PARAMS, batch, KEY)
    assert_allclose(planned(PARAMS, batch, KEY), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", fast(METHODS, ["pipeline"]))
def test_as_many_rows_of_a_queue_as_there_are_examples_are_taken_for_the_whole_batch(method):
    """The state has a queue of former logits, as in MoCo."""

    def step(state, batch, _):
        params, queue, start = state
        former = jax.lax.dynamic_slice(queue, (start, 0), (num_examples(batch), CLASSES))

        def loss(params):
            logits = logits_of(params, batch["x"])
            return ((logits - former) ** 2).mean(), logits

        (value, logits), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        queue = jax.lax.dynamic_update_slice(queue, logits, (start, 0))
        return (jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), queue, start + 5), value

    queue = RNG.standard_normal((4 * ROWS, CLASSES)).astype(np.float32)
    args = (PARAMS, queue, jnp.int32(3)), BATCH, KEY
    parallel = autopar.parallelize(
        step, method=METHODS[method], batch_argnums=(1,), donate_argnums=()
    )
    assert_allclose(parallel(*args), jax.jit(step)(*args), rtol=1e-5, atol=1e-6)


def test_a_value_has_rows_if_its_shape_grows_with_the_batch():
    """In a microbatch of one example, a value of the whole batch may look like a row."""

    def values(x, mean):
        return jnp.sin(x), jnp.cos(mean)

    micro, whole = (
        flatten(jax.make_jaxpr(values)(np.ones((rows, 3)), np.ones((1, 3)))) for rows in (1, 4)
    )
    assert prepared_rows(micro, whole, [TracedValue(0, 0), TracedValue(1, 0)]) == {2}


def test_what_is_printed_of_the_batch_does_not_matter():
    def printed(params, batch, key):
        jax.debug.print("sum {}", batch["weight"].sum())
        return standardized(params, batch, key)

    assert trace(step_of(printed), ARGS, (1,), 4).preparation is not None


def test_a_step_that_needs_none_of_it_has_no_more_inputs():
    step = trace(step_of(lambda p, b, k: logits_of(p, b["x"]).mean()), ARGS, (1,), 4)
    assert step.preparation is None
    assert len(step.in_paths) == len(jax.tree.leaves(ARGS))


def test_only_what_the_microbatches_read_is_an_input():
    """The permutation itself stays where the rows are permuted."""
    step = trace(step_of(mixed_with_the_next), ARGS, (1,), 4)
    assert step.preparation is not None
    assert len(step.in_paths) == len(jax.tree.leaves(ARGS)) + len(step.preparation.places)
    assert len(step.preparation.places) == 2


def test_what_depends_on_the_model_is_left_to_a_first_pass():
    def contrasted(params, batch, key):
        hidden = logits_of(params, batch["x"])
        return jax.nn.logsumexp(hidden @ hidden.T, axis=1).mean()

    def normalized(params, batch, key):
        hidden = logits_of(params, jnp.roll(batch["x"], 1, 0))
        return ((hidden - hidden.mean(0)) ** 2).mean()

    for loss in (contrasted, normalized):
        graph = trace(step_of(loss), ARGS, (1,), 4)
        assert graph.first_pass is not None
        assert (graph.preparation is not None) is (loss is normalized)


@pytest.mark.parametrize("count", [4, 8, 16])
def test_groups_that_no_microbatch_has_are_put_together_before_the_first_one(count):
    graph = trace(step_of(standardized_in_groups), ARGS, (1,), count)
    assert graph.first_pass is None
    assert graph.preparation is not None


@pytest.mark.slow
def test_a_loaded_plan_prepares_the_same(tmp_path):
    step = step_of(mixed_with_the_next)
    executable = run(step, METHODS["shards"])
    executable.plan.save(tmp_path / "plan.json")
    plan = autopar.Plan.load(tmp_path / "plan.json")
    assert run(step, autopar.PlanMethod(plan)).plan == executable.plan


def test_a_step_with_prepared_inputs_is_simulated():
    step = step_of(mixed_with_the_next)
    plan = autopar.plan_step(step, ARGS, method=PIPELINE, cluster="dgx_h100", batch_argnums=1)
    timeline = autopar.simulate(step, ARGS, plan, "dgx_h100", batch_argnums=1, fidelity="analytic")
    assert timeline.spans


@pytest.mark.slow
def test_the_timeline_of_an_execution_has_its_prepared_inputs():
    assert run(step_of(mixed_with_the_next), PIPELINE).execution_timeline().spans
