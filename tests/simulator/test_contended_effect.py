"""The effect of a task under contention is a piecewise-linear function of the lag."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.engine.clock import Clock
from simulator.engine.contended_effect import PiecewiseEffect, piecewise_effect
from simulator.engine.priced_ops import price
from simulator.engine.simulation import play
from simulator.program import Program, Recv, Run, Send
from simulator.work import Collective, Done, Kernel, Loop, OpList, Start
from tests.simulator.bodies import compute, start
from tests.simulator.test_laws import FAR, NEAR, Hardware, makespan, overlapping

MANY = [Start(Collective(f"g{n}", "all_gather", 1, (NEAR, FAR)[n % 2])) for n in range(600)]
SLOWED = Hardware(factor=dict.fromkeys((NEAR, FAR), 1.5))


def test_the_effect_of_a_gather_beside_a_product_equals_values_by_hand() -> None:
    # The task computes for 1 s and gathers 8 bytes beside a product of 2 s, which takes 3 s. Then
    # 6 bytes are left, so it ends after 10 s. From a lag of 1 s on the gather starts later, from a
    # lag of 3 s on it starts after the product.
    body = (compute(1), start(4), compute(2), Done("gather"))
    assert piecewise_effect(price(body, SLOWED, (0, 1))) == PiecewiseEffect(
        ((0, 10.0, 10.0, 0, 0), (1, 10.0, 10.0, 0.5, 0.5), (3, 11.0, 11.0, 1, 1))
    )


@st.composite
def waiting(draw: st.DrawFn) -> OpList:
    """Draw collectives beside kernels, some in loops; the body waits for each collective."""
    body = draw(overlapping())
    running = {op.collective.name for op in body if isinstance(op, Start)} - {
        op.name for op in body if isinstance(op, Done)
    }
    body = (*body, *map(Done, draw(st.permutations(sorted(running)))))
    count = draw(st.integers(0, 5))
    return (
        start(draw(st.integers(0, 9)), "outer"),
        Loop(count, body),
        compute(2),
        Done("outer"),
        *body,
    )


factors = st.fixed_dictionaries(dict.fromkeys((NEAR, FAR), st.floats(1, 2)))


@given(waiting(), factors, st.integers(0, 40))
def test_the_effect_at_a_lag_equals_the_engine_after_a_send(
    body: OpList, factor: dict, lag: int
) -> None:
    costs = Hardware(factor=factor)
    rows = ((Send("x", 1, 2 * lag), Run(0, "F")), (Recv("x", 0),))
    program = Program(((0, 1), (2, 3)), rows, {"0F": body})
    streams = play(program, costs)[0][0]
    lagged = piecewise_effect(price(body, costs, (0, 1)))
    assert lagged is not None
    assert lagged.at(lag) == pytest.approx((streams.compute, streams.free["within hosts"]))


@given(st.lists(waiting(), min_size=3, max_size=3), factors, st.sampled_from([0.0, 0.5]), st.data())
def test_the_clock_plays_tasks_with_piecewise_effects_without_the_engine(
    bodies: list[OpList], factor: dict, dispatch: float, data: st.DataObject
) -> None:
    rows = [[], []]
    for n, (mesh, size) in enumerate(
        data.draw(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 20)), max_size=8))
    ):
        rows[mesh] += [Run(n % 3, "F", n), Send(f"v{n}", 1 - mesh, size)]
        rows[1 - mesh].append(Recv(f"v{n}", mesh))
    program = Program(
        ((0, 1), (2, 3)), tuple(map(tuple, rows)), {f"{i}F": body for i, body in enumerate(bodies)}
    )
    costs, clock = Hardware(factor=factor), Clock.of(program)
    assert clock.makespan(costs, dispatch) == pytest.approx(makespan(program, costs, dispatch))
    (cached,) = clock.cached
    assert cached.costs is costs
    assert cached.table is not None


def test_a_loop_is_extrapolated_from_equal_iterations() -> None:
    iteration = (start(4), compute(2), Done("gather"))
    long, short = (
        piecewise_effect(price((Loop(count, iteration),), SLOWED, (0, 1))) for count in (10**9, 10)
    )
    assert long is not None
    assert short is not None
    assert long.at(3)[0] - short.at(3)[0] == pytest.approx((10**9 - 10) * 9)


@pytest.mark.parametrize(
    "body",
    [
        (start(4), compute(2)),
        (start(4), Loop(2, (Done("gather"),))),
        (start(4), start(4), Done("gather")),
        (*MANY, compute(600), *(Done(op.collective.name) for op in MANY)),
    ],
    ids=["not waited for", "in a loop", "twice", "of many pieces"],
)
def test_tasks_with_pending_collectives_or_too_many_pieces_have_no_piecewise_effect(
    body: OpList,
) -> None:
    costs = Hardware(factor={NEAR: 1.2, FAR: 1.5})
    assert piecewise_effect(price(body, costs, (0, 1))) is None


@pytest.mark.parametrize("last", [Done("gather"), compute(1)], ids=["pieces", "not waited for"])
def test_the_clock_uses_the_engine_for_tasks_without_a_piecewise_effect(
    last: Done | Kernel,
) -> None:
    costs = Hardware(factor={NEAR: 1.2, FAR: 1.5})
    body = (*MANY, start(3), compute(600), *(Done(op.collective.name) for op in MANY), last)
    program = Program(((0, 1),), ((Run(0, "F"),),), {"0F": body})
    assert Clock.of(program).makespan(costs) == makespan(program, costs)


def test_effects_are_recomputed_for_other_costs() -> None:
    program = Program(((0, 1),), ((Run(0, "F"),),), {"0F": (start(4), compute(2), Done("gather"))})
    clock = Clock.of(program)
    assert [clock.makespan(Hardware(factor={NEAR: factor})) for factor in (1.0, 1.5, 1.0)] == [
        8,
        9,
        8,
    ]
