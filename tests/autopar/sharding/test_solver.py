"""The solver finds the optimum, and says so when there is none."""

from dataclasses import replace
from itertools import product
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings

from autopar.sharding.ilp import solve_ilp
from autopar.sharding.selection_problem import CapacityConstraint, InfeasibleError, SelectionProblem
from autopar.sharding.solver import solve
from tests.generators import choice_problems


def brute_force(problem):
    choices = product(*(range(len(cost)) for cost in problem.nodes))
    return min((problem.cost(choice) for choice in choices if problem.fits(choice)), default=np.inf)


@settings(max_examples=300)
@given(choice_problems())
def test_the_cheapest_choice_is_found(problem):
    best = brute_force(problem)
    if np.isinf(best):
        with pytest.raises(InfeasibleError):
            solve(problem)
    else:
        solution = solve(problem)
        assert problem.cost(solution.choice) == solution.objective == pytest.approx(best)
        assert problem.fits(solution.choice)
        assert (solution.gap or 0.0) < 1e-6


@settings(max_examples=60)
@given(choice_problems())
def test_the_integer_program_alone_finds_it_too(problem):
    best = brute_force(problem)
    if np.isinf(best):
        with pytest.raises(InfeasibleError):
            solve_ilp(problem, 60)
    else:
        assert problem.cost(solve_ilp(problem, 60)[0]) == pytest.approx(best)


@settings(max_examples=100)
@given(choice_problems())
def test_what_counts_as_large_is_solved_to_the_gap_that_it_states(problem):
    best = brute_force(problem)
    if np.isfinite(best):
        with patch("autopar.sharding.solver._SMALL", 0), patch("autopar.sharding.solver._LARGE", 0):
            solution = solve(problem)
        assert problem.fits(solution.choice)
        assert problem.cost(solution.choice) == solution.objective
        assert (solution.gap or 0.0) <= 0.01
        assert solution.bound - 1e-6 <= best <= solution.objective + 1e-6


@settings(max_examples=100)
@given(choice_problems())
def test_what_is_not_allowed_is_the_answer_only_if_nothing_that_is_allowed_is_cheaper(problem):
    def allowed(choice):
        return sum(choice) % 2 == 0

    problem = replace(problem, limits=())
    least = brute_force(problem)
    if np.isfinite(least):
        solution = solve(problem, allowed=allowed)
        choices = product(*(range(len(cost)) for cost in problem.nodes))
        assert (
            solution.objective
            <= min(map(problem.cost, filter(allowed, choices)), default=np.inf) + 1e-6
        )
        assert problem.cost(solution.choice) == solution.objective
        assert solution.bound <= least + 1e-6


def test_a_bound_that_is_known_counts_as_proven():
    problem = repeated_layers(3)
    cheapest = solve(problem)
    assert solve(problem, bound=cheapest.objective) == replace(cheapest, gap=0.0)
    assert cheapest.bound <= cheapest.objective


def test_with_hundreds_of_options_sweeps_come_before_folding():
    rng = np.random.default_rng(0)
    nodes = [rng.random(200) for _ in range(4)]
    chain = SelectionProblem(nodes, {(i, i + 1): rng.random((200, 200)) for i in range(3)})
    with patch("autopar.sharding.presolve._AFFORDABLE", 200):
        solution = solve(chain)
    assert solution.objective == pytest.approx(solve(chain).objective)
    assert solution.gap == pytest.approx(0, abs=1e-6)


def test_chains_and_trees_need_no_integer_program():
    rng = np.random.default_rng(0)
    nodes = [rng.random(8) for _ in range(200)]
    chain = SelectionProblem(nodes, {(i, i + 1): rng.random((8, 8)) for i in range(199)})
    tree = SelectionProblem(nodes, {((i - 1) // 2, i): rng.random((8, 8)) for i in range(1, 200)})
    assert solve(chain).core == solve(tree).core == 0


def repeated_layers(count: int) -> SelectionProblem:
    """Blocks of four decisions, each coupled to all others of its block and two to the next block; all blocks alike."""
    rng = np.random.default_rng(0)
    cost = [rng.random(3) for _ in range(4)]
    inside = {(a, b): 0.3 * rng.random((3, 3)) for a in range(4) for b in range(a + 1, 4)}
    onward = 0.3 * rng.random((3, 3))
    edges = {(4 * n + a, 4 * n + b): c for n in range(count) for (a, b), c in inside.items()}
    edges |= {(4 * n + a, 4 * n + 4 + a): onward for n in range(count - 1) for a in range(2)}
    return SelectionProblem(cost * count, edges)


def test_layers_that_repeat_are_solved_as_the_integer_program_solves_them():
    problem = repeated_layers(6)
    solution = solve(problem)
    assert solution.gap == 0
    assert solution.objective == pytest.approx(problem.cost(solve_ilp(problem, 60)[0]))
    assert solve(problem) == solution


def test_a_limit_that_binds_is_kept_at_the_least_cost():
    free = repeated_layers(3)
    use = {i: np.arange(3.0)[::-1] for i in range(12)}
    much = CapacityConstraint(use, 0.0).used(solve(free).choice)
    problem = SelectionProblem(free.nodes, free.edges, [CapacityConstraint(use, 0.6 * much)])
    solution = solve(problem)
    assert problem.fits(solution.choice)
    assert solution.objective == pytest.approx(problem.cost(solve_ilp(problem, 60)[0]))
    assert solution.objective > solve(free).objective


def test_a_limit_below_the_least_use_is_refused():
    free = repeated_layers(3)
    use = {i: np.arange(1.0, 4.0) for i in range(12)}
    with pytest.raises(InfeasibleError, match="every limit"):
        solve(SelectionProblem(free.nodes, free.edges, [CapacityConstraint(use, 11.9)]))


def test_a_problem_without_decisions_costs_nothing():
    assert solve(SelectionProblem([], {})).objective == 0


def test_a_forbidden_option_is_never_taken():
    problem = SelectionProblem([np.array([np.inf, 5.0])], {})
    assert solve(problem).choice == (1,)


def test_edges_must_fit_their_decisions():
    with pytest.raises(ValueError, match=r"edge \(0, 1\) .* shape \(2, 3\), got \(3, 2\)"):
        SelectionProblem([np.zeros(2), np.zeros(3)], {(0, 1): np.zeros((3, 2))})
