"""The GPT of the sweep, scheduled by hand, trains as it does on one device, with either way of leaving the rest to others."""

from dataclasses import replace

import jax
import numpy as np
import optax
import pytest

import autopar
from autopar.devices import device_mesh
from autopar.model_schedules import Knobs
from autopar.schedule import build
from autopar.schedule.build import Backend
from autopar.target import target_mesh
from autopar.testing import assert_allclose
from experiments.models import GPT
from experiments.schedules import megatron, schedule_gpt, scheduled_step, split_attention, train_step
from simulator.cluster import Cluster

MODEL = GPT(num_layers=1, hidden_size=32, num_heads=4, sequence_length=8, vocab_size=64, batch_size=4)


@pytest.mark.parametrize(("directives", "backend"), [(megatron, "manual"), (split_attention, "auto")])
def test_a_scheduled_gpt_trains_as_on_one_device(directives: object, backend: Backend) -> None:
    key = jax.random.key(0)
    state, batch = MODEL.init_state(key), MODEL.make_batch(key)
    expected, loss = jax.jit(MODEL.train_step)(state, batch)
    sch = schedule_gpt(MODEL, 4)
    assert callable(directives)
    directives(sch)
    built = build(sch, backend)
    step = autopar.parallelize(train_step(MODEL, built), method=built.method, donate_argnums=())
    updated, found = step(state, batch)
    np.testing.assert_allclose(found, loss, rtol=1e-5)
    assert_allclose(
        updated.params, expected.params, atol=2e-3
    )  # Adam's first step is the sign of the gradient, rounding or not
    kernel = updated.params["params"]["block_0"]["attention"]["qkv"]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape) == (32, 24)


def test_a_schedule_on_shards_is_predicted_for_gpus_that_are_not_here() -> None:
    """Megatron's tensor parallelism: two all_reduces per block forward and backward, and one for the tokens looked up."""
    cluster = Cluster.load("dgx_a100_80").first_devices(2)
    sch = schedule_gpt(MODEL, target_mesh(cluster, (2,), ("x",)))
    megatron(sch)
    built = build(sch)
    step, args = train_step(MODEL, built), MODEL.abstract_args()
    plan = autopar.plan_step(step, args, method=built.method, cluster=cluster, mesh_shape=(2,))
    timeline = autopar.predict(step, args, plan, cluster)
    assert timeline.makespan > 0
    assert sum(span.category == "all_reduce" for span in timeline.spans) >= 5


@pytest.mark.parametrize(
    ("shape", "knobs"),
    [((1, 2), Knobs(pipeline_stages=2)), ((2, 2), Knobs(vocabulary_parallel=True, sequence_parallel=True))],
    ids=["stages with tensor parallelism", "data and tensor parallelism"],
)
def test_with_microbatches_a_scheduled_gpt_trains_as_on_one_device(shape: tuple[int, int], knobs: Knobs) -> None:
    model, key, sgd = replace(MODEL, num_layers=2), jax.random.key(0), optax.sgd(1.0)
    state, batch = model.init_state(key), model.make_batch(key)
    state = state.replace(tx=sgd, opt_state=sgd.init(state.params))  # Adam's first step is the sign of the gradient
    expected, loss = jax.jit(model.train_step)(state, batch)
    step, _, method = scheduled_step(model, device_mesh, shape, knobs, num_micro_batches=2)
    updated, found = autopar.parallelize(step, method=method, donate_argnums=())(state, batch)
    np.testing.assert_allclose(found, loss, rtol=1e-5)
    assert_allclose(updated.params, expected.params, rtol=1e-4, atol=1e-5)
