"""The solver finds the optimum, and raises an error if no choice is feasible."""

from dataclasses import replace
from itertools import product
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.sharding.ilp import solve_ilp
from autopar.sharding.selection_problem import (
    CapacityConstraint,
    InfeasibleError,
    NoFasterError,
    SelectionProblem,
)
from autopar.sharding.solver import Solver, _SelectionSearch, solve
from tests.generators import selection_problems


def brute_force(problem):
    choices = product(*(range(len(cost)) for cost in problem.nodes))
    return min((problem.cost(choice) for choice in choices if problem.fits(choice)), default=np.inf)


@settings(max_examples=300)
@given(selection_problems())
def test_the_solver_finds_the_optimum_of_brute_force(problem):
    best = brute_force(problem)
    if np.isinf(best):
        with pytest.raises(InfeasibleError):
            solve(problem)
    else:
        solution = solve(problem)
        assert problem.cost(solution.choice) == solution.objective == pytest.approx(best)
        assert problem.fits(solution.choice)
        assert (solution.gap or 0.0) < 1e-6


@settings(max_examples=200)
@given(selection_problems())
def test_only_choices_that_are_cheaper_than_a_known_one_are_found(problem):
    best = brute_force(problem)
    if np.isinf(best):
        with pytest.raises(NoFasterError):
            solve(problem, limit=1e9)
        return
    apart = 0.1 * (1 + abs(best))
    assert solve(problem, limit=best + apart).objective == pytest.approx(best)
    with pytest.raises(NoFasterError) as slower:
        solve(problem, limit=best - apart)
    assert slower.value.is_limited == bool(problem.limits)


@settings(max_examples=100)
@given(selection_problems(), st.sampled_from([0, 50_000]))
def test_a_rough_solution_is_continued_to_the_optimum_of_brute_force(problem, small):
    best = brute_force(problem)
    solver = Solver(problem)
    with patch("autopar.sharding.solver._SMALL", small):
        if np.isinf(best):
            with pytest.raises(InfeasibleError):
                solver.solve(60.0, 0.5)
            return
        rough, closer = (solver.solve(60.0, tolerance) for tolerance in (0.5, 0.0))
    assert rough.bound - 1e-6 <= best <= rough.objective + 1e-6
    assert rough.bound <= closer.bound
    assert closer.objective <= rough.objective
    assert problem.cost(closer.choice) == closer.objective
    assert problem.fits(closer.choice)
    assert (closer.gap or 0.0) <= (1e-6 if small else 0.01)
    assert closer.bound - 1e-6 <= best


def test_a_solution_is_continued_from_where_the_last_search_ended():
    rng = np.random.default_rng(0)
    nodes = [rng.random(4) for _ in range(5)]
    problem = SelectionProblem(
        nodes, {(i, j): rng.random((4, 4)) for j in range(5) for i in range(j)}
    )
    solver = Solver(problem)
    solver.solve(60.0, 0.5)
    with patch("autopar.sharding.solver.Reduction", side_effect=AssertionError):
        assert solver.solve(60.0).objective == pytest.approx(brute_force(problem))


@settings(max_examples=60)
@given(selection_problems())
def test_the_integer_program_alone_finds_the_optimum(problem):
    best = brute_force(problem)
    if np.isinf(best):
        with pytest.raises(InfeasibleError):
            solve_ilp(problem, 60)
    else:
        assert problem.cost(solve_ilp(problem, 60)[0]) == pytest.approx(best)


@settings(max_examples=100)
@given(selection_problems())
def test_large_problems_are_solved_within_the_stated_gap(problem):
    best = brute_force(problem)
    if np.isfinite(best):
        with patch("autopar.sharding.solver._SMALL", 0), patch("autopar.sharding.solver._LARGE", 0):
            solution = solve(problem)
        assert problem.fits(solution.choice)
        assert problem.cost(solution.choice) == solution.objective
        assert (solution.gap or 0.0) <= 0.01
        assert solution.bound - 1e-6 <= best <= solution.objective + 1e-6


