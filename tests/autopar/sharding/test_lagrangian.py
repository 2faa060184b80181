"""The Lagrangian relaxation of the memory constraint: its solutions and the bounds they prove."""

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
def problem(step) -> PricedProblem:
    program_point = next(
        n for n, eqn in enumerate(step.jaxpr.eqns) if "transpose" in str(eqn.source_info.name_stack)
    )
    return PricedProblem(step, MeshCosts(MESH, COSTS), AUTO, (), program_point)


@pytest.fixture(scope="module")
def solutions(problem) -> dict[float, Priced]:
    return {price: problem.solve(price, 1, 0.0) for price in PRICES}


def test_the_solution_at_price_0_is_the_plan(step, solutions):
    plan = plan_shardings(step, MESH, COSTS)
    assert solutions[0.0].seconds == pytest.approx(plan.seconds)
    assert solutions[0.0].bytes(1) + solutions[0.0].extra_bytes == pytest.approx(plan.peak_bytes)


def test_higher_prices_use_less_memory_and_take_longer(solutions):
    seconds = [solutions[price].seconds for price in PRICES]
    bytes_used = [solutions[price].bytes(1) for price in PRICES]
    assert seconds == sorted(seconds)
    assert bytes_used == sorted(bytes_used, reverse=True)
    assert bytes_used[-1] < bytes_used[0]


def test_the_bound_of_each_price_holds_for_all_solutions(solutions):
    for price, solution in solutions.items():
        for other in solutions.values():
            assert solution.bound <= (other.seconds + price * other.bytes(1)) * (1 + 1e-9)


def test_each_microbatch_in_flight_needs_its_saved_bytes(solutions):
    solution = solutions[0.0]
    assert solution.bytes(3) == solution.bytes(1) + 2 * solution.saved_bytes


def test_a_solve_starts_from_a_known_solution(problem, solutions):
    """A known optimum ends the solve, which does not look for choices as good within its gap."""
    for price, solution in solutions.items():
        assert problem.solve(price, 1, 1.0, solution).choice == solution.choice


def test_no_solution_needs_less_than_the_least_bytes(problem, solutions):
    for solution in solutions.values():
        assert problem.least_bytes(1) <= solution.resident_bytes + solution.extra_bytes
        assert problem.least_saved_bytes <= solution.saved_bytes
        for in_flight in (1, 3):
            assert problem.least_resident_bytes(in_flight) <= solution.bytes(in_flight)
    smallest = solutions[PRICES[-1]].bytes(1)
    assert problem.least_resident_bytes(1) == pytest.approx(smallest, rel=0.1)
