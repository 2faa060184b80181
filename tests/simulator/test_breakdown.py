"""Predictions split a step's seconds by phase, bubble and exposed communication."""

import json
from dataclasses import replace
from math import isnan

import pandas
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.costs.cost_model import CostModel
from simulator.engine.breakdown import predict
from simulator.engine.simulation import simulate
from simulator.hardware.cluster import Cluster
from simulator.memory import MemoryUse
from simulator.program import Program, Recv, Run, Send
from simulator.report.prediction_table import prediction_json
from simulator.work import Done, Kernel, Loop, Op, OpList, Start, TrainingPhase
from tests.simulator.bodies import (
    COSTS,
    Slowed,
    TwoLinks,
    compute,
    far,
    one_task,
    programs,
    start,
)

CLUSTER = Cluster.load("cpu-virtual")

PIPELINE = Program(
    meshes=((0, 1), (2, 3)),
    instructions=(
        (Run(0, "F"), Send("x", 1, 4), Recv("g", 1), Run(0, "B"), Run(0, "U")),
        (Recv("x", 0), Run(1, "F"), Run(1, "B"), Send("g", 0, 4), Run(1, "U")),
    ),
    bodies={
        "0F": (compute(1),),
        "0B": (compute(2),),
        "0U0": (compute(1),),
        "1F": (compute(3),),
        "1B": (start(2), compute(5), Done("gather"), start(4)),
        "1U0": (compute(1),),
    },
    memory=(MemoryUse(arguments=7, outputs=5, aliased=5, temporaries=2), MemoryUse(arguments=6)),
)


def test_the_breakdown_of_the_busiest_mesh_equals_values_by_hand() -> None:
    # Mesh 1 waits for its input, which is computed at 0-1 and sent at 1-3 (2 bytes from each
    # device). It runs F at 3-6, a gather at 6-8 beside B at 6-11, a gather at 11-15, a send at
    # 15-17 and U at 11-12. Mesh 0 runs B at 17-19 and U at 19-20. So mesh 1 ends computation at 12
    # and communication at 17, and the step ends at 20.
    prediction = predict(PIPELINE, CLUSTER, COSTS, model_flops=40, tokens=10)
    assert prediction.seconds == 20
    assert (
        prediction.forward,
        prediction.backward,
        prediction.update,
        prediction.unattributed,
    ) == (
        3,
        5,
        1,
        0,
    )
    assert prediction.exposed == {"all_gather": 3, "pipeline": 2}
    assert prediction.communication == {"all_gather": 6, "pipeline": 2}
    assert prediction.bubble == 3 + 3
    # Two devices of each mesh: 2 * (1 + 2 + 1 + 3 + 5 + 1).
    assert (prediction.hardware_flops, prediction.model_flops) == (26, 40)
    assert prediction.tokens_per_s == 0.5
    assert prediction.peak_flop_per_s == 4 * CLUSTER.device.peak_tflop_per_s["f32"] * 1e12
    assert prediction.memory.parts == {"arguments": 7, "outputs": 0, "temporaries": 2}
    assert prediction.memory.fits


def test_exposed_seconds_count_for_the_collective_that_is_waited_for() -> None:
    body = (compute(1), Loop(1000, (start(3), compute(1), Done("gather"))))
    prediction = predict(one_task(*body), CLUSTER, COSTS, dispatch=4)
    assert prediction.exposed == {"all_gather": pytest.approx(2000)}
    assert (prediction.unattributed, prediction.host) == (pytest.approx(1001), 4)


def test_communication_counts_for_its_mesh_axes_else_for_its_kind() -> None:
    along = {"x": start(3, "a"), "y": start(5, "b"), "x,y": start(7, "c"), "": start(11, "d")}
    ops = tuple(
        op for axis, collective_start in along.items() for op in _waited(collective_start, axis)
    )
    # The task waits for each collective right after its start, and 10 times more in the loop. The
    # send at the end outlasts all computation.
    rows = (Run(0, "S"), Send("v", 1, 2)), (Recv("v", 0),)
    prediction = predict(
        Program(((0, 1), (2, 3)), rows, {"0S": (compute(1), *ops, Loop(10, ops))}), CLUSTER, COSTS
    )
    assert prediction.exposed == prediction.communication
    assert prediction.communication == pytest.approx(
        {"x": 33, "y": 55, "x,y": 77, "all_gather": 121, "pipeline": 1}
    )


def test_collectives_under_contention_keep_their_axes() -> None:
    body = (*_waited(start(4), "x", compute(2)),)
    prediction = predict(one_task(*body), CLUSTER, Slowed(1.5))
    # the collective runs for 3 s beside the product and for 2 s more
    assert (prediction.communication, prediction.exposed) == ({"x": 5}, {"x": 2})


def _waited(collective_start: Start, axis: str, *meanwhile: Op) -> OpList:
    return (
        Start(replace(collective_start.collective, axis=axis)),
        *meanwhile,
        Done(collective_start.collective.name),
    )


