"""The GPT of the sweep, scheduled by hand, trains as it does on one device, with either way of leaving the rest to others."""

import jax
import numpy as np
import pytest

import autopar
from autopar.schedule import build
from autopar.schedule.build import Backend
from autopar.target import target_mesh
from autopar.testing import assert_allclose
from experiments.models import GPT
from experiments.schedules import megatron, schedule_gpt, split_attention, train_step
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
