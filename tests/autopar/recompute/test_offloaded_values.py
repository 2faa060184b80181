"""Forward values in host memory until the backward pass reads them: the same bits, less memory."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import autopar
from autopar.checks import OptionError
from autopar.devices import check_host_memory, logical_mesh
from autopar.ir.evaluate import evaluate, unchanged
from autopar.ir.host_memory import Offload
from autopar.ir.step_graph import Remat
from autopar.planning.method_planning import Target, plan_by_method
from autopar.recompute.passes import passes
from autopar.recompute.rewriting import RecomputeError, recompute
from autopar.sharding.solve_within_memory import MemoryBudgetError
from autopar.tracing.step_traces import TraceOptions
from autopar.tracing.trace import trace
from simulator.hardware.cluster import Cluster
from tests.autopar.recompute.dropout_mlp import layers_and_batch, loss

WIDTH, DEPTH = 32, 5


def train_step(params, batch, key):
    value, gradients = autopar.value_and_grad(loss)(params, batch, key)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def dense_step(params, batch):
    def loss(params):
        x = batch["x"]
        for weight in params:
            x = jnp.tanh(x @ weight)
        return jnp.mean((x - batch["y"]) ** 2)

    value, gradients = autopar.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def arguments(rows=64, width=WIDTH):
    return layers_and_batch(DEPTH, width, rows)


def run(step, args):
    """Return the outputs of a step without microbatches."""

    @jax.jit
    def outputs(*leaves):
        env = dict(zip(step.jaxpr.invars, leaves, strict=True))
        env.update(zip(step.jaxpr.constvars, step.jaxpr.consts, strict=True))
        evaluate(enumerate(step.jaxpr.eqns), env, unchanged, unchanged)
        return [env[var] for var in step.jaxpr.outvars]

    return jax.tree.map(np.asarray, outputs(*jax.tree.leaves(args)))


@pytest.fixture(scope="module")
def step():
    return trace(train_step, arguments(), (1,))


def offloadable(step):
    """Return the numbers of the equations whose results the backward pass may fetch."""
    found = passes(step)
    return sorted(
        found.units[found.made_in[var]].number
        for var in found.arrivals
        if any(found.late[reader] for reader in found.readers.get(var, ()))
    )


def num_moves(step):
    names = [eqn.primitive.name for eqn in step.jaxpr.eqns]
    return names.count("to_host"), names.count("to_device")


def test_results_that_a_later_product_can_wait_for_may_be_offloaded(step):
    eqns = step.jaxpr.eqns
    names = [eqns[number].primitive.name for number in offloadable(step)]
    assert names == ["select_n"] * (DEPTH - 2)


@pytest.mark.parametrize("seed", range(3))
def test_offloading_and_repeating_any_values_changes_no_bit(step, seed):
    rng = np.random.default_rng(seed)
    offloaded = rng.permutation(offloadable(step))[: 2 * seed + 1].tolist()
    found = passes(step)
    numbers = [unit.number for u, unit in enumerate(found.units) if found.is_repeatable(u)]
    repeated = rng.permutation(sorted({*numbers}.difference(offloaded)))[: 10 * seed].tolist()
    rewritten = recompute(step, repeated, offloaded)
    assert num_moves(rewritten) == (len(offloaded), len(offloaded))
    for actual, expected in zip(run(rewritten, arguments()), run(step, arguments()), strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_the_step_with_offloaded_values_is_the_same_each_time(step):
    numbers = offloadable(step)[::2]
    assert recompute(step, (), numbers).fingerprint == recompute(step, (), numbers).fingerprint


def test_equations_whose_results_cannot_be_offloaded_are_refused(step):
    found = passes(step)
    backward = next(unit.number for u, unit in enumerate(found.units) if found.late[u])
    for number in (backward, len(step.jaxpr.eqns), -1):
        with pytest.raises(RecomputeError, match=f"no result of equation {number} can be in host"):
            recompute(step, (), [number])


def method_of(kind, share, offload: Offload, remat: Remat = "keep", cluster="cpu-virtual"):
    """Return a method with a part of the memory that it would take without a budget."""
    plan = autopar.plan_step(
        train_step, arguments(512), method=kind, cluster=cluster, batch_argnums=(1,)
    )
    budget = share * 1.13 * plan.predicted_bytes
    return replace(kind, memory_budget=budget, offload=offload, remat=remat)


@pytest.mark.parametrize(
    ("kind", "remat"),
    [
        (autopar.ShardParallel((2, 4)), "auto"),
        (autopar.Zero3Parallel((2,), num_micro_batches=2), "auto"),
        (autopar.Zero2Parallel((8,), num_micro_batches=4), "keep"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_plan_that_offloads_values_equals_one_device(kind, remat, monkeypatch):
    # small gradients would wait for each other to be combined
    monkeypatch.setattr("autopar.sharding.value_lifetimes.COMBINED_BYTES", 1.0)
    args = arguments(512)
    method = method_of(kind, 0.7, "activations", remat)
    plan = autopar.plan_step(
        train_step, args, method=method, cluster="cpu-virtual", batch_argnums=(1,)
    )
    assert plan.offloaded_results
    rows = [row for row in str(plan).splitlines() if "offloaded" in row]
    assert rows
    assert all("on the host" in row for row in rows)
    loaded = autopar.PlanMethod(autopar.Plan.from_json(plan.to_json()))
    run = autopar.parallelize(train_step, method=loaded, batch_argnums=(1,))
    expected = jax.jit(train_step)(*args)
    for result, correct in zip(jax.tree.leaves(run(*args)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(result, correct, rtol=1e-5, atol=1e-6)


def plan_within(budget, offload: Offload = "activations", remat: Remat = "keep"):
    """Plan without the margin that `plan_step` leaves for XLA."""
    cluster = Cluster.load("dgx_a100_80").with_size(hosts=1)
    target = Target(logical_mesh((8,)), cluster)
    method = autopar.DataParallel(memory_budget=budget, offload=offload, remat=remat)
    args = SHAPES
    return plan_by_method(method, dense_step, args, (1,), target, suggests=False).plan


SHAPES = (
    [jax.ShapeDtypeStruct((512, 512), jnp.float32)] * DEPTH,
    {name: jax.ShapeDtypeStruct((2**17, 512), jnp.float32) for name in "xy"},
)


def test_a_smaller_budget_offloads_more_and_takes_longer():
    kept = plan_within(None)
    assert (kept.offloaded_results, kept.recomputed) == ((), ())
    budgets = [share * kept.predicted_bytes for share in (0.95, 0.8, 0.7)]
    plans = [kept, *map(plan_within, budgets)]
    with pytest.raises(MemoryBudgetError):
        plan_within(0.4 * kept.predicted_bytes)
    seconds = [plan.predicted_seconds for plan in plans]
    assert seconds == sorted(seconds)
    assert [len(plan.offloaded_results) for plan in plans] == [0, 1, 2, 3]
    again = plan_within(budgets[-1])
    assert again.model_copy(update={"planning_seconds": 0.0}) == plans[-1].model_copy(
        update={"planning_seconds": 0.0}
    )


def test_of_recomputation_and_offload_the_faster_is_chosen():
    budget = 0.9 * plan_within(None).predicted_bytes
    recomputed = plan_within(budget, "none", "auto")
    both = plan_within(budget, remat="auto")
    assert both.predicted_seconds == recomputed.predicted_seconds
    assert plan_within(budget).predicted_seconds > both.predicted_seconds
    assert both.offloaded_results == ()


def test_automatic_offload_takes_the_values_where_there_is_no_state():
    kept = plan_within(None, "auto")
    assert kept.offloaded_results == ()
    budget = 0.9 * kept.predicted_bytes
    assert plan_within(budget, "auto").offloaded_results == plan_within(budget).offloaded_results


def test_the_compiled_program_needs_as_much_less_as_planned():
    pytest.importorskip("jax_plugins.xla_cuda12")
    kept = plan_within(None)
    offloaded = plan_within(0.8 * kept.predicted_bytes)
    compiled = [
        autopar.predict(dense_step, SHAPES, plan, cluster="dgx_a100_80", fidelity="compiled")
        for plan in (kept, offloaded)
    ]
    saved = kept.predicted_bytes - offloaded.predicted_bytes
    fewer = compiled[0].memory.total - compiled[1].memory.total
    assert fewer == pytest.approx(saved, rel=0.05)
    copies = offloaded.predicted_seconds - kept.predicted_seconds
    assert compiled[1].seconds - compiled[0].seconds == pytest.approx(copies, rel=0.05)
    numbers = [
        sum(span.category == "host copy" for span in prediction.timeline.spans)
        for prediction in compiled
    ]
    assert numbers == [0, 2 * len(offloaded.offloaded_results)]


def test_what_to_offload_is_checked():
    with pytest.raises(OptionError, match=r"offload is 'activation', expected .*'activations'"):
        autopar.ShardParallel(offload="activation")  # pyright: ignore[reportArgumentType]


def test_a_device_without_host_memory_is_refused():
    device = SimpleNamespace(addressable_memories=lambda: [SimpleNamespace(kind="device")])
    with pytest.raises(ValueError, match="keeps values in host memory, but"):
        check_host_memory([device])


def block(x, weights):
    x = checkpoint_name(x, "block input")
    return x + jnp.tanh(jnp.tanh(x @ weights[0]) @ weights[1])


def step_with(block):
    def train_step(params, batch):
        def loss(params):
            x = batch["x"]
            for weights in params:
                x = block(x, weights)
            return jnp.mean((x - batch["y"]) ** 2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    return train_step


OFFLOADING = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["block input"],
    offload_src="device",
    offload_dst="pinned_host",
)


@pytest.fixture(scope="module")
def offloading_step():
    """Return a step whose own policy offloads the inputs of its blocks."""
    return step_with(jax.checkpoint(block, policy=OFFLOADING))


def test_a_step_whose_own_policy_offloads_equals_one_device(offloading_step):
    params, batch, _ = arguments()
    args = [params[:2], params[2:4]], batch
    run = autopar.parallelize(offloading_step, method=autopar.ShardParallel((2, 4)))
    expected = jax.jit(step_with(block))(*args)
    for result, correct in zip(jax.tree.leaves(run(*args)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(result, correct, rtol=1e-5, atol=1e-6)


def test_the_copies_of_a_policy_count_and_their_values_take_no_memory(offloading_step):
    pytest.importorskip("jax_plugins.xla_cuda12")
    args = [[jax.ShapeDtypeStruct((512, 512), jnp.float32)] * 2] * 4, SHAPES[1]
    planned, compiled = {}, {}
    for name, step in {
        "offloaded": offloading_step,
        "recomputed": step_with(jax.checkpoint(block)),
    }.items():
        method = autopar.DataParallel(devices=8)
        planned[name] = plan = autopar.plan_step(step, args, method=method, cluster="dgx_a100_80")
        compiled[name] = autopar.predict(
            step, args, plan, cluster="dgx_a100_80", fidelity="compiled"
        )
    assert planned["offloaded"].predicted_bytes < planned["recomputed"].predicted_bytes
    total = compiled["offloaded"].memory.total
    assert total < compiled["recomputed"].memory.total
    assert planned["offloaded"].predicted_bytes == pytest.approx(total, rel=0.05)
    seconds = planned["offloaded"].predicted_seconds
    assert seconds == pytest.approx(compiled["offloaded"].seconds, rel=0.05)


def test_a_policy_that_is_not_kept_offloads_nothing(offloading_step):
    params, batch, _ = arguments()
    args = [params[:2], params[2:4]], batch
    assert num_moves(trace(offloading_step, args, (1,))) == (2, 2)
    assert num_moves(
        trace(offloading_step, args, (1,), options=TraceOptions(keeps_remat=False))
    ) == (0, 0)


def pipeline(budget=None, schedule="1f1b", offload: Offload = "activations"):
    return autopar.PipeshardParallel(
        devices=2,
        num_micro_batches=4,
        layer_option=autopar.AutoLayerOption(2),
        pipeline_schedule=schedule,
        memory_budget=budget,
        offload=offload,
    )


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_pipeline_that_offloads_values_equals_one_device(schedule):
    args = arguments(512)

    def plan_within(budget):
        return autopar.plan_step(
            train_step,
            args,
            method=pipeline(budget, schedule),
            cluster="cpu-virtual",
            batch_argnums=(1,),
        )

    kept = plan_within(None)
    plan = plan_within(0.9 * 1.13 * kept.predicted_bytes)
    assert kept.offloaded_results == ()
    assert len(plan.offloaded_results) == sum(len(stage.offloaded) for stage in plan.stages) > 0
    assert plan.predicted_bytes < 0.9 * kept.predicted_bytes
    assert plan.predicted_seconds > kept.predicted_seconds
    loaded = autopar.PlanMethod(autopar.Plan.from_json(plan.to_json()))
    run = autopar.parallelize(train_step, method=loaded, batch_argnums=(1,))
    expected = jax.jit(train_step)(*args)
    for result, correct in zip(jax.tree.leaves(run(*args)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(result, correct, rtol=1e-5, atol=1e-6)


def test_the_compiled_tasks_of_a_pipeline_copy_what_was_planned():
    pytest.importorskip("jax_plugins.xla_cuda12")
    cluster = Cluster.load("dgx_a100_80").with_size(hosts=1, devices_per_host=2)
    kept = autopar.plan_step(dense_step, SHAPES, method=pipeline(), cluster=cluster)
    budget = 1.13 * 0.9 * kept.predicted_bytes
    plan = autopar.plan_step(dense_step, SHAPES, method=pipeline(budget), cluster=cluster)
    analytic, compiled = (
        autopar.predict(dense_step, SHAPES, plan, cluster="dgx_a100_80", fidelity=fidelity)
        for fidelity in ("analytic", "compiled")
    )
    assert plan.offloaded_results
    assert compiled.memory.total == pytest.approx(analytic.memory.total, rel=0.05)
    assert compiled.seconds == pytest.approx(analytic.seconds, rel=0.05)
    copies = [
        sum(span.seconds for span in prediction.timeline.spans if span.category == "host copy")
        for prediction in (analytic, compiled)
    ]
    assert copies[1] == pytest.approx(copies[0], rel=0.01)


def test_a_schedule_that_splits_the_backward_pass_cannot_offload_values():
    with pytest.raises(OptionError, match="'zero_bubble_h1' splits the backward pass in two"):
        pipeline(schedule="zero_bubble_h1")
    pipeline(schedule="auto")
    pipeline(schedule="zero_bubble_h1", offload="auto")
