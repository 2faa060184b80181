"""The collectives of a plan are those of its method in the literature."""

import jax
import pytest

import autopar
from autopar.report import planned_collectives
from simulator import Cluster
from tests.autopar.report.planned_steps import planned
from tests.steps import mlp_args, mlp_step


def test_data_parallelism_reduces_each_gradient_once():
    """Two layers of 64 x 64 floats and a bias of 64; the loss is four bytes."""
    steps = list(planned_collectives(planned("mlp", "DataParallel")))
    assert {(kind, axes) for kind, _, axes in steps} == {("all_reduce", ("x",))}
    assert sum(num_bytes for _, num_bytes, _ in steps if num_bytes > 8) == 2 * 4 * (64 * 64 + 64)


def test_zero_3_gathers_what_it_reduces_and_scatters():
    steps = list(planned_collectives(planned("mlp", "Zero3Parallel")))
    assert {kind for kind, num_bytes, _ in steps if num_bytes > 1024} == {
        "all_gather",
        "reduce_scatter",
    }


def test_a_saved_plan_and_its_step_are_asked_without_a_device():
    cluster = Cluster.load("p3.16xlarge")
    args = jax.eval_shape(mlp_args)
    plan = autopar.plan_step(mlp_step, args, method=autopar.DataParallel(), cluster=cluster)
    step = autopar.planned_step(mlp_step, args, autopar.Plan.from_json(plan.to_json()))
    assert step.plan == plan
    assert {kind for kind, _, _ in planned_collectives(step)} == {"all_reduce"}
    with pytest.raises(autopar.PlanError):
        autopar.planned_step(mlp_step, jax.eval_shape(lambda: mlp_args((32, 32))), plan)