@settings(max_examples=100)
@given(selection_problems(), st.booleans())
def test_branches_find_the_optimum_of_brute_force(problem, is_swept):
    """Without sweeps, every decision is branched."""
    problem = replace(problem, limits=())
    best = brute_force(problem)
    patience = patch("autopar.sharding.solver._PATIENCE", int(is_swept))
    with patch("autopar.sharding.solver._BRANCHING", 1), patience:
        if np.isinf(best):
            with pytest.raises(InfeasibleError):
                solve(problem)
        else:
            solution = solve(problem)
            assert problem.cost(solution.choice) == solution.objective == pytest.approx(best)
            assert (solution.gap or 0.0) < 1e-6


def test_branching_stops_at_the_time_limit():
    rng = np.random.default_rng(0)
    nodes = [rng.random(8) for _ in range(12)]
    pairs = {(i, j): rng.random((8, 8)) for i in range(12) for j in range(i)}
    problem = SelectionProblem(nodes, {(j, i): cost.T for (i, j), cost in pairs.items()})
    out_of_time = pytest.raises(TimeoutError, match="no sharding plan was found within the time")
    with patch("autopar.sharding.solver._BRANCHING", 1), out_of_time:
        solve(problem, time_limit=1e-9)


def test_a_known_choice_is_returned_if_a_branch_takes_too_long():
    problem = SelectionProblem([np.ones(2)] * 2, {(0, 1): np.array([[0.0, 2.0], [2.0, 1.0]])})
    late = patch.object(_SelectionSearch, "search", side_effect=TimeoutError)
    search = _SelectionSearch(problem, 60.0, 0.0, (1, 1), 0.0, lambda choice: True)
    with late:
        search.enough = 0.0
        search.branch()
    assert search.choice == (1, 1)
    assert search.bound == 0.0


@settings(max_examples=100)
@given(selection_problems())
def test_nothing_is_left_to_branches_within_their_gap(problem):
    problem = replace(problem, limits=())
    best = brute_force(problem)
    if np.isfinite(best):
        start = next(c for c in product(*map(range, map(len, problem.nodes))) if fits(problem, c))
        finish = patch.object(_SelectionSearch, "finish", side_effect=AssertionError)
        with finish:
            solution = solve(problem, tolerance=1e-3, start=start, branching_gap=np.inf)
        assert solution.bound - 1e-6 <= best <= solution.objective + 1e-6
        assert solution.objective == problem.cost(solution.choice) <= problem.cost(start)


def test_parts_of_a_rough_solve_are_not_branched():
    """They would be branched for minutes where the relaxation has a gap at every depth."""
    rng = np.random.default_rng(0)
    nodes = [rng.random(4) for _ in range(6)]
    problem = SelectionProblem(
        nodes, {(i, j): rng.random((4, 4)) for j in range(6) for i in range(j)}
    )
    best = brute_force(problem)
    branch = patch.object(
        _SelectionSearch, "branch", autospec=True, side_effect=_SelectionSearch.branch
    )
    with patch("autopar.sharding.solver._BRANCHING", 1), branch as branches:
        exact = solve(problem)
        depth = branches.call_count
        rough = solve(problem, tolerance=1e-3, branching_gap=2e-3)
    assert exact.objective == pytest.approx(best)
    assert branches.call_count == depth + 1 < 2 * depth
    assert rough.bound <= best <= rough.objective + 1e-9


def fits(problem, choice):
    return np.isfinite(problem.cost(choice))


@pytest.mark.parametrize("branching", [1, 10_000])
@settings(max_examples=100)
@given(problem=selection_problems())
def test_an_excluded_choice_is_returned_only_if_no_allowed_one_is_cheaper(branching, problem):
    def allowed(choice):
        return sum(choice) % 2 == 0

    problem = replace(problem, limits=())
    least = brute_force(problem)
    if np.isfinite(least):
        with patch("autopar.sharding.solver._BRANCHING", branching):
            solution = solve(problem, allowed=allowed)
        choices = product(*(range(len(cost)) for cost in problem.nodes))
        assert (
            solution.objective
            <= min(map(problem.cost, filter(allowed, choices)), default=np.inf) + 1e-6
        )
        assert problem.cost(solution.choice) == solution.objective
        assert solution.bound <= least + 1e-6


def test_a_given_bound_proves_optimality():
    problem = repeated_layers(3)
    cheapest = solve(problem)
    assert solve(problem, bound=cheapest.objective) == replace(cheapest, gap=0.0)
    assert cheapest.bound <= cheapest.objective


