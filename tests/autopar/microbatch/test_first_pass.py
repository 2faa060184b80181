"""Losses that need all examples, in two passes over the microbatches, equal one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.ir.step_graph import MicrobatchError
from autopar.microbatch.first_pass import more_completed
from autopar.plan import Plan, PlanError
from autopar.testing import assert_allclose
from autopar.tracing import microbatch_traces
from autopar.tracing.trace import trace
from simulator.program import Run
from tests.autopar.microbatch.steps_of_all_examples import (
    BATCH,
    PARAMS,
    STEPS,
    both,
    clip,
    encoded,
    step_of,
)
from tests.tiers import slow


def pipeline(schedule="1f1b", num_chunks=None):
    return autopar.PipeshardParallel(
        4 if num_chunks is None else 2,
        4,
        pipeline_schedule=schedule,
        layer_option=autopar.AutoLayerOption(2 * (num_chunks or 1)),
        stage_option="uniform",
        num_chunks=num_chunks,
    )


METHODS = {
    "shards": autopar.ShardParallel((2, 2), 4),
    "ZeRO": autopar.Zero3Parallel(4, 2),
    "pipeline": pipeline(),
}


def assert_equals_one_device(step, method):
    parallel = autopar.parallelize(step, method=method, donate_argnums=())
    assert_allclose(parallel(PARAMS, BATCH), jax.jit(step)(PARAMS, BATCH), rtol=1e-4, atol=1e-5)
    return parallel.get_last_executable()


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
@pytest.mark.parametrize("method", [METHODS["pipeline"], *slow(METHODS["shards"], METHODS["ZeRO"])])
def test_two_passes_equal_one_device(step, method):
    executable = assert_equals_one_device(step, method)
    if method is METHODS["pipeline"]:
        assert executable.step.first_pass is not None
        assert executable.first_pass is not None


@pytest.mark.parametrize(
    "method",
    [
        pipeline("gpipe"),
        *slow(
            pipeline("1f1b_overlap_friendly"),
            pipeline("zero_bubble_h1"),
            pipeline("interleaved_1f1b", 2),
            pipeline("dualpipe_v", 2),
        ),
    ],
    ids=lambda method: method.pipeline_schedule,
)
@pytest.mark.parametrize("name", ["clip", "alternating"])
def test_two_passes_equal_one_device_in_any_schedule(name, method):
    assert_equals_one_device(STEPS[name], method)


def scaled_by_extremes(hidden, losses):
    least, largest = hidden.min(0), hidden.max(0)
    return ((hidden - least) / (largest - least)).var() + losses.mean()


def hardest_only(hidden, losses):
    return jnp.mean(losses, where=losses >= jnp.sort(losses)[-3])


def largest_thrice(hidden, losses):
    is_largest = losses == jax.lax.stop_gradient(losses.max())
    return jnp.sum(jnp.where(is_largest, 3.0, 1.0) * losses)


def hardest_four(hidden, losses):
    """Take as many of the largest losses as a microbatch has examples."""
    return jnp.sort(losses)[-4:].mean()


def at_risk(hidden, losses):
    """Rockafellar and Uryasev 2000, equation 4, from a threshold that is an example's loss."""
    threshold = jnp.sort(losses)[12]
    return threshold + jax.nn.relu(losses - threshold).mean() * 4


def below_the_largest(hidden, losses):
    return jnp.sum(jnp.sign(losses - losses.max()) * losses)


def five_largest(hidden, losses):
    return jax.lax.top_k(losses, 5)[0].mean()


def hard_tokens(hidden, losses):
    """Keep the largest of all numbers of all examples, more than a microbatch has."""
    tokens = (hidden**2).reshape(-1)
    return jnp.mean(tokens, where=tokens >= jnp.sort(tokens)[40]) + losses.mean()


def largest_of_each_time(hidden, losses):
    """Compare the numbers of a (time, batch) array."""
    of_time = hidden.T
    return jnp.sum(of_time, where=of_time == of_time.max(1, keepdims=True)) + of_time.max()


