"""Max-plus maps of tasks agree with the engine, and compose."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.engine.max_plus import MaxPlusMap, max_plus_map
from simulator.engine.priced_ops import price
from simulator.work import Done, Loop
from tests.simulator.bodies import COSTS, compute, start


def test_the_map_of_a_collective_beside_a_kernel_equals_values_by_hand() -> None:
    # The task computes for 1 s, gathers for 5 s once both streams are free, computes for 2 s beside
    # it, and waits for the gather.
    body = (compute(1), start(5), compute(2), Done("gather"))
    effect = max_plus_map(price(body, COSTS, (0, 1)))
    assert effect == MaxPlusMap(compute=(6, 5, -inf), within=(6, 5, -inf))


def test_an_empty_task_is_the_identity() -> None:
    assert max_plus_map(()) == MaxPlusMap() == MaxPlusMap.task(0)
    assert MaxPlusMap.transfer(0).then(MaxPlusMap.transfer(2)) == MaxPlusMap(between=(2, -inf, 2))
    assert MaxPlusMap().compute == (0, -inf, -inf)


entries = st.integers(-9, 9).map(float) | st.just(-inf)
rows = st.tuples(entries, entries, entries)
effects = st.builds(MaxPlusMap, rows, rows, rows)


@given(effects, effects, effects)
def test_composition_is_associative(one: MaxPlusMap, two: MaxPlusMap, three: MaxPlusMap) -> None:
    assert one.then(two).then(three) == one.then(two.then(three))
    assert one.then(MaxPlusMap()) == one == MaxPlusMap().then(one)


@given(effects, st.integers(0, 9))
def test_the_power_of_a_map_is_repeated_composition(effect: MaxPlusMap, count: int) -> None:
    repeated = MaxPlusMap()
    for _ in range(count):
        repeated = repeated.then(effect)
    assert effect.times(count) == repeated


def test_waiting_for_a_collective_of_another_task_is_refused() -> None:
    with pytest.raises(
        ValueError, match="waits for collective 'gather', which the same task has not started"
    ):
        max_plus_map(price((start(1), Loop(3, (Done("gather"),))), COSTS, (0, 1)))
