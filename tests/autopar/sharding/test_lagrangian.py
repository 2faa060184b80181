"""Memory at a price: what a step is cheapest at, and what that proves of all its shardings."""

import jax
import pytest

from autopar.ir.spec import LogicalMesh
from autopar.sharding.lagrangian import Priced, PricedProblem
from autopar.sharding.mesh_costs import MeshCosts
from autopar.sharding.options import AUTO
from autopar.sharding.plan_shardings import plan_shardings
from autopar.tracing.trace import trace
from simulator.costs.cost_model import ClusterCosts
from simulator.hardware.cluster import Cluster
from tests.steps import mlp_args, mlp_step

MESH = LogicalMesh((2, 2), ("x", "y"))
COSTS = ClusterCosts(Cluster.load("p3.16xlarge"))
PRICES = (0.0, 1e-12, 1e-11, 1e-10, 1e-9, 1e-6)


@pytest.fixture(scope="module")
def step():
    return trace(
        mlp_step, jax.eval_shape(lambda: mlp_args((128,) * 4, batch_size=64, features=128)), (1,)
    )


@pytest.fixture(scope="module")
def found(step) -> dict[float, Priced]:
    moment = next(
        n for n, eqn in enumerate(step.jaxpr.eqns) if "transpose" in str(eqn.source_info.name_stack)
    )
    problem = PricedProblem(step, MeshCosts(MESH, COSTS), AUTO, (), moment)
    return {price: problem.solve(price, 1, 0.0) for price in PRICES}


def test_where_memory_is_free_the_cheapest_is_the_plan(step, found):
    plan = plan_shardings(step, MESH, COSTS)
    assert found[0.0].seconds == pytest.approx(plan.seconds)
    assert found[0.0].bytes(1) + found[0.0].extra_bytes == pytest.approx(plan.peak_bytes)


def test_the_dearer_memory_the_less_is_used_and_the_longer_it_takes(found):
    seconds = [found[price].seconds for price in PRICES]
    used = [found[price].bytes(1) for price in PRICES]
    assert seconds == sorted(seconds)
    assert used == sorted(used, reverse=True)
    assert used[-1] < used[0]


def test_each_price_bounds_what_was_found_at_all_others(found):
    for price, at in found.items():
        for other in found.values():
            assert at.bound <= (other.seconds + price * other.bytes(1)) * (1 + 1e-9)


def test_microbatches_in_flight_cost_what_they_hold(found):
    one = found[0.0]
    assert one.bytes(3) == one.bytes(1) + 2 * one.saved_bytes
