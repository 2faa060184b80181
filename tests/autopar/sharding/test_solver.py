"""The solver finds the optimum, and says so when there is none."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings

from autopar.sharding.ilp import solve_ilp
from autopar.sharding.problem import ChoiceProblem, InfeasibleError
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
        assert solution.gap < 1e-6


@settings(max_examples=60)
@given(choice_problems())
def test_the_integer_program_alone_finds_it_too(problem):
    best = brute_force(problem)
    if np.isinf(best):
        with pytest.raises(InfeasibleError):
            solve_ilp(problem, 60)
    else:
        assert problem.cost(solve_ilp(problem, 60)[0]) == pytest.approx(best)


def test_chains_and_trees_need_no_integer_program():
    rng = np.random.default_rng(0)
    nodes = [rng.random(8) for _ in range(200)]
    chain = ChoiceProblem(nodes, {(i, i + 1): rng.random((8, 8)) for i in range(199)})
    tree = ChoiceProblem(nodes, {((i - 1) // 2, i): rng.random((8, 8)) for i in range(1, 200)})
    assert solve(chain).core == solve(tree).core == 0


def test_a_problem_without_decisions_costs_nothing():
    assert solve(ChoiceProblem([], {})).objective == 0


def test_a_forbidden_option_is_never_taken():
    problem = ChoiceProblem([np.array([np.inf, 5.0])], {})
    assert solve(problem).choice == (1,)


def test_edges_must_fit_their_decisions():
    with pytest.raises(ValueError, match=r"edge \(0, 1\) .* shape \(2, 3\), got \(3, 2\)"):
        ChoiceProblem([np.zeros(2), np.zeros(3)], {(0, 1): np.zeros((3, 2))})
