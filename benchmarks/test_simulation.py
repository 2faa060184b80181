"""Seconds of predictions: compiled programs, clocks of pipelines, scenarios of transformers.

Targets on one core: 2 ms for a pipeline of 64 stages and 512 microbatches at known costs, 5 ms for
GPT-175B on 1024 GPUs whatever the data parallelism, 1000 predictions of scenarios a second.
"""

import timeit
from dataclasses import replace
from itertools import product

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

import autopar
from autopar.pipeline.pipeline_schedules import make_schedule
from autopar.pipeline.schedule_kinds import Pipeline
from experiments.models import build_model
from simulator.costs.cost_model import ClusterCosts
from simulator.engine.clock import Clock
from simulator.engine.prediction import Prediction
from simulator.engine.simulation import simulate
from simulator.hardware.cluster import Cluster
from simulator.hlo import parse_hlo
from simulator.program import Program, Run, Send
from simulator.transformer import Execution, Machine, Transformer, predict
from simulator.work import Collective, Done, Gemm, Kernel, OpList, Start

CLUSTER = Cluster.load("p3.16xlarge")
DGX = Cluster.load("dgx_a100_80").with_size(64)
GPT = Transformer(layers=96, hidden=12288, heads=96, seq=2048, vocab=51200)


@pytest.fixture(scope="module")
def program():
    model = build_model("mlp", {"dim": 2048, "num_layers": 10, "batch_size": 2048})
    args = model.abstract_args()
    plan = autopar.plan_step(model.train_step, args, cluster=CLUSTER, mesh_shape=(8,))
    return autopar.compile_step(model.train_step, args, plan, CLUSTER, donate_argnums=())


@pytest.mark.benchmark(group="simulate")
def test_simulate(benchmark, program):
    benchmark(simulate, program, CLUSTER)


def pipeline_on_hosts(name: str, stages: int, micro_batches: int) -> Program:
    """Return a pipeline with a stage on each host of a DGX cluster; messages have 10 MB."""
    schedule = make_schedule(name, Pipeline(stages, micro_batches)).program()
    rows = tuple(
        tuple(
            replace(instruction, num_bytes=1e7) if isinstance(instruction, Send) else instruction
            for instruction in row
        )
        for row in schedule.instructions
    )
    meshes = tuple(tuple(range(8 * mesh, 8 * mesh + 8)) for mesh in range(stages))
    phases = {run.task: run.phase for row in rows for run in row if isinstance(run, Run)}
    bodies = {task: task_body(2 if phase == "B" else 1) for task, phase in phases.items()}
    return Program(meshes, rows, bodies)


def task_body(times: int) -> OpList:
    """Return 20 products and two all_reduces, each of which overlaps with two of the products."""
    sizes = Gemm(2048 * times, 1024, 4096)
    products: OpList = tuple(
        Kernel(f"k{n}", "gemm", sizes.flops, 4e7, "bf16", sizes) for n in range(10)
    )
    reduce = Collective("sum", "all_reduce", 2 * 2048 * 4096, (tuple(range(8)),))
    return (*products[:5], Start(reduce), *products[5:7], Done("sum"), *products[7:]) * 2


@pytest.mark.benchmark(group="pipelines")
@pytest.mark.parametrize("costs", ["known", "new"])
@pytest.mark.parametrize("name", ["1f1b", "zero_bubble_h1"])
def test_a_pipeline_of_64_stages_and_512_microbatches(
    benchmark: BenchmarkFixture, name: str, costs: str
) -> None:
    """Time the program once it is turned into arrays, at costs that are cached and at new ones.

    Each message has the NICs to itself.
    """
    clock = Clock.of(pipeline_on_hosts(name, 64, 512))
    known = ClusterCosts(DGX)
    assert known.contention_factor(((0, 1),)) > 1
    expected = clock.makespan(known, shared=False)  # compiles
    if costs == "known":
        makespan = benchmark.pedantic(
            lambda: clock.makespan(known, shared=False), rounds=100, warmup_rounds=5
        )
    else:
        makespan = benchmark.pedantic(
            clock.makespan, setup=lambda: ((ClusterCosts(DGX),), {"shared": False}), rounds=10
        )
    assert makespan == expected
    assert clock.cached[0].table is not None  # the clock computed it, not the engine


@pytest.mark.benchmark(group="scenario")
@pytest.mark.parametrize("gpus", [64, 1024, 100_000])
def test_gpt_175b(benchmark: BenchmarkFixture, gpus: int) -> None:
    """Predict 1, 16 and 1562 replicas, which take equally long."""
    assert benchmark(predict, GPT, *gpt_175b_on(gpus)).seconds > 0
    plan, machine = gpt_175b_on(64)
    one_replica = min(timeit.repeat(lambda: predict(GPT, plan, machine), number=1, repeat=200))
    if benchmark.stats:  # not with --benchmark-disable
        assert benchmark.stats["min"] < 1.5 * one_replica


@pytest.mark.benchmark(group="scenario")
def test_a_search_of_plans(benchmark: BenchmarkFixture) -> None:
    """Predict 96 plans of GPT-175B on 512 GPUs, with the caches of the machine empty."""
    degrees = [(t, p, 512 // (t * p)) for t, p in product((1, 2, 4, 8), (2, 4, 8, 16))]
    plans = [
        Execution(
            tensor=t, pipeline=p, data=d, microbatch=b, global_batch=2048, recompute=recompute
        )
        for (t, p, d), b, recompute in product(degrees, (1, 2, 4), ("selective", "full"))
        if 2048 % (b * d) == 0
    ]
    assert len(plans) == 96

    def search() -> list[Prediction]:
        machine = Machine(DGX)
        return [predict(GPT, plan, machine) for plan in plans]

    assert len(benchmark(search)) == len(plans)


def gpt_175b_on(gpus: int) -> tuple[Execution, Machine]:
    data = gpus // 64
    plan = Execution(
        tensor=8, pipeline=8, data=data, global_batch=96 * data, interleave=3, recompute="full"
    )
    return plan, Machine(Cluster.load("dgx_a100_80").with_size(8 * data))


@pytest.mark.benchmark(group="compiled programs")
def test_reading_a_program_of_10000_instructions(benchmark):
    lines = [
        f"  %n{i} = f32[4]{{0}} negate(%{f'n{i - 1}' if i else 'p'}), metadata={{{'x' * 500}}}"
        for i in range(10_000)
    ]
    text = "\n".join(["HloModule m", "ENTRY %main {", "  %p = f32[4]{0} parameter(0)", *lines, "}"])
    assert len(benchmark.pedantic(parse_hlo, (text,), rounds=3)) == 10_000
