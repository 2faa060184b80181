"""An MLP has the collectives of each method, on meshes with and without trivial axes."""

from collections import Counter

import jax
import pytest

from autopar.ir.spec import axes_of
from autopar.sharding.options import DATA_PARALLEL, ZERO2, ZERO3, ShardingOptions
from autopar.tracing.trace import trace
from tests.autopar.checks.compiled_plans import (
    collectives,
    in_plan,
    inputs,
    kinds,
    on_gpus,
    planned,
)
from tests.steps import mlp_args, mlp_step

LAYERS = 6
MESHES = [(4, 1), (1, 4)]


@pytest.fixture(scope="module")
def narrow():
    """Return a step whose activations are larger than its weights."""
    return trace(
        mlp_step,
        jax.eval_shape(lambda: mlp_args((32,) * LAYERS, batch_size=256, features=32)),
        (1,),
    )


@pytest.fixture(scope="module")
def wide():
    """Return a step whose weights are larger than its activations."""
    return trace(
        mlp_step,
        jax.eval_shape(lambda: mlp_args((256,) * LAYERS, batch_size=32, features=256)),
        (1,),
    )


@pytest.mark.parametrize("mesh", MESHES)
def test_data_parallelism_is_one_all_reduce_of_all_gradients(narrow, mesh):
    plan = planned(narrow, mesh, DATA_PARALLEL)
    assert collectives(plan) == Counter(all_reduce=1)
    assert not any(axes_of(spec) for spec in inputs(plan, "0/").values())


def plan_with_scattered_gradients(narrow, mesh, options):
    """Return a plan, which scatters gradients and gathers parameters without any all_reduce."""
    plan = planned(narrow, mesh, options)
    assert in_plan(plan) == Counter(reduce_scatter=2 * LAYERS, all_gather=2 * LAYERS)
    assert on_gpus(plan) == Counter(reduce_scatter=1, all_gather=1)
    return plan


@pytest.mark.parametrize("mesh", MESHES)
def test_zero_2_scatters_gradients_and_gathers_parameters(narrow, mesh):
    plan = plan_with_scattered_gradients(narrow, mesh, ZERO2)
    moments = {**inputs(plan, "0/opt_state/0/mu"), **inputs(plan, "0/opt_state/0/nu")}
    assert len(moments) == 4 * LAYERS
    assert all(axes_of(spec) for spec in moments.values())
    assert not any(axes_of(spec) for spec in inputs(plan, "0/params").values())


@pytest.mark.parametrize("mesh", MESHES)
def test_zero_3_has_no_all_reduce_and_shards_everything(narrow, mesh):
    plan = plan_with_scattered_gradients(narrow, mesh, ZERO3)
    kernels = inputs(plan, "0/", "kernel")
    assert len(kernels) == 3 * LAYERS
    assert all(axes_of(spec) for spec in kernels.values())


@pytest.mark.parametrize("mesh", [(4,), *MESHES])
def test_wide_layers_alternate_column_and_row_with_an_all_reduce_between_layers(wide, mesh):
    plan = planned(wide, mesh)
    axis = "xy"[mesh.index(4)]
    assert kinds(plan) == [f"column on {axis}", f"row on {axis}"] * (LAYERS // 2)
    assert in_plan(plan)["all_reduce"] == LAYERS - 1
    assert collectives(plan)["all_reduce"] == LAYERS - 1


def test_forced_data_parallelism_is_planned_even_if_it_is_slower(wide):
    forced = planned(wide, (4,), DATA_PARALLEL)
    assert collectives(forced) == Counter(all_reduce=1)
    assert forced.plan.predicted_seconds > planned(wide, (4,)).plan.predicted_seconds


def test_a_forced_batch_axis_of_all_devices_is_data_parallel_and_one_of_size_1_model_parallel(wide):
    forced = ShardingOptions(batch_axis="x")
    data = planned(wide, (4, 1), forced)
    assert inputs(data, "1/") == dict.fromkeys(("1/x", "1/y"), (("x",), ()))
    assert all("column" not in kind and "row" not in kind for kind in kinds(data))
    assert collectives(data)["all_reduce"] == 1
    assert kinds(planned(wide, (1, 4), forced)) == ["column on y", "row on y"] * (LAYERS // 2)
