"""State in host memory between updates: the same numbers, less memory, and what may go there."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.checks import OptionError
from autopar.devices import check_host_memory, logical_mesh
from autopar.ir.host_memory import HOST_KIND
from autopar.planning.method_planning import Target, plan_by_method
from autopar.recompute.offloading import OffloadError, offload, offloadable, offloaded_inputs
from autopar.sharding.solve_within_memory import MemoryBudgetError
from autopar.tracing.trace import trace
from simulator.hardware.cluster import Cluster

WIDTH = 32
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, eps=1e-3))


def train_step(state, batch):
    params, optimizer, key = state

    def loss(params):
        x = jnp.tanh(batch["x"] @ params["first"])
        return jnp.mean((jnp.tanh(x @ params["middle"]) @ params["last"] - batch["y"]) ** 2)

    value, gradients = autopar.value_and_grad(loss)(params)
    updates, optimizer = OPTIMIZER.update(gradients, optimizer, params)
    return (optax.apply_updates(params, updates), optimizer, jax.random.fold_in(key, 1)), value


def arguments(width=WIDTH):
    keys = jax.random.split(jax.random.key(0), 5)
    params = {
        name: jax.random.normal(key, (width, width)) / 4
        for name, key in zip(("first", "middle", "last"), keys, strict=False)
    }
    batch = {
        name: jax.random.normal(key, (64, width)) for name, key in zip("xy", keys[3:], strict=True)
    }
    return (params, OPTIMIZER.init(params), jax.random.key(1)), batch


MOMENTS = {
    f"0/1/1/0/{moment}/{name}" for moment in ("mu", "nu") for name in ("first", "middle", "last")
}


@pytest.fixture(scope="module")
def step():
    return trace(train_step, arguments(), (1,))


@pytest.fixture(scope="module")
def trained():
    """Return the state and the loss after three steps on one device."""
    state, batch = arguments()
    run = jax.jit(train_step)
    for _ in range(3):
        state, value = run(state, batch)
    return jax.tree.leaves((state, value))


def test_moments_may_go_to_the_host_and_parameters_counts_and_keys_may_not(step):
    assert {step.in_paths[i] for i in offloadable(step)} == MOMENTS


@pytest.mark.parametrize("count", [1, 4])
def test_state_that_a_condition_or_a_forward_pass_reads_stays(count):
    def conditional(state, batch):
        (params, mean), averages = state

        def loss(w):
            return jnp.mean((batch @ w - mean) ** 2)

        value, gradients = autopar.value_and_grad(loss)(params)
        averages = jax.lax.cond(value < 1e3, lambda: 0.9 * averages + gradients, lambda: averages)
        return ((params - 0.1 * gradients, mean), averages), value

    zeros = jnp.zeros((WIDTH, WIDTH))
    args = ((zeros, zeros[0]), zeros), jnp.ones((16, WIDTH))
    assert offloadable(trace(conditional, args, (1,), count)) == ()


def test_state_that_the_step_also_returns_as_it_was_stays():
    def remembering(state, batch):
        w, momentum, last = state
        value, gradient = autopar.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(w)
        new = 0.9 * momentum + 0.1 * gradient + 0.01 * last
        return (w - 0.1 * new, new, momentum), value

    zeros = jnp.zeros((WIDTH, WIDTH))
    args = (zeros + 1.0, zeros, zeros), jnp.ones((16, WIDTH))
    assert offloadable(trace(remembering, args, (1,))) == ()
    run = autopar.parallelize(remembering, method=autopar.DataParallel(offload="optimizer"))
    jax.tree.map(np.testing.assert_array_equal, run(*args)[0][2], zeros)


def test_an_input_that_must_stay_is_refused(step):
    with pytest.raises(OffloadError, match=r"inputs \[0\] of train_step can't stay in host memory"):
        offload(step, [0])


@pytest.mark.parametrize(
    "method",
    [
        autopar.ShardParallel((2, 4), offload="optimizer"),
        autopar.Zero2Parallel(num_micro_batches=4, offload="optimizer", remat="auto"),
        autopar.PipeshardParallel(
            num_micro_batches=2, layer_option=autopar.AutoLayerOption(2), offload="optimizer"
        ),
    ],
    ids=lambda method: type(method).__name__,
)
def test_a_step_whose_state_is_on_the_host_equals_one_device(method, trained, tmp_path):
    run = autopar.parallelize(train_step, method=method)
    state, batch = arguments()
    for _ in range(2):
        state, _ = run(state, batch)
    moments = jax.tree.leaves(state[1])[1:]  # after the count
    assert {moment.sharding.memory_kind for moment in moments} == {HOST_KIND}
    assert all(weight.sharding.memory_kind == "device" for weight in state[0].values())

    executable = run.get_last_executable()
    plan = executable.plan
    assert "pinned_host memory" in repr(executable.get_input_placement_specs())
    autopar.save_checkpoint(tmp_path / "state", state, 2)
    restored = autopar.restore_checkpoint(
        tmp_path / "state", 2, executable.get_input_placement_specs()[0]
    )
    again = autopar.parallelize(
        train_step, method=autopar.PlanMethod(autopar.Plan.from_json(plan.to_json()))
    )
    results = jax.tree.leaves(again(restored, batch))
    for result, expected in zip(results, trained, strict=True):
        if jnp.issubdtype(result.dtype, jax.dtypes.prng_key):
            result, expected = map(jax.random.key_data, (result, expected))
        np.testing.assert_allclose(result, expected, rtol=2e-5, atol=1e-6)


def plan_for(offload, **options):
    method = autopar.Zero2Parallel(offload=offload, **options)
    cluster = Cluster.load("dgx_a100_80").with_size(hosts=1)
    return autopar.plan_step(train_step, arguments(512), method=method, cluster=cluster)


@pytest.fixture(scope="module")
def plans():
    return {offload: plan_for(offload) for offload in ("none", "optimizer")}


def state_bytes(plan):
    (stage,) = plan.stages
    return sum(v.device_bytes(stage.mesh) for v in stage.inputs if v.path in MOMENTS)


def test_a_plan_says_which_state_is_on_the_host(plans):
    (stage,) = plans["optimizer"].stages
    assert {value.path for value in stage.inputs if value.on_host} == MOMENTS
    assert state_bytes(plans["optimizer"]) == 0
    rows = str(plans["optimizer"]).splitlines()
    assert [row for row in rows if "on the host" in row and "mu" in row]
    assert "on the host" not in str(plans["none"])


def test_a_plan_counts_the_copies_and_not_the_bytes_of_offloaded_state(plans):
    kept, offloaded = plans["none"], plans["optimizer"]
    saved = kept.predicted_bytes - offloaded.predicted_bytes
    assert saved == state_bytes(kept)
    link = Cluster.load("dgx_a100_80").device.host_bandwidth_gb_per_s * 1e9
    copies = offloaded.predicted_seconds - kept.predicted_seconds
    assert copies >= 2 * state_bytes(kept) / link


def plan_within(method, devices):
    """Plan without the margin that `plan_step` leaves for XLA."""
    cluster = Cluster.load("dgx_a100_80").with_size(hosts=1, devices_per_host=devices)
    target = Target(logical_mesh((cluster.num_devices,)), cluster)
    return plan_by_method(method, train_step, arguments(512), (1,), target, suggests=False).plan


def test_as_little_state_as_needed_is_offloaded():
    def plan(offload, budget=None):
        return plan_within(autopar.ShardParallel(offload=offload, memory_budget=budget), 1)

    kept, least = plan("none").predicted_bytes, plan("optimizer").predicted_bytes
    assert plan("auto", kept).offloaded == ()
    between = plan("auto", (kept + least) / 2)
    assert 0 < len(between.offloaded) < len(MOMENTS)
    assert between.predicted_bytes <= (kept + least) / 2
    most = plan("auto", least)  # one moment may be offloaded in vain: the peak is elsewhere
    assert len(between.offloaded) < len(most.offloaded) <= len(MOMENTS)
    assert most.predicted_bytes <= least
    with pytest.raises(MemoryBudgetError):
        plan("auto", least - 1)


def test_a_pipeline_offloads_where_it_would_not_fit():
    def plan(offload, budget=None):
        method = autopar.PipeshardParallel(
            num_micro_batches=2,
            layer_option=autopar.AutoLayerOption(2),
            memory_budget=budget,
            offload=offload,
        )
        return plan_within(method, 2)

    budget = plan("none").predicted_bytes - 1
    with pytest.raises(MemoryBudgetError):
        plan("none", budget)
    assert plan("auto").offloaded == ()
    assert plan("auto", budget).offloaded == plan("optimizer").offloaded


def num_host_copies(prediction):
    return sum(span.category == "host copy" for span in prediction.timeline.spans)


@pytest.mark.parametrize("fidelity", ["analytic", "compiled"])
def test_a_prediction_copies_state_over_the_link_to_the_host(plans, fidelity):
    if fidelity == "compiled":
        pytest.importorskip("jax_plugins.xla_cuda12")
    kept, offloaded = (
        autopar.predict(train_step, arguments(512), plan, cluster="dgx_a100_80", fidelity=fidelity)
        for plan in plans.values()
    )
    saved = kept.memory.parts["optimizer"] - offloaded.memory.parts["optimizer"]
    assert saved == state_bytes(plans["none"])
    assert [num_host_copies(each) for each in (kept, offloaded)] == [0, 2 * len(MOMENTS)]


def test_what_to_offload_is_checked():
    with pytest.raises(OptionError, match=r"offload.*'none', 'optimizer'"):
        autopar.ShardParallel(offload="cpu")  # pyright: ignore[reportArgumentType]


def test_a_plan_that_offloads_inputs_of_another_step_is_refused(plans):
    plan = plans["none"].model_copy(update={"offloaded": (0,)})
    run = autopar.parallelize(train_step, method=autopar.PlanMethod(plan))
    with pytest.raises(autopar.PlanError, match="for another step"):
        run(*arguments())


def test_a_device_without_host_memory_is_named():
    check_host_memory(jax.devices())
    device = SimpleNamespace(addressable_memories=lambda: [SimpleNamespace(kind="device")])
    with pytest.raises(ValueError, match="has no memory of kind 'pinned_host', only 'device'"):
        check_host_memory([device])


def test_a_step_knows_its_inputs_in_host_memory(step):
    numbers = offloadable(step)[:2]
    assert offloaded_inputs(offload(step, numbers)) == tuple(sorted(numbers))
