"""The rules of streams, in their plainest form, and the faster forms of them."""

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


def played(
    ops: PricedOps, compute: float = 0.0, within: float = 0.0, between: float = 0.0
) -> tuple[float, float, float]:
    """When the streams are free after a task that begins when they are free at these times."""
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
def test_the_engine_plays_by_the_rules_to_the_last_digit(body: OpList, factor: float) -> None:
    costs = TwoLinks(factor)
    assert engine(body, costs) == played(price(body, costs, (0, 1)))


@given(bodies, factors)
def test_the_engine_skips_iterations_that_the_rules_repeat(body: OpList, factor: float) -> None:
    costs = TwoLinks(factor)
    assert engine(body, costs) == pytest.approx(played(price(body, costs, (0, 1))))


@given(bodies, factors, times, times, times)
def test_a_task_that_does_not_contend_is_its_max_plus_map(
    body: OpList, factor: float, compute: float, within: float, between: float
) -> None:
    ops = price(body, TwoLinks(factor), (0, 1))
    assume(not contends(ops))
    before = compute, within, between
    assert max_plus_map(ops).after(before) == pytest.approx(played(ops, *before))


@given(bodies, factors, times, times)
def test_a_task_that_contends_is_its_piecewise_effect(
    body: OpList, factor: float, compute: float, lag: float
) -> None:
    ops = price(body, Slowed(factor), (0, 1))
    effect = piecewise_effect(ops)
    assert effect is not None
    after = played(ops, compute, compute + lag)[:2]
    assert [compute + seconds for seconds in effect.at(lag)] == pytest.approx(after)


@given(bodies, factors, times)
def test_adjacent_kernels_are_as_good_as_one(body: OpList, factor: float, lag: float) -> None:
    ops = price(body, TwoLinks(factor), (0, 1))
    assert played(merge_kernels(ops), 0, lag) == pytest.approx(played(ops, 0, lag))


@given(times, times, factors)
def test_the_closed_form_is_a_transfer_beside_a_kernel(
    communication: float, compute: float, contention_factor: float
) -> None:
    ops = (
        Begin("gather", "within hosts", communication, contention_factor),
        Compute(compute),
        End("gather"),
    )
    after, _, _ = played(ops)
    assert compute + added_seconds(communication, compute, contention_factor) == pytest.approx(
        after
    )


def test_a_kernel_without_end_hides_any_transfer() -> None:
    assert added_seconds(3, float("inf"), 1.5) == 1.5