def scanned_with_extremes(hidden, losses):
    def add(total, xs):
        of_time, largest = xs
        return total + (of_time >= largest) * of_time, None

    xs = hidden.T, jax.lax.stop_gradient(hidden.max(0))
    return jax.lax.scan(add, jnp.zeros(len(hidden)), xs)[0].sum()


@pytest.mark.parametrize(
    "combine",
    [
        scaled_by_extremes,
        hardest_only,
        largest_thrice,
        hardest_four,
        at_risk,
        below_the_largest,
        five_largest,
        hard_tokens,
        largest_of_each_time,
        scanned_with_extremes,
    ],
)
def test_an_extreme_example_is_the_one_that_the_first_pass_found(combine):
    """The second pass may round what it computes again, so that no example is the largest."""

    def step(params, x, y):
        def loss(params):
            hidden = jnp.tanh(x @ params["first"])
            return combine(hidden, jnp.sum((hidden @ params["second"] - y) ** 2, 1))

        return jax.value_and_grad(loss)(params)

    method = autopar.ShardParallel((2, 4), num_micro_batches=4)
    parallel = autopar.parallelize(step, method=method, donate_argnums=())
    for seed in range(3):
        random = np.random.default_rng(seed)
        shapes = (8, 8), (8, 8), (16, 8), (16, 8)
        first, second, x, y = (random.standard_normal(s).astype(np.float32) for s in shapes)
        args = {"first": first / 3, "second": second}, x, y
        assert_allclose(parallel(*args), jax.jit(step)(*args), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("number", [16.0, 15.0])
def test_a_number_of_the_loss_may_be_the_number_of_examples(number):
    def step(weights, x):
        def loss(weights):
            hidden = jnp.tanh(x @ weights)
            return (hidden**4).sum(1).mean() + ((hidden.T @ hidden) ** 2).sum() / number

        return jax.value_and_grad(loss)(weights)

    random = np.random.default_rng(0)
    args = [random.standard_normal(shape).astype(np.float32) / 4 for shape in ((8, 8), (16, 8))]
    method = autopar.ShardParallel(2, num_micro_batches=4)
    parallel = autopar.parallelize(step, method=method, donate_argnums=())
    assert_allclose(parallel(*args), jax.jit(step)(*args), rtol=1e-4, atol=1e-5)


def test_a_pass_that_mixes_examples_before_the_model_is_told_to_be_without_it():
    """Targets are mixed by products of the examples, which no microbatch can compute."""

    def loss(params, batch):
        mixed = jax.nn.softmax(batch["text"] @ batch["text"].T) @ batch["text"]
        return ((encoded(params["image"], batch["image"]) - mixed[:, :8]) ** 2).mean()

    plan = assert_equals_one_device(step_of(loss), METHODS["shards"]).plan
    assert plan.num_passes == 2
    (warning,) = [text for text in plan.warnings if "pass" in text]
    assert "a pass before the model's completes values" in warning


def test_random_bits_are_the_same_in_both_passes():
    def step(params, batch, key):
        def loss(params):
            kept = jax.random.bernoulli(key, 0.8, batch["image"].shape)
            return clip(params, batch | {"image": batch["image"] * kept})

        return jax.value_and_grad(loss)(params)

    args = PARAMS, BATCH, jax.random.key(0)
    parallel = autopar.parallelize(step, method=METHODS["shards"], donate_argnums=())
    assert_allclose(parallel(*args), jax.jit(step)(*args), rtol=1e-4, atol=1e-5)
    executable = parallel.get_last_executable()
    assert executable is not None
    assert executable.first_pass is not None
    assert executable.first_pass.step.positions is not None


def test_a_layer_after_the_pairs_is_refused_with_its_line():
    """The first pass would compute that layer, and those after it, for the whole batch."""

    def loss(params, batch):
        image, text = both(params, batch)
        mixed = jax.nn.softmax(image @ text.T) @ text
        return ((mixed @ params["image"][2].T) ** 2).mean()

    with pytest.raises(autopar.MicrobatchError, match=rf"{__file__}.*pairs examples"):
        trace(step_of(loss), (PARAMS, BATCH), (1,), 4)


def balanced_layers(is_combined_after):
    """Return a step with a balance loss of experts in each layer of a loop."""

    def combined(load, gates):
        return 8 * (load * gates).sum(-1)

    def loss(params, batch):
        def layer(x, weights):
            x = x + jnp.tanh(x @ weights)
            gates = jax.nn.softmax(x)
            means = jnp.round(gates).mean(0), gates.mean(0)
            return x, means if is_combined_after else combined(*means)

        x, losses = jax.lax.scan(layer, batch["x"], params)
        losses = combined(*losses) if is_combined_after else losses
        return jnp.mean(x**2) + losses.mean()

    def step(params, batch):
        value, gradients = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    return step


def test_means_of_layers_in_a_loop_are_combined_after_it():
    args = 0.3 * np.random.default_rng(0).normal(size=(4, 8, 8)), {"x": np.eye(16, 8)}
    method = METHODS["pipeline"]
    step = balanced_layers(is_combined_after=True)
    parallel = autopar.parallelize(step, method=method, donate_argnums=())
    assert_allclose(parallel(*args), jax.jit(step)(*args), rtol=1e-5, atol=1e-6)
    with pytest.raises(MicrobatchError, match=r"return the means of each layer from the loop"):
        autopar.parallelize(balanced_layers(False), method=method)(*args)


def updated_one_after_another(params, batch):
    """Return the errors of each example by the first of two updates, and both losses."""

    def loss_of(name, targets):
        def loss(weights):
            errors = (encoded(weights, batch[name]) - targets) ** 2
            return errors.mean(), errors.mean(-1)

        return loss

    critic, actor = params["image"], params["text"]
    (lost, errors), gradients = jax.value_and_grad(loss_of("image", 1.0), has_aux=True)(critic)
    critic = jax.tree.map(lambda w, g: w - 0.1 * g, critic, gradients)
    targets = encoded(critic, batch["text"])
    (value, _), gradients = jax.value_and_grad(loss_of("text", targets), has_aux=True)(actor)
    return critic, jax.tree.map(lambda w, g: w - 0.1 * g, actor, gradients), errors, lost + value


def standardized_advantages(params, batch):
    """PPO's advantages by an old critic are standardized over the batch."""
    advantages = batch["image"] - encoded(params["image"], batch["image"])[:, :1]
    standardized = (advantages - advantages.mean()) / advantages.std()

    def loss(weights):
        return (encoded(weights, batch["text"])[:, :1] * standardized).mean()

    return jax.value_and_grad(loss)(params["text"]), advantages.mean(-1)


@pytest.mark.parametrize("update", [updated_one_after_another, standardized_advantages])
def test_layers_that_a_first_pass_computes_are_in_no_other_pass(update):
    step = assert_equals_one_device(update, METHODS["pipeline"]).step

    def num_products(eqns):
        return sum(eqn.primitive.name == "dot_general" for eqn in eqns)

    graphs = step, step.first_pass.step
    bodies = [num_products(eqn for _, eqn in each.microbatching.body) for each in graphs]
    written = jax.make_jaxpr(update)(PARAMS, BATCH)
    assert sum(bodies) == num_products(written.eqns)


@pytest.fixture(scope="module")
def contrastive():
    """A contrastive step in a pipeline, called once, with its executable."""
    return assert_equals_one_device(STEPS["clip"], METHODS["pipeline"])


@pytest.mark.parametrize("are_drawn", [True, False])
def test_statistics_between_layers_are_refused_at_once(are_drawn, monkeypatch):
    """Batch normalization of 6 layers would take a pass for each, of the inputs or of latents."""
    searches = []

    def counted(*args):
        searches.append(args)
        return more_completed(*args)

    monkeypatch.setattr(microbatch_traces, "more_completed", counted)

    def step(weights, x):
        def loss(weights):
            z = jax.random.normal(jax.random.key(0), x.shape) if are_drawn else x
            for w in weights:
                z = jnp.tanh(z @ w)
                z = (z - z.mean(0)) * jax.lax.rsqrt(z.var(0) + 1e-3)
            return ((z - x) ** 2).mean()

        return jax.value_and_grad(loss)(weights)

    weights = [np.eye(8, dtype=np.float32) + k for k in range(6)]
    with pytest.raises(autopar.MicrobatchError, match="batch normalization"):
        trace(step, (weights, np.ones((16, 8), np.float32)), (1,), 4)
    assert len(searches) < 12


def test_the_program_has_both_passes(contrastive):
    """The stages of the first pass follow those of the step; no gradient of theirs is run."""
    rows = contrastive.program.instructions
    runs = [[run for run in row if isinstance(run, Run)] for row in rows]
    for mesh, row in enumerate(runs):
        first = [run for run in row if run.stage == 2 + mesh]
        assert row[: len(first)] == first
        assert {run.phase for run in first} <= {"F", "U"}
        assert {run.stage for run in row[len(first) :]} == {mesh}
    spans = contrastive.execution_timeline().spans
    ran = {span.name for span in spans if span.category == "task"}
    assert ran == {str(run) for row in runs for run in row}


def test_a_prediction_has_the_time_and_memory_of_both_passes(contrastive):
    plan = contrastive.plan
    prediction = contrastive.predict("dgx_a100_80", fidelity="analytic")
    timeline = contrastive.simulate("dgx_a100_80", fidelity="analytic")
    names = {span.task for span in timeline.spans}
    assert {"2F0", "3F3", "0F0", "1B3"} <= names
    assert prediction.seconds == pytest.approx(timeline.makespan)
    assert plan.predicted_seconds > plan.first_pass.predicted_seconds > 0
    unread = contrastive.first_pass.memory[0].total
    assert contrastive.memory[0].total >= unread


def test_a_plan_of_two_passes_is_saved_and_loaded(contrastive):
    step, plan = STEPS["clip"], Plan.from_json(contrastive.plan.to_json())
    assert plan == contrastive.plan
    assert "2 passes over 4 microbatch" in str(plan)
    again = autopar.parallelize(step, method=autopar.PlanMethod(plan), donate_argnums=())
    assert_allclose(again(PARAMS, BATCH), jax.jit(step)(PARAMS, BATCH), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda first: None, r"two passes .* but the plan has one; plan the step again"),
        (
            lambda first: first.model_copy(update={"stages": first.stages[::-1]}),
            r"has 2 stages on devices .* expected those of the step, 2 on .*; plan the step again",
        ),
        (
            lambda first: first.model_copy(update={"fingerprint": "0"}),
            r"this plan is for the first pass of step .*; plan the step again",
        ),
    ],
    ids=["none", "other stages", "another step"],
)
def test_a_plan_with_another_first_pass_is_refused(contrastive, change, words):
    plan = contrastive.plan.model_copy(update={"first_pass": change(contrastive.plan.first_pass)})
    with pytest.raises(PlanError, match=words):
        autopar.parallelize(STEPS["clip"], method=autopar.PlanMethod(plan))(PARAMS, BATCH)


def test_an_evaluation_follows_a_step_of_two_passes():
    train = autopar.parallelize(STEPS["clip"], method=METHODS["pipeline"], donate_argnums=())
    train(PARAMS, BATCH)
    evaluate = autopar.parallelize(
        lambda params, batch: both(params, batch), method=autopar.FollowParallel(train, 4)
    )
    assert_allclose(evaluate(PARAMS, BATCH), both(PARAMS, BATCH), rtol=1e-4, atol=1e-5)


def test_a_first_pass_that_completes_other_values_does_not_stand_in(contrastive):
    step = contrastive.step
    first = step.first_pass
    other = [place._replace(number=place.number + 1) for place in first.places]
    own = microbatch_traces.first_pass_of(lambda count: step, first.places, 8)
    assert own is first.step
    with pytest.raises(autopar.MicrobatchError, match="completes other values"):
        microbatch_traces.first_pass_of(lambda count: step, other, 8)
