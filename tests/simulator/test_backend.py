"""Kernels and collectives wait for the host, which launches them one after another."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from simulator import BACKENDS, Backend, Cluster, predict, save_program, simulate
from simulator.backend import CUDA_GRAPH, EAGER, JITTED
from simulator.cli import app
from simulator.program import Program
from simulator.work import Done, Gemm, Kernel, Loop, OpList
from tests.simulator.bodies import COSTS, bodies, compute, one_task, programs, start, unrolled

CLUSTER = Cluster.load("cpu-virtual")
# 1 s for a kernel, 2 s for a step, 3 s for an instruction
SLOW = Backend("slow", kernel_us=1e6, step_us=2e6, update_bytes=0, instruction_us=3e6)
NOTHING = Backend("nothing", 0, 0, 0)


def test_a_kernel_starts_after_its_launch_by_the_host() -> None:
    # The host prepares the step from 0 to 2 s and the task from 2 to 5 s; its launches end at 6, 7
    # and 8 s. Kernels run in order at 6-10, 10-10.5 and 10.5-10.75 s.
    timeline = simulate(
        one_task(compute(4, "a"), compute(0.5, "b"), compute(0.25, "c")),
        CLUSTER,
        COSTS,
        backend=SLOW,
    )
    assert {s.name: (s.start, s.end) for s in timeline.spans if s.category == "gemm"} == {
        "a": (6, 10),
        "b": (10, 10.5),
        "c": (10.5, 10.75),
    }
    assert timeline.seconds_by_category(0)["host"] == 6
    assert [(s.name, s.start, s.end) for s in timeline.spans if s.stream == "host"] == [
        ("step", 0, 2),
        ("0S0", 2, 5),
        ("0S0", 5, 8),
    ]


def test_short_kernels_run_at_the_rate_of_host_launches() -> None:
    prediction = predict(one_task(*[compute(0.25)] * 100), CLUSTER, COSTS, backend=SLOW)
    assert prediction.seconds == pytest.approx(5 + 100 + 0.25)
    assert (prediction.host, prediction.unattributed) == (
        pytest.approx(5 + 100 - 99 * 0.25),
        pytest.approx(25),
    )


def test_a_collective_starts_after_its_launch() -> None:
    timeline = simulate(
        one_task(compute(0.5), start(3), Done("gather")), CLUSTER, COSTS, backend=SLOW
    )
    assert {s.name: (s.start, s.end) for s in timeline.spans if s.stream == "communication"} == {
        "gather": (7, 10)
    }


def test_devices_catch_up_with_the_host_within_a_loop() -> None:
    # A kernel of 20 s puts the host 20 s ahead at 6 s. A launch takes 1 s and its kernel 0.5 s, so
    # the devices catch up after some 40 iterations.
    body = (compute(20), Loop(100, (compute(0.5),)))
    looped, plain = (
        simulate(one_task(*ops), CLUSTER, COSTS, backend=SLOW).makespan
        for ops in (body, unrolled(body))
    )
    assert looped == pytest.approx(plain) == pytest.approx(5 + 101 + 0.5)


hosts = st.builds(
    lambda kernel, step, instruction: Backend(
        "some", kernel * 1e6, step * 1e6, 0, instruction_us=instruction * 1e6
    ),
    *[st.sampled_from([0, 0.5, 2, 7])] * 3,
)


@given(bodies, hosts)
def test_a_loop_takes_as_long_as_its_iterations(body: OpList, backend: Backend) -> None:
    looped, plain = (
        simulate(one_task(*ops), CLUSTER, COSTS, backend=backend) for ops in (body, unrolled(body))
    )
    assert looped.makespan == pytest.approx(plain.makespan)


@given(programs(), hosts)
def test_the_parts_sum_up_to_the_step(program: Program, backend: Backend) -> None:
    prediction = predict(program, CLUSTER, COSTS, backend=backend)
    assert prediction.seconds == pytest.approx(
        prediction.forward + prediction.bubble + prediction.host + sum(prediction.exposed.values())
    )
    assert prediction.seconds >= simulate(program, CLUSTER, COSTS).makespan - 1e-9
    slower = replace(backend, kernel_us=backend.kernel_us + 1e6)
    assert simulate(program, CLUSTER, COSTS, backend=slower).makespan >= prediction.seconds - 1e-9


@given(programs())
def test_a_backend_without_costs_changes_nothing(program: Program) -> None:
    assert (
        simulate(program, CLUSTER, COSTS, backend=NOTHING).makespan
        == simulate(program, CLUSTER, COSTS).makespan
    )


def test_dispatch_and_a_backend_together_are_refused() -> None:
    with pytest.raises(ValueError, match=r"dispatch=0.5 and backend 'slow'; expected one of them"):
        simulate(one_task(), CLUSTER, COSTS, dispatch=0.5, backend=SLOW)


SMALL = one_task(*[Kernel("dot", "gemm", 2 * 256**3, 3e5, "bf16", Gemm(256, 256, 256))] * 200)


def test_only_an_eager_host_is_slower_than_small_kernels() -> None:
    h100 = Cluster.load("dgx_h100")
    without_backend = predict(SMALL, h100).seconds
    eager, jitted, graph = (
        predict(SMALL, h100, backend=backend) for backend in (EAGER, JITTED, CUDA_GRAPH)
    )
    assert eager.host > 0.8 * eager.seconds
    assert eager.seconds == pytest.approx(1e-6 * (5.1e3 + 54.4 + 200 * 54.4), rel=0.01)
    assert jitted.seconds == pytest.approx(without_backend + jitted.host)
    assert without_backend < graph.seconds < jitted.seconds < eager.seconds


def test_the_command_line_takes_a_backend(tmp_path: Path) -> None:
    save_program(SMALL, tmp_path / "step.json")

    def row(*options: str) -> dict[str, float]:
        result = CliRunner().invoke(
            app, ["simulate", str(tmp_path / "step.json"), "--json", *options]
        )
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)["dgx_a100_80"]

    assert row()["host"] == 0
    assert row("--backend", "eager")["host"] > row("--backend", "jitted")["host"] > 0
    assert list(BACKENDS) == [
        "eager",
        "megatron-core",
        "megatron-graphs",
        "jitted",
        "cuda-graph",
        "zero-2021",
    ]
    unknown = CliRunner().invoke(
        app, ["simulate", str(tmp_path / "step.json"), "--backend", "lazy"], env={"COLUMNS": "300"}
    )
    assert unknown.exit_code == 2
    assert (
        "unknown backend 'lazy'; expected one of eager, megatron-core, megatron-graphs, jitted,"
        " cuda-graph, zero-2021" in unknown.output
    )
