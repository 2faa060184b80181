"""Message passing keeps the cost of every choice, bounds it and drops no optimal option."""

from itertools import product
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.sharding.equal_costs import make_finite, merge_equal_rows, price, used
from autopar.sharding.message_passing import MessagePassing
from autopar.sharding.presolve import Reduction
from autopar.sharding.selection_problem import SelectionProblem
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


def excess(work, choice):
    """Return the cost of a choice above the constant of the reduction."""
    nodes = sum(float(work.costs[i][k]) for i, k in choice.items())
    return nodes + sum(
        float(cost[choice[i], choice[j]])
        for i, others in work.edges.items()
        for j, cost in others.items()
        if i < j
    )


def finite(problem):
    work = Reduction(problem)
    make_finite(work)
    return work


def swept(work, best=np.inf, times=1):
    """Sweep forward and backward, and return the last choice."""
    passing = MessagePassing(work)
    choices = [passing.sweep(forward, best) for forward in (True, False) * times]
    passing.write_back()
    return passing.numbered(choices[-1])


def sweep_one_by_one(work, order):
    """Sequential TRW-S as Kolmogorov states it, on matrices; return the choice."""
    choice = {}
    for i in order:
        cost, edges = work.costs[i], work.edges[i]
        gathered = {j: pairs.min(axis=1) for j, pairs in edges.items()}
        for least in gathered.values():
            cost += least
        work.constant += cost.min()
        cost -= cost.min()
        later = sum(j not in choice for j in edges)
        share = cost / max(later, len(edges) - later, 1)
        answer = cost.copy()
        for j, pairs in edges.items():
            pairs -= gathered[j][:, None]
            if j in choice:
                answer += pairs[:, choice[j]]
            else:
                pairs += share[:, None]
        cost -= share * later
        choice[i] = int(answer.argmin())
    return choice


def repeated_layers(layers=4, options=(6, 4), classes=3):
    """Return a chain of equal layers; each has a decision beside the chain, and a skip over it."""
    rng = np.random.default_rng(0)
    kinds = [rng.integers(classes, size=n) for n in options]
    matrices = [
        rng.random((classes, classes))[np.ix_(kinds[a], kinds[b])]
        for a, b in ((0, 0), (0, 1), (1, 1))
    ]
    nodes = [rng.random(n) for n in options] * layers
    edges = {}
    for i in range(0, 2 * layers, 2):
        edges[i, i + 1] = matrices[1]
        if i + 2 < 2 * layers:
            edges[i, i + 2], edges[i + 1, i + 3] = matrices[0], matrices[2]
    return SelectionProblem(nodes, edges)


@pytest.mark.parametrize("by_classes", [False, True])
def test_levels_give_the_bounds_and_choices_of_one_decision_after_another(by_classes):
    problem = repeated_layers()
    alone, together = finite(problem), finite(problem)
    with patch("autopar.sharding.message_passing._LARGE_EDGE", 0 if by_classes else 1000):
        passing = MessagePassing(together)
    order = sorted(alone.costs)
    for forward in (True, False, True, False):
        expected = sweep_one_by_one(alone, order if forward else order[::-1])
        chosen = passing.sweep(forward, np.inf)
        assert passing.numbered(chosen) == expected
        assert passing.constant == pytest.approx(alone.constant)
        assert passing.cost(chosen) == pytest.approx(alone.constant + excess(alone, expected))
    passing.write_back()
    for i, cost in alone.costs.items():
        assert together.costs[i] == pytest.approx(cost, abs=1e-12)
        for j, pairs in alone.edges[i].items():
            assert together.edges[i][j] == pytest.approx(pairs, abs=1e-12)


def test_a_sweep_takes_as_many_calls_for_wider_layers():
    """Decisions beside one another are visited together."""

    def calls(width):
        rng = np.random.default_rng(0)
        nodes = [rng.random(3) for _ in range(1 + 2 * width)]
        edges = {(0, k): rng.random((3, 3)) for k in range(1, 1 + width)}
        edges |= {(k, k + width): rng.random((3, 3)) for k in range(1, 1 + width)}
        passing = MessagePassing(finite(SelectionProblem(nodes, edges)))
        with patch.object(np, "bincount", wraps=np.bincount) as bincount:
            passing.sweep(True, np.inf)
        return bincount.call_count

    assert calls(1) == calls(20)


@settings(max_examples=100)
@given(selection_problems(decisions=5), st.floats(0, 3), st.booleans())
def test_sweeps_and_prices_preserve_costs_and_give_a_lower_bound(problem, amount, by_classes):
    work = finite(problem)
    prices = np.full(len(problem.limits), amount)
    price(work, prices)
    for _ in range(2):
        with patch("autopar.sharding.message_passing._LARGE_EDGE", 0 if by_classes else 1000):
            marginals = swept(work)
        assert set(marginals) == set(work.costs)
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
    work = finite(problem)
    passing = MessagePassing(work)
    start = np.zeros(len(passing.numbers), int)
    choice = passing.numbered(passing.local_optimum(start))
    cost = excess(work, choice)
    assert cost <= excess(work, passing.numbered(start))
    assert passing.cost(start) == pytest.approx(
        work.constant + excess(work, passing.numbered(start))
    )
    for i, options in work.costs.items():
        assert all(excess(work, choice | {i: k}) >= cost - 1e-6 for k in range(len(options)))


@pytest.mark.parametrize("constant", [0.0, 1.0])
def test_local_search_ends_if_rounding_makes_costs_negative(constant):
    work = Reduction(SelectionProblem([np.zeros(2)] * 2, {(0, 1): np.zeros((2, 2))}))
    work.constant = constant
    for cost in work.costs.values():
        cost -= 1e-18
    assert list(MessagePassing(work).local_optimum(np.array([1, 0]))) == [1, 0]


@settings(max_examples=100)
@given(selection_problems(decisions=5), st.booleans())
def test_options_of_optimal_choices_are_not_removed(problem, by_classes):
    costs = {choice: problem.cost(choice) for choice in choices(problem)}
    best = min(costs.values())
    if np.isinf(best):
        return
    work = finite(problem)
    with patch("autopar.sharding.message_passing._LARGE_EDGE", 0 if by_classes else 1000):
        swept(work, best + 1e-9, times=3)
        swept(work, best + 1e-9)
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
    passing = MessagePassing(finite(chain))
    passing.sweep(True, np.inf)
    assert passing.constant == pytest.approx(min(map(chain.cost, choices(chain))))


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
    swept(work, times=2)
    assert len(np.unique(work.edges[3][0], axis=0)) == 6
    merge_equal_rows(work, best=100.0)
    assert {
        len(np.unique(cost, axis=0)) for others in work.edges.values() for cost in others.values()
    } == {3}
