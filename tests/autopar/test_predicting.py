"""Predictions of plans; `devices` of a method mean the same on a cluster as in this process."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from jax.sharding import AbstractMesh, Mesh

import autopar
from autopar.planning.plan_step import MEMORY_MARGIN
from simulator.hardware.cluster import Cluster
from tests.steps import mlp_args, mlp_step
from tests.tiers import slow

CLUSTER = Cluster.load("cpu-virtual").model_copy(update={"devices_per_host": 8})
CASES = [
    None,
    8,
    4,
    (2, 4),
    (2, 2),
    (8, 1),
    [4, 2],
    jax.make_mesh((2, 4), ("rows", "columns")),
    jax.devices(),
]


def mesh_of(plan):
    return plan.stages[0].mesh


def test_the_error_of_too_few_devices_says_how_a_cluster_gets_more_hosts():
    with pytest.raises(
        ValueError, match=r"needs 16 devices, .* has 8; .*with_size\(hosts="
    ) as error:
        autopar.plan_step(mlp_step, mlp_args((16,)), cluster=CLUSTER, mesh_shape=(16,))
    assert "simulator.load_cluster(NAME)" in str(error.value)


@pytest.mark.parametrize("devices", CASES, ids=str)
@pytest.mark.parametrize("kind", [autopar.ShardParallel, *slow(autopar.Zero2Parallel)])
def test_plan_step_and_parallelize_take_devices_for_the_same_mesh(kind, devices):
    method = kind(devices=devices)
    args = mlp_args((16,))
    plan = autopar.plan_step(mlp_step, args, method=method, cluster=CLUSTER)
    here = autopar.parallelize(mlp_step, method=method).get_executable(*args).plan
    assert mesh_of(plan) == mesh_of(here)
    again = autopar.parallelize(mlp_step, method=autopar.PlanMethod(plan)).get_executable(*args)
    assert again.meshes[0].devices.shape == mesh_of(plan).shape


@pytest.mark.parametrize("devices", [4, (2, 2), AbstractMesh((4,), ("i",))])
def test_a_pipeline_takes_the_number_of_devices(devices):
    option = autopar.AutoLayerOption(layer_num=2)
    method = autopar.PipeshardParallel(devices, num_micro_batches=2, layer_option=option)
    plan = autopar.plan_step(mlp_step, mlp_args(), method=method, cluster=CLUSTER)
    assert sorted(device for stage in plan.stages for device in stage.devices) == [0, 1, 2, 3]


def test_an_abstract_mesh_keeps_its_names():
    method = autopar.ShardParallel(AbstractMesh((2, 2), ("i", "j")))
    for mesh_shape in (None, (2, 2)):
        plan = autopar.plan_step(
            mlp_step, mlp_args(), method=method, cluster="p3.16xlarge", mesh_shape=mesh_shape
        )
        assert mesh_of(plan).sizes == {"i": 2, "j": 2}


@pytest.mark.parametrize("kind", [autopar.ShardParallel, autopar.PipeshardParallel])
@pytest.mark.parametrize(
    "devices", [jax.devices()[:4], Mesh(jax.devices()[:4], ("x",)), 16, (4, 4), jax.devices()]
)
def test_devices_that_are_not_the_clusters_are_refused(kind, devices):
    count = 4 if isinstance(devices, list) and len(devices) == 8 else 8
    cluster = CLUSTER.first_devices(count)
    with pytest.raises(
        ValueError, match=rf"devices is .*, but cluster 'cpu-virtual' has {count}; give the shape"
    ):
        autopar.plan_step(mlp_step, mlp_args(), method=kind(devices=devices), cluster=cluster)


def test_a_mesh_shape_beside_other_devices_is_refused():
    method = autopar.ShardParallel(devices=(2, 4))
    with pytest.raises(
        autopar.OptionError,
        match=r"mesh_shape is \(8,\), but method.devices make a mesh of .*\(2, 4\)",
    ):
        autopar.plan_step(mlp_step, mlp_args(), method=method, cluster=CLUSTER, mesh_shape=(8,))
    pipeline = autopar.PipeshardParallel(4)
    with pytest.raises(autopar.OptionError, match="leave one out"):
        autopar.plan_step(mlp_step, mlp_args(), method=pipeline, cluster=CLUSTER, mesh_shape=(8,))


def test_a_method_for_another_cluster_is_refused():
    method = autopar.ShardParallel(cluster="dgx_h100")
    assert (
        autopar.plan_step(mlp_step, mlp_args(), method=method, cluster="dgx_h100").cluster
        == "dgx_h100"
    )
    with pytest.raises(
        autopar.OptionError,
        match=r"cluster is 'cpu-virtual', but method\.cluster is 'dgx_h100'; leave",
    ):
        autopar.plan_step(mlp_step, mlp_args(), method=method, cluster=CLUSTER)


def test_the_margin_of_memory_holds_on_every_plan_that_was_compiled():
    table = pd.read_csv(Path(__file__).parents[2] / "results" / "tables" / "fidelity.csv")
    memory = table[table.quantity == "memory"]
    assert len(memory) > 50
    assert (memory.compiled.astype(float) <= MEMORY_MARGIN * memory.planned.astype(float)).all()


def test_a_plan_within_a_budget_leaves_the_margin():
    def step(params, batch):
        gradients = jax.grad(lambda p: jnp.mean((jnp.tanh(batch @ p["a"]) @ p["b"]) ** 2))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    weights = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    args = {"a": weights, "b": weights}, jax.ShapeDtypeStruct((256, 512), jnp.float32)
    free = autopar.plan_step(step, args, cluster="dgx_h100", method=autopar.ShardParallel(8))
    budget = 1.01 * free.predicted_bytes
    within = autopar.plan_step(
        step, args, cluster="dgx_h100", method=autopar.ShardParallel(8, memory_budget=budget)
    )
    assert within.predicted_bytes * MEMORY_MARGIN <= budget
    with pytest.raises(autopar.MemoryBudgetError) as caught:
        autopar.plan_step(
            step, args, cluster="dgx_h100", method=autopar.ShardParallel(8, memory_budget=1e4)
        )
    assert caught.value.__notes__ == [
        "memory_budget is 1e-05 GB; plan_step keeps a margin of 13% for XLA"
    ]


def test_an_executable_predicts_what_its_plan_does():
    executable = autopar.parallelize(mlp_step, method=autopar.DataParallel(4)).get_executable(
        *mlp_args()
    )
    plan, args = executable.plan, mlp_args()
    prediction = executable.predict("dgx_a100_80", fidelity="analytic", tokens=64)
    assert prediction == autopar.predict(
        mlp_step, args, plan, "dgx_a100_80", fidelity="analytic", tokens=64
    )
    timeline = executable.simulate("dgx_a100_80", fidelity="analytic")
    assert (
        prediction.timeline
        == timeline
        == autopar.simulate(mlp_step, args, plan, "dgx_a100_80", fidelity="analytic")
    )
    assert (prediction.seconds, prediction.tokens) == (timeline.makespan, 64)


def test_a_step_that_calls_python_is_refused_with_the_other_fidelity():
    def step(x):
        return jax.pure_callback(np.sin, x, x)

    args = (jax.ShapeDtypeStruct((8, 8), jnp.float32),)
    plan = autopar.plan_step(step, args, cluster="dgx_h100")
    with pytest.raises(ValueError, match=r'compiled for .*: it calls Python.*fidelity="analytic"'):
        autopar.predict(step, args, plan, "dgx_h100")
    assert autopar.predict(step, args, plan, "dgx_h100", fidelity="analytic").seconds > 0


def test_calls_of_libraries_are_compiled_without_a_gpu_and_named():
    def step(x):
        return jnp.linalg.svd(x, compute_uv=False)

    args = (jax.ShapeDtypeStruct((8, 8), jnp.float32),)
    plan = autopar.plan_step(step, args, cluster="dgx_h100")
    prediction = autopar.predict(step, args, plan, "dgx_h100")
    assert prediction.unmodelled_kernels == {"custom-call cusolver_gesvdj_ffi": 1}
    assert prediction.memory.total > 0
