"""Every model, planned automatically on 1-D and 2-D meshes, computes what one device computes."""

from typing import Any

import jax
import optax
import pytest

import autopar
from autopar.devices import logical_mesh
from autopar.ir.spec import axes_of
from autopar.planning.step_planner import make_planned
from autopar.sharding.options import AUTO
from autopar.tracing.trace import trace
from experiments.models.model_sizes import SMALL
from simulator.hardware.cluster import Cluster
from tests.steps import assert_close_to_scale, sgd_args
from tests.tiers import slow
from tests.toy_costs import BandwidthOnly

# Small models behave like large ones where messages have no latency.
COSTS = BandwidthOnly(bandwidth=1e9, flop_per_s=1e11)


@pytest.fixture(
    scope="module",
    params=[
        "mlp",
        *(pytest.param(name, marks=pytest.mark.slow) for name in SMALL if name != "mlp"),
    ],
)
def trained(request: pytest.FixtureRequest) -> Any:
    """Return a model, its first (state, batch), and the results of a step on one device."""
    model = SMALL[request.param]
    args = sgd_args(model, optax.sgd(1.0))
    return model, args, jax.jit(model.train_step)(*args)


@pytest.mark.parametrize("mesh", [(2, 4), *slow((1, 8), (8, 1))], ids=str)
def test_loss_and_updated_state_equal_one_device(trained: Any, mesh: tuple[int, int]) -> None:
    model, args, expected = trained
    traced = trace(model.train_step, args, (1,))
    plan = make_planned(
        traced, logical_mesh(mesh), Cluster.load("cpu-virtual"), AUTO, "ShardParallel", COSTS
    ).plan
    used = {axis for constraint in plan.stages[0].constraints for axis in axes_of(constraint.spec)}
    assert used == {axis for axis, size in plan.stages[0].mesh.sizes.items() if size > 1}
    step = autopar.parallelize(
        model.train_step, method=autopar.PlanMethod(plan, mesh), donate_argnums=()
    )
    actual = step(*args)
    assert_close_to_scale(actual, expected)
