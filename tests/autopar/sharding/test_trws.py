"""TRW-S sweeps preserve the cost of every choice, give lower bounds and keep optimal options."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.sharding.presolve import Reduction
from autopar.sharding.selection_problem import SelectionProblem
from autopar.sharding.trws import (
    excess,
    local_optimum,
    make_finite,
    merge_equal_rows,
    price,
    sweep,
    used,
)
from tests.generators import selection_problems


def choices(problem):
    return product(*(range(len(cost)) for cost in problem.nodes))


def costs_with_prices(problem, prices):
    """Return the cost of each choice plus the price of what it uses above the capacities."""
    excess_use = {
        c: np.array([limit.used(c) - limit.bound for limit in problem.limits])
        for c in choices(problem)
    }
    return {c: problem.cost(c) + float(prices @ excess_use[c]) for c in excess_use}


@settings(max_examples=100)
@given(selection_problems(decisions=5), st.floats(0, 3))
def test_sweeps_and_prices_preserve_costs_and_give_a_lower_bound(problem, amount):
    work = Reduction(problem)
    make_finite(work)
    prices = np.full(len(problem.limits), amount)
    price(work, prices)
    order = sorted(work.costs)
    for numbers in (order, order[::-1]):
        marginals = sweep(work, numbers, np.inf)
        assert set(marginals) == set(order)
        for choice, cost in costs_with_prices(problem, prices).items():
            core = dict(enumerate(choice))
            assert work.constant <= cost + 1e-6
            if np.isfinite(cost):
                assert work.constant + excess(work, core) == pytest.approx(cost, abs=1e-6)
                assert list(used(work, core)) == pytest.approx(
                    [limit.used(choice) for limit in problem.limits]
                )


@settings(max_examples=100)
@given(selection_problems(decisions=5))
def test_no_single_decision_improves_a_local_optimum(problem):
    work = Reduction(problem)
    make_finite(work)
    start = dict.fromkeys(work.costs, 0)
    choice = local_optimum(work, start)
    cost = excess(work, choice)
    assert cost <= excess(work, start)
    for i, options in work.costs.items():
        assert all(excess(work, choice | {i: k}) >= cost - 1e-6 for k in range(len(options)))


@pytest.mark.parametrize("constant", [0.0, 1.0])
def test_local_search_ends_if_rounding_makes_costs_negative(constant):
    work = Reduction(SelectionProblem([np.zeros(2)] * 2, {(0, 1): np.zeros((2, 2))}))
    work.constant = constant
    for cost in work.costs.values():
        cost -= 1e-18
    assert local_optimum(work, {0: 1, 1: 0}) == {0: 1, 1: 0}


@settings(max_examples=100)
@given(selection_problems(decisions=5))
def test_options_of_optimal_choices_are_not_removed(problem):
    costs = {choice: problem.cost(choice) for choice in choices(problem)}
    best = min(costs.values())
    if np.isinf(best):
        return
    work = Reduction(problem)
    make_finite(work)
    order = sorted(work.costs)
    for _ in range(3):
        sweep(work, order, best + 1e-9)
        sweep(work, order[::-1], best + 1e-9)
    merge_equal_rows(work, best)
    for choice in (choice for choice, cost in costs.items() if cost == best):
        core = {i: list(work.options[i]).index(k) for i, k in enumerate(choice)}
        assert work.complete(core) == choice
        assert work.constant + excess(work, core) == pytest.approx(best, abs=1e-6)


def test_the_bound_of_a_chain_is_its_optimum():
    """The linear program of a tree has no gap, and one sweep along a chain solves its dual."""
    rng = np.random.default_rng(0)
    nodes = [rng.random(4) for _ in range(6)]
    chain = SelectionProblem(nodes, {(i, i + 1): rng.random((4, 4)) for i in range(5)})
    work = Reduction(chain)
    make_finite(work)
    sweep(work, range(6), np.inf)
    assert work.constant == pytest.approx(min(map(chain.cost, choices(chain))))


def test_options_with_equal_edge_costs_are_merged_after_sweeps():
    rng = np.random.default_rng(0)
    nodes = [rng.random(6) for _ in range(4)]
    kind_of_option = [0, 0, 1, 1, 2, 2]  # two equal options of each kind
    edges = {
        (i, j): rng.random((3, 3))[np.ix_(kind_of_option, kind_of_option)]
        for i in range(4)
        for j in range(i + 1, 4)
    }
    work = Reduction(SelectionProblem(nodes, edges))
    for _ in range(2):
        sweep(work, range(4), np.inf)
        sweep(work, range(3, -1, -1), np.inf)
    assert len(np.unique(work.edges[0][1], axis=0)) == 6
    merge_equal_rows(work, best=100.0)
    assert {
        len(np.unique(cost, axis=0)) for others in work.edges.values() for cost in others.values()
    } == {3}
