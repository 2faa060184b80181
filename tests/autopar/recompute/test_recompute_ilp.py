"""The chosen recomputation, compared with all choices on small chains and DAGs."""

from dataclasses import replace
from itertools import product
from math import inf
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.recompute.recompute_ilp import cheapest_recomputation, least_memory
from autopar.recompute.recompute_problem import Choice, ForwardValue, RecomputeProblem


@st.composite
def problems(draw, most=6):
    """Draw a forward pass whose values a backward pass reads, most in reverse order."""
    count = draw(st.integers(1, most))
    values = []
    for number in range(count):
        sources = draw(st.sets(st.integers(0, number - 1), max_size=2)) if number else set()
        late = inf, -inf
        if draw(st.integers(0, 3)):
            first = draw(st.integers(2 * count - number - 1, 2 * count - 1))
            late = first, draw(st.integers(first, 2 * count - 1))
        until = draw(st.integers(number, count - 1))
        values.append(
            ForwardValue(
                num_bytes=draw(st.integers(1, 5)),
                seconds=draw(st.integers(1, 9)),
                made=number,
                until=until,
                late=late,
                sources=tuple(sorted(sources)),
                repeatable=draw(st.integers(0, 5)) > 0,
                host_seconds=draw(st.sampled_from((inf, 1, 4, 7))),
                sent=draw(st.integers(0, until + 3)),
            )
        )
    base = draw(st.lists(st.integers(0, 4), min_size=2 * count, max_size=2 * count))
    return RecomputeProblem(values, np.array(base, float))


def choices(problem):
    """Yield every choice of kept, recomputed and offloaded values, its seconds and peak bytes."""
    options = [
        [None] + ["repeated"] * repeatable + ["offloaded"] * offloadable
        for repeatable, offloadable in zip(problem.repeatable, problem.offloadable, strict=True)
    ]
    for states in product(*options):
        choice = Choice(
            frozenset(number for number, state in enumerate(states) if state == "repeated"),
            frozenset(number for number, state in enumerate(states) if state == "offloaded"),
        )
        yield problem.seconds(choice), problem.live_bytes(problem.read(choice)).max()


@given(problems(), st.floats(0, 1))
def test_the_chosen_values_to_recompute_and_offload_are_the_cheapest_that_fit(problem, share):
    found = sorted(choices(problem))
    peaks = [peak for _, peak in found]
    budget = min(peaks) + share * (max(peaks) - min(peaks))
    chosen = cheapest_recomputation(problem, budget)
    assert chosen is not None
    assert chosen.peak_bytes == problem.live_bytes(chosen.choice).max() <= budget
    assert chosen.seconds == min(seconds for seconds, peak in found if peak <= budget)


@given(problems())
def test_least_memory_is_the_least_of_all_choices(problem):
    least = min(peak for _, peak in choices(problem))
    assert least_memory(problem).peak_bytes == pytest.approx(least)
    assert cheapest_recomputation(problem, 0.99 * least - 1e-3) is None


def test_least_memory_of_a_chain_keeps_every_third_value():
    """Of nine values in a chain, 0, 3 and 6 are kept, and two copies are live at a time."""
    values = [
        ForwardValue(
            num_bytes=1.0,
            seconds=1.0,
            made=number,
            until=min(number + 1, 8),
            late=(17 - number, 17 - number),
            sources=(number - 1,) if number else (),
            repeatable=number > 0,
        )
        for number in range(9)
    ]
    problem = RecomputeProblem(values, np.zeros(18))
    assert problem.live_bytes(Choice()).max() == 9
    assert problem.live_bytes(Choice(frozenset({1, 2, 4, 5, 7, 8}))).max() == 5
    assert least_memory(problem).peak_bytes == 4
    chosen = cheapest_recomputation(problem, 5)
    assert chosen is not None
    assert chosen.seconds == 4


@given(problems())
def test_least_memory_without_time_recomputes_nothing(problem):
    with patch("autopar.recompute.recompute_ilp._Program.solve", return_value=(None, inf)):
        found = least_memory(problem)
    assert found.choice == Choice()
    assert found.peak_bytes == problem.live_bytes(Choice()).max(initial=0.0)


def test_an_offloaded_value_is_fetched_without_its_sources():
    """Value 1 could be computed again from 0 only if 0 stayed; in host memory it needs nothing."""
    value = ForwardValue(num_bytes=4.0, seconds=1.0, made=0, until=1, late=(6, 6))
    offloadable = replace(
        value, made=1, until=2, late=(5, 5), sources=(0,), host_seconds=3.0, sent=3
    )
    problem = RecomputeProblem([replace(value, repeatable=False), offloadable], np.zeros(7))
    choice = Choice(offloaded=frozenset({1}))
    assert problem.live_bytes(choice).tolist() == [4, 8, 8, 8, 4, 8, 4]
    assert problem.seconds(choice) == 3
    crowded = RecomputeProblem(problem.values, np.array([0, 0, 0, 0, 4, 0, 0], float))
    chosen = cheapest_recomputation(crowded, 8)
    assert chosen is not None
    assert chosen.choice == Choice(frozenset({1}))
    kept = RecomputeProblem(
        [problem.values[0], replace(offloadable, repeatable=False)], crowded.base
    )
    chosen = cheapest_recomputation(kept, 8)
    assert chosen is not None
    assert chosen.choice == choice
