"""Max-plus maps of tasks agree with the engine, and compose."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.engine.max_plus import MaxPlusMap, max_plus_map
from simulator.engine.priced_ops import price
from simulator.work import Done, Loop
from tests.simulator.bodies import COSTS, compute, start


def test_a_collective_beside_a_kernel_by_hand() -> None:
    # The task computes for 1 s, gathers for 5 s once both streams are free, computes for 2 s beside
    # it, and waits for the gather.
    body = (compute(1), start(5), compute(2), Done("gather"))
    effect = max_plus_map(price(body, COSTS, (0, 1)))
    assert effect == MaxPlusMap(compute=(6, 5, -inf), within=(6, 5, -inf))


def test_nothing_has_no_effect() -> None:
    assert max_plus_map(()) == MaxPlusMap() == MaxPlusMap.task(0)
    assert MaxPlusMap.transfer(0).then(MaxPlusMap.transfer(2)) == MaxPlusMap(between=(2, -inf, 2))
    assert MaxPlusMap().compute == (0, -inf, -inf)


entries = st.integers(-9, 9).map(float) | st.just(-inf)
rows = st.tuples(entries, entries, entries)
effects = st.builds(MaxPlusMap, rows, rows, rows)


@given(effects, effects, effects)
def test_effects_follow_one_another_in_any_grouping(
    one: MaxPlusMap, two: MaxPlusMap, three: MaxPlusMap
) -> None:
    assert one.then(two).then(three) == one.then(two.then(three))
    assert one.then(MaxPlusMap()) == one == MaxPlusMap().then(one)


@given(effects, st.integers(0, 9))
def test_a_loop_is_its_body_again_and_again(effect: MaxPlusMap, count: int) -> None:
    repeated = MaxPlusMap()
    for _ in range(count):
        repeated = repeated.then(effect)
    assert effect.times(count) == repeated


def test_what_another_turn_started_is_not_waited_for() -> None:
    with pytest.raises(
        ValueError, match="waits for collective 'gather', which the same task has not started"
    ):
        max_plus_map(price((start(1), Loop(3, (Done("gather"),))), COSTS, (0, 1)))
