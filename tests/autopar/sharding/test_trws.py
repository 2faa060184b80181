"""Moving costs changes no choice's cost; bounds hold for every choice, and nothing that is dropped was needed."""

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
from tests.generators import choice_problems


def choices(problem):
    return product(*(range(len(cost)) for cost in problem.nodes))


def priced(problem, prices):
    """What each choice costs with what it uses above limits at a price."""
    over = {
        c: np.array([limit.used(c) - limit.bound for limit in problem.limits])
        for c in choices(problem)
    }
    return {c: problem.cost(c) + float(prices @ over[c]) for c in over}


@settings(max_examples=100)
@given(choice_problems(decisions=5), st.floats(0, 3))
def test_sweeps_and_prices_keep_every_cost_and_bound_all(problem, amount):
    work = Reduction(problem)
    make_finite(work)
    prices = np.full(len(problem.limits), amount)
    price(work, prices)
    order = sorted(work.costs)
    for numbers in (order, order[::-1]):
        found = sweep(work, numbers, np.inf)
        assert set(found) == set(order)
        for choice, cost in priced(problem, prices).items():
            core = dict(enumerate(choice))
            assert work.constant <= cost + 1e-6
            if np.isfinite(cost):
                assert work.constant + excess(work, core) == pytest.approx(cost, abs=1e-6)
                assert list(used(work, core)) == pytest.approx(
                    [limit.used(choice) for limit in problem.limits]
                )


@settings(max_examples=100)
@given(choice_problems(decisions=5))
def test_no_decision_alone_betters_a_choice_that_has_settled(problem):
    work = Reduction(problem)
    make_finite(work)
    chosen = dict.fromkeys(work.costs, 0)
    choice = local_optimum(work, chosen)
    cost = excess(work, choice)
    assert cost <= excess(work, chosen)
    for i, options in work.costs.items():
        assert all(excess(work, choice | {i: k}) >= cost - 1e-6 for k in range(len(options)))


@pytest.mark.parametrize("constant", [0.0, 1.0])
def test_settling_ends_where_rounding_has_left_less_than_nothing(constant):
    work = Reduction(SelectionProblem([np.zeros(2)] * 2, {(0, 1): np.zeros((2, 2))}))
    work.constant = constant
    for cost in work.costs.values():
        cost -= 1e-18
    assert local_optimum(work, {0: 1, 1: 0}) == {0: 1, 1: 0}


@settings(max_examples=100)
@given(choice_problems(decisions=5))
def test_options_of_the_cheapest_choices_survive(problem):
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


def test_options_that_an_edge_does_not_tell_apart_are_alike_again_after_sweeps():
    rng = np.random.default_rng(0)
    nodes = [rng.random(6) for _ in range(4)]
    alike = [0, 0, 1, 1, 2, 2]  # two options of each kind
    edges = {
        (i, j): rng.random((3, 3))[np.ix_(alike, alike)] for i in range(4) for j in range(i + 1, 4)
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