def test_problems_with_hundreds_of_options_are_swept_before_decisions_are_eliminated():
    rng = np.random.default_rng(0)
    nodes = [rng.random(200) for _ in range(4)]
    chain = SelectionProblem(nodes, {(i, i + 1): rng.random((200, 200)) for i in range(3)})
    with patch("autopar.sharding.presolve._AFFORDABLE", 200):
        solution = solve(chain)
    assert solution.objective == pytest.approx(solve(chain).objective)
    assert solution.gap == pytest.approx(0, abs=1e-6)


def test_chains_and_trees_are_solved_by_presolve_alone():
    rng = np.random.default_rng(0)
    nodes = [rng.random(8) for _ in range(200)]
    chain = SelectionProblem(nodes, {(i, i + 1): rng.random((8, 8)) for i in range(199)})
    tree = SelectionProblem(nodes, {((i - 1) // 2, i): rng.random((8, 8)) for i in range(1, 200)})
    assert solve(chain).core == solve(tree).core == 0


def repeated_layers(count: int) -> SelectionProblem:
    """Return equal blocks of four decisions.

    Each decision is coupled to the others of its block, and two of them to the next block.
    """
    rng = np.random.default_rng(0)
    cost = [rng.random(3) for _ in range(4)]
    inside = {(a, b): 0.3 * rng.random((3, 3)) for a in range(4) for b in range(a + 1, 4)}
    onward = 0.3 * rng.random((3, 3))
    edges = {(4 * n + a, 4 * n + b): c for n in range(count) for (a, b), c in inside.items()}
    edges |= {(4 * n + a, 4 * n + 4 + a): onward for n in range(count - 1) for a in range(2)}
    return SelectionProblem(cost * count, edges)


def test_repeated_layers_are_solved_to_the_optimum_of_the_integer_program():
    problem = repeated_layers(6)
    solution = solve(problem)
    assert solution.gap == 0
    assert solution.objective == pytest.approx(problem.cost(solve_ilp(problem, 60)[0]))
    assert solve(problem) == solution


def test_a_binding_capacity_constraint_is_satisfied_at_the_least_cost():
    unconstrained = repeated_layers(3)
    use = {i: np.arange(3.0)[::-1] for i in range(12)}
    unconstrained_use = CapacityConstraint(use, 0.0).used(solve(unconstrained).choice)
    problem = SelectionProblem(
        unconstrained.nodes, unconstrained.edges, [CapacityConstraint(use, 0.6 * unconstrained_use)]
    )
    solution = solve(problem)
    assert problem.fits(solution.choice)
    assert solution.objective == pytest.approx(problem.cost(solve_ilp(problem, 60)[0]))
    assert solution.objective > solve(unconstrained).objective


def test_a_choice_of_a_large_problem_is_not_left_to_highs(monkeypatch):
    """HiGHS would take minutes longer than its time limit."""
    unconstrained = repeated_layers(3)
    use = {i: np.arange(3.0)[::-1] for i in range(12)}
    most = 0.6 * CapacityConstraint(use, 0.0).used(solve(unconstrained).choice)
    problem = SelectionProblem(
        unconstrained.nodes, unconstrained.edges, [CapacityConstraint(use, most)]
    )
    exact = solve(problem)
    assert exact.gap == 0
    monkeypatch.setattr("autopar.sharding.solver._TOO_LARGE", 1)
    solution = solve(problem)
    assert problem.fits(solution.choice)
    assert solution.gap
    assert solution.bound <= exact.objective <= solution.objective


def test_a_capacity_below_the_least_use_is_infeasible():
    unconstrained = repeated_layers(3)
    use = {i: np.arange(1.0, 4.0) for i in range(12)}
    with pytest.raises(InfeasibleError, match="every limit"):
        solve(
            SelectionProblem(
                unconstrained.nodes, unconstrained.edges, [CapacityConstraint(use, 11.9)]
            )
        )


def test_a_problem_without_decisions_costs_nothing():
    assert solve(SelectionProblem([], {})).objective == 0


def test_a_forbidden_option_is_never_selected():
    problem = SelectionProblem([np.array([np.inf, 5.0])], {})
    assert solve(problem).choice == (1,)


def test_an_edge_matrix_of_another_shape_than_its_options_is_refused():
    with pytest.raises(ValueError, match=r"edge \(0, 1\) .* shape \(2, 3\), got \(3, 2\)"):
        SelectionProblem([np.zeros(2), np.zeros(3)], {(0, 1): np.zeros((3, 2))})
