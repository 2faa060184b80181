from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.effect import Effect, effect_of
from simulator.work import Done, Loop
from tests.simulator.bodies import COSTS, compute, start


def test_a_collective_beside_a_kernel_by_hand() -> None:
    # computes 1; gathers for 5 when both streams are free; computes 2 meanwhile, then waits for the gather
    effect = effect_of((compute(1), start(5), compute(2), Done("gather")), COSTS, (0, 1))
    assert effect == Effect(compute=(6, 5, -inf), within=(6, 5, -inf))


def test_nothing_has_no_effect() -> None:
    assert effect_of((), COSTS, (0,)) == Effect() == Effect.task(0)
    assert Effect.transfer(0).then(Effect.transfer(2)) == Effect(between=(2, -inf, 2))
    assert Effect().compute == (0, -inf, -inf)


entries = st.integers(-9, 9).map(float) | st.just(-inf)
rows = st.tuples(entries, entries, entries)
effects = st.builds(Effect, rows, rows, rows)


@given(effects, effects, effects)
def test_effects_follow_one_another_in_any_grouping(one: Effect, two: Effect, three: Effect) -> None:
    assert one.then(two).then(three) == one.then(two.then(three))
    assert one.then(Effect()) == one == Effect().then(one)


@given(effects, st.integers(0, 9))
def test_a_loop_is_its_body_again_and_again(effect: Effect, count: int) -> None:
    repeated = Effect()
    for _ in range(count):
        repeated = repeated.then(effect)
    assert effect.times(count) == repeated


def test_what_another_turn_started_is_not_waited_for() -> None:
    with pytest.raises(ValueError, match="waits for collective 'gather', which the same task has not started"):
        effect_of((start(1), Loop(3, (Done("gather"),))), COSTS, (0, 1))