def test_kernels_count_for_their_training_phase() -> None:
    parts: list[TrainingPhase] = ["forward", "recompute", "backward", "update", ""]
    body = tuple(replace(compute(2**k), phase=part) for k, part in enumerate(parts))
    prediction = predict(one_task(*body, Loop(10, body)), CLUSTER, COSTS)
    assert (
        prediction.forward,
        prediction.recompute,
        prediction.backward,
        prediction.update,
        prediction.unattributed,
    ) == (
        11,
        22,
        44,
        88,
        176,
    )
    inference = predict(one_task(*body[:2], *body[3:]), CLUSTER, COSTS)
    assert (inference.unattributed, inference.forward, inference.update) == (27, 0, 0)
    task = predict(Program(((0, 1),), ((Run(0, "B"),),), {"0B": body}), CLUSTER, COSTS)
    assert (task.backward, task.recompute) == (29, 2)


def test_predictions_are_rows_of_a_table() -> None:
    table = pandas.DataFrame(
        [predict(PIPELINE, CLUSTER, COSTS, tokens=10).row(), predict(PIPELINE, CLUSTER).row()]
    )
    assert table["seconds"][0] == table["p50"][0] == 20
    assert table["exposed pipeline"][0] == 2
    assert (table["allocated"] == 9).all()
    assert (table["reserved"] == 9 + 1e9 * CLUSTER.device.reserve_gb).all()
    assert table["fits"].all()
    assert (table["p10"] < table["seconds"]).all()


def test_quantities_that_a_program_lacks_are_nan() -> None:
    prediction = predict(Program(((0,),), ((Run(0, "S"),),), {"0S": ()}), CLUSTER, COSTS)
    assert isnan(prediction.model_flops)
    assert isnan(prediction.hardware_flops)
    with pytest.raises(ValueError, match="nothing is known of the memory"):
        assert prediction.memory.fits


@pytest.mark.parametrize("bodies", [{}, {"0S": ()}])
def test_an_empty_step_takes_no_time(bodies: dict[str, tuple[()]]) -> None:
    program = Program(((0,),), (tuple(Run(0, "S") for _ in bodies),), bodies)
    prediction = predict(program, CLUSTER, model_flops=1e9, tokens=10)
    assert (prediction.seconds, prediction.quantile(0.9)) == (0, 0)
    row = prediction.row()
    assert all(
        isnan(row[rate]) for rate in ("tokens_per_s", "tflop_per_s_per_device", "mfu", "hfu")
    )


def test_tokens_per_second_need_a_number_of_tokens() -> None:
    prediction = predict(PIPELINE, CLUSTER, COSTS)
    assert isnan(prediction.row()["tokens_per_s"])
    assert json.loads(prediction_json({"it": prediction}))["it"]["tokens_per_s"] is None


def test_a_program_without_meshes_is_refused() -> None:
    with pytest.raises(ValueError, match="a program without meshes; expected at least one"):
        predict(Program((), ()), CLUSTER)


def test_kernels_of_unknown_cost_are_counted_by_name() -> None:
    mystery = Kernel("r", "memory", 0, 32, unmodelled="frobnicate")
    body = (mystery, Loop(5, (mystery,)), Kernel("s", "memory", 0, 32))
    program = Program(((0,),), ((Run(0, "F"), Run(0, "F", 1)),), {"0F": body})
    prediction = predict(program, CLUSTER)
    assert prediction.unmodelled_kernels == {"frobnicate": 2 * 6}
    assert prediction.row()["unmodelled frobnicate"] == 12
    assert "12 x frobnicate: cost unknown" in str(simulate(program, CLUSTER, COSTS))


def test_concurrent_exposed_communication_on_two_links_counts_once() -> None:
    body = (
        compute(1),
        *(
            Start(replace(collective_start.collective, axis=axis))
            for collective_start, axis in ((start(6), "x"), (far(2), "y"))
        ),
    )
    prediction = predict(one_task(*body), CLUSTER, TwoLinks(1.0))
    assert (prediction.seconds, prediction.unattributed, prediction.bubble) == (
        7,
        1,
        pytest.approx(0),
    )
    assert prediction.communication == {"x": 6, "y": 2}
    assert prediction.exposed == pytest.approx({"x": 6 * 6 / 8, "y": 2 * 6 / 8})


@given(programs(), st.sampled_from([COSTS, TwoLinks(1.0), TwoLinks(1.5)]))
def test_the_parts_sum_up_to_the_step(program: Program, costs: CostModel) -> None:
    prediction = predict(program, CLUSTER, costs, dispatch=0.5)
    parts = (
        prediction.forward + prediction.bubble + prediction.host + sum(prediction.exposed.values())
    )
    assert parts == pytest.approx(prediction.seconds)
    assert prediction.seconds == simulate(program, CLUSTER, costs, dispatch=0.5).makespan
    assert prediction.bubble >= -1e-9
