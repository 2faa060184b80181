"""Seconds from compiled HLO to a timeline, and of a long pipeline on the fast clock."""

import pytest

import autopar
from autopar.lower import compile_program
from autopar.pipeline.schedules import Pipeline, make_schedule
from autopar.trace import trace
from experiments.models import build_model
from simulator.cluster import Cluster
from simulator.engine import simulate
from simulator.hlo import parse_hlo
from simulator.program import Phase

CLUSTER = Cluster.load("p3.16xlarge")


@pytest.fixture(scope="module")
def program():
    model = build_model("mlp", {"dim": 2048, "num_layers": 10, "batch_size": 2048})
    args = model.abstract_args()
    plan = autopar.plan_step(model.train_step, args, cluster=CLUSTER, mesh_shape=(8,))
    return compile_program(trace(model.train_step, args, (1,)), plan, CLUSTER)[0]


@pytest.mark.benchmark(group="simulate")
def test_simulate(benchmark, program):
    benchmark(simulate, program, CLUSTER)


@pytest.mark.benchmark(group="simulate")
@pytest.mark.parametrize("name", ["1f1b", "zero_bubble_h1"])
def test_a_pipeline_of_64_stages_and_512_microbatches(benchmark, name):
    """Once the schedule is turned into arrays; target: 2 ms."""
    schedule = make_schedule(name, Pipeline(64, 512))
    seconds: dict[Phase, float] = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0, "U": 1.0}
    schedule.makespan(seconds)  # compiles
    makespan = benchmark(schedule.makespan, seconds, lambda source, to: 0.1)
    assert makespan > 512 * 3


@pytest.mark.benchmark(group="compiled programs")
def test_reading_a_program_of_10000_instructions(benchmark):
    lines = [
        f"  %n{i} = f32[4]{{0}} negate(%{f'n{i - 1}' if i else 'p'}), metadata={{{'x' * 500}}}" for i in range(10_000)
    ]
    text = "\n".join(["HloModule m", "ENTRY %main {", "  %p = f32[4]{0} parameter(0)", *lines, "}"])
    assert len(benchmark.pedantic(parse_hlo, (text,), rounds=3)) == 10_000
