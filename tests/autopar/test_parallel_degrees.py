"""Degrees of data, operator and pipeline parallelism are meshes and stages of these shapes."""

import jax
import pytest

import autopar
from autopar.testing import assert_allclose
from simulator.hardware.cluster import Cluster
from tests.steps import mlp_args, mlp_step, serial
from tests.tiers import pairs, slow


@pytest.mark.parametrize(
    ("devices", "degrees"),
    pairs(
        [None, 8, jax.devices()[::-1], jax.make_mesh((8,), ("i",))],
        [(2, 4), (-1, 4), (8, 1), (1, 8)],
    ),
)
def test_degrees_without_a_pipeline_are_a_mesh_of_the_same_devices(devices, degrees):
    method = autopar.get_3d_parallel_method(1, *degrees, devices=devices)
    assert isinstance(method, autopar.ShardParallel)
    executable = autopar.parallelize(mlp_step, method=method).get_executable(*mlp_args())
    assert executable.meshes[0].devices.shape == (8 // degrees[1], degrees[1])
    given = jax.devices()[::-1] if isinstance(devices, list) else jax.devices()
    assert list(executable.meshes[0].devices.flat) == given
    if executable.meshes[0].devices.shape[0] > 1:
        assert {v.path: v.spec for v in executable.plan.stages[0].inputs}["1/x"][0][:1] == ("x",)


@pytest.mark.parametrize(
    "degrees",
    [
        (-1, 1, 4),
        *slow((2, 2, 2), (1, 4, 2), (4, 1, 2)),
    ],
)
def test_degrees_with_a_pipeline_are_stages_of_that_shape(degrees):
    data, operator, stages = degrees
    method = autopar.get_3d_parallel_method(2, data, operator, stages, devices=8)
    args = mlp_args((64, 64, 64, 64))
    plan = autopar.plan_step(mlp_step, args, method=method, cluster="p3.16xlarge")
    assert len(plan.stages) == stages
    assert {stage.mesh_shape for stage in plan.stages} == {(8 // operator // stages, operator)}


@pytest.mark.slow
def test_degrees_with_a_pipeline_equal_one_device():
    method = autopar.get_3d_parallel_method(2, 2, 2, 2, devices=8)
    args = mlp_args((64, 64, 64, 64))
    planned = autopar.parallelize(mlp_step, method=method, donate_argnums=())
    assert_allclose(planned(*args), serial(mlp_step, *args), rtol=2e-3, atol=2e-3)


def test_degrees_are_planned_for_an_absent_cluster():
    cluster = Cluster.load("p3.16xlarge").with_size(hosts=2)
    for method, shapes in (
        (autopar.get_3d_parallel_method(1, 4, 4, devices=16), [(4, 4)]),
        (autopar.get_3d_parallel_method(2, 2, 4, 2, devices=16), [(2, 4), (2, 4)]),
        (
            autopar.get_3d_parallel_method(
                1, 4, 4, 1, 16, allow_degenerate_into_shard_parallel=False
            ),
            [(4, 4)],
        ),
    ):
        plan = autopar.plan_step(mlp_step, mlp_args((64, 64, 64)), method=method, cluster=cluster)
        assert [stage.mesh_shape for stage in plan.stages] == shapes


def test_options_hold_with_a_pipeline_and_without():
    for stages in (1, 2):
        method = autopar.get_3d_parallel_method(
            1, -1, 1, stages, devices=8, memory_budget=1e9, cluster="dgx_h100"
        )
        assert (method.memory_budget, method.cluster) == (1e9, "dgx_h100")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"data_parallel": 3},
            "data_parallel=3 x operator_parallel=1 x pipeline_parallel=1 is not the number of"
            " devices, 8",
        ),
        ({"operator_parallel": 3}, "is not the number of devices, 8"),
        ({"data_parallel": 2.0}, "data_parallel is 2.0, expected"),
        ({"operator_parallel": 0}, "operator_parallel is 0, expected"),
        ({"pipeline_parallel": "2"}, "pipeline_parallel is '2', expected"),
        ({"num_micro_batches": 0}, "num_micro_batches is 0, expected"),
        ({"devices": 8.0}, "devices is 8.0, expected"),
        ({"allow_degenerate_into_shard_parallel": 1}, "expected True or False"),
        ({"pipeline_schedule": "1b1f"}, "pipeline_schedule is '1b1f', expected one of"),
        ({"pipeline_parallel": 16}, "is not the number of devices, 8"),
    ],
)
def test_degrees_that_make_no_sense_are_refused(options, message):
    with pytest.raises(autopar.OptionError, match=message):
        autopar.get_3d_parallel_method(**{"num_micro_batches": 1, "devices": 8} | options)
