"""Faster forms of the rules of streams equal the rules applied operation by operation."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from simulator.engine.contended_effect import piecewise_effect
from simulator.engine.max_plus import max_plus_map
from simulator.engine.priced_ops import (
    Begin,
    Compute,
    End,
    PricedOps,
    contends,
    merge_kernels,
    price,
)
from simulator.engine.simulation import play
from simulator.engine.stream_rules import MeshStreams, added_seconds
from simulator.program import Program, Run
from simulator.work import OpList
from tests.simulator.bodies import Slowed, TwoLinks, bodies, flat

factors = st.floats(1, 2)
times = st.integers(0, 40).map(float)


def play_by_rules(
    ops: PricedOps, compute: float = 0.0, within: float = 0.0, between: float = 0.0
) -> tuple[float, float, float]:
    """Return when the streams become free after a task, given when they are free before it."""
    streams = MeshStreams(float)
    streams.compute = compute
    streams.free = {"within hosts": within, "between hosts": between}
    streams.play(ops)
    return streams.compute, streams.free["within hosts"], streams.free["between hosts"]


def engine(body: OpList, costs: TwoLinks) -> tuple[float, float, float]:
    program = Program(((0, 1),), ((Run(0, "F"),),), {"0F": body})
    (streams,), _ = play(program, costs)
    return streams.compute, streams.free["within hosts"], streams.free["between hosts"]


@given(flat, factors)
def test_the_engine_equals_the_rules_exactly(body: OpList, factor: float) -> None:
    costs = TwoLinks(factor)
    assert engine(body, costs) == play_by_rules(price(body, costs, (0, 1)))


@given(bodies, factors)
def test_the_engine_extrapolates_loops_that_the_rules_repeat(body: OpList, factor: float) -> None:
    costs = TwoLinks(factor)
    assert engine(body, costs) == pytest.approx(play_by_rules(price(body, costs, (0, 1))))


@given(bodies, factors, times, times, times)
def test_the_max_plus_map_of_a_task_without_contention_equals_the_rules(
    body: OpList, factor: float, compute: float, within: float, between: float
) -> None:
    ops = price(body, TwoLinks(factor), (0, 1))
    assume(not contends(ops))
    before = compute, within, between
    assert max_plus_map(ops).after(before) == pytest.approx(play_by_rules(ops, *before))


@given(bodies, factors, times, times)
def test_the_piecewise_effect_of_a_task_with_contention_equals_the_rules(
    body: OpList, factor: float, compute: float, lag: float
) -> None:
    ops = price(body, Slowed(factor), (0, 1))
    effect = piecewise_effect(ops)
    assert effect is not None
    after = play_by_rules(ops, compute, compute + lag)[:2]
    assert [compute + seconds for seconds in effect.at(lag)] == pytest.approx(after)


@given(bodies, factors, times)
def test_merged_kernels_equal_adjacent_kernels(body: OpList, factor: float, lag: float) -> None:
    ops = price(body, TwoLinks(factor), (0, 1))
    assert play_by_rules(merge_kernels(ops), 0, lag) == pytest.approx(play_by_rules(ops, 0, lag))


@given(times, times, factors)
def test_the_closed_form_of_a_transfer_beside_a_kernel_equals_the_rules(
    communication: float, compute: float, contention_factor: float
) -> None:
    ops = (
        Begin("gather", "within hosts", communication, contention_factor),
        Compute(compute),
        End("gather"),
    )
    after, _, _ = play_by_rules(ops)
    assert compute + added_seconds(communication, compute, contention_factor) == pytest.approx(
        after
    )


def test_an_endless_kernel_overlaps_with_the_whole_transfer() -> None:
    assert added_seconds(3, float("inf"), 1.5) == 1.5
