"""Seconds of the algorithms of inter-operator planning, and of planning pipelines of real steps."""

from functools import cache
from itertools import pairwise

import numpy as np
import pytest

import autopar
from autopar.ir.spec import LogicalMesh
from autopar.layering.layer_clustering import cluster_layers, received_bytes
from autopar.lowering.cross_mesh_resharding import reshard
from autopar.pipeline.pipeline_schedules import make_schedule, schedule_kind, schedule_names
from autopar.pipeline.schedule_kinds import Pipeline
from autopar.pipeline.submeshes import HostPool, Submesh, enumerate_submeshes
from autopar.planning.stage_dp import solve_stages
from autopar.planning.stage_problem import StageCost, StageProblem, in_flight_of
from experiments.validation.planning_seconds import PLANNINGS

SEQUENCE, VOCABULARY = 1024, 51200


def gpt_problem(
    layers: int, hidden: int, pool: HostPool, micro_batches: int, flop_per_s: float
) -> StageProblem:
    """Return the stage problem of a GPT with remat, by the formulas of Megatron-LM.

    A microbatch has one sequence and the optimizer is Adam (Narayanan et al., SC'21). Tensor
    parallelism has 100 GB/s within a host and 3 GB/s between hosts. A stage takes an eighth longer
    than the sum of its layers, which is its lower bound.
    """

    @cache
    def layer(kind: str, mesh: Submesh, data: int, model: int) -> tuple[float, float, float, float]:
        """Return seconds per microbatch and per step, and bytes per device and per microbatch."""
        bandwidth = 100e9 if mesh.num_devices <= pool.devices_per_host else 3e9
        params = 12 * hidden**2 + (VOCABULARY * hidden if kind != "inner" else 0)
        flop = 8 * SEQUENCE * params + 16 * SEQUENCE**2 * hidden
        sequence_bytes = 2 * SEQUENCE * hidden / data
        seconds = (
            flop / (data * model) / flop_per_s
            + 16 * sequence_bytes * (model - 1) / model / bandwidth
        )
        once = 4 * params / model * (data - 1) / data / bandwidth
        return seconds, once, 16 * params / model, sequence_bytes

    kinds = ["first", *["inner"] * (layers - 2), "last"]

    def costs(start: int, stop: int, mesh: Submesh, slowdown: float) -> list[StageCost]:
        """Return the costs of layers start to stop, one for each logical shape of the submesh."""
        counts = {kind: kinds[start:stop].count(kind) for kind in set(kinds[start:stop])}
        shapes = []
        for data in (n for n in range(1, mesh.num_devices + 1) if mesh.num_devices % n == 0):
            model = mesh.num_devices // data
            parts = [[n * x for x in layer(kind, mesh, data, model)] for kind, n in counts.items()]
            seconds, once, fixed, per_batch = map(sum, zip(*parts, strict=True))
            shapes.append(StageCost(slowdown * seconds, once, fixed, per_batch, (data, model)))
        return shapes

    return StageProblem(
        num_layers=layers,
        pools=(pool,),
        submeshes=enumerate_submeshes([pool]),
        num_micro_batches=micro_batches,
        costs=lambda start, stop, mesh: costs(start, stop, mesh, 1.125),
        in_flight=in_flight_of("1f1b", micro_batches),
        lower_bound=lambda start, stop, mesh: costs(start, stop, mesh, 1.0),
        layer_kinds=kinds,
        transfer=lambda cut, source, destination, before: 4 * SEQUENCE * hidden / 3e9,
    )


PROBLEMS = {
    "GPT-2.6B, 8 V100": lambda: gpt_problem(32, 2560, HostPool(1, 8, 15_000_000_000), 32, 60e12),
    "GPT-39B, 64 V100": lambda: gpt_problem(48, 8192, HostPool(8, 8, 15_000_000_000), 1024, 60e12),
    "GPT-0.5T, 3072 A100": lambda: gpt_problem(
        64, 25600, HostPool(384, 8, 78_000_000_000), 1536, 150e12
    ),
}


@pytest.mark.benchmark(group="stages")
@pytest.mark.parametrize("name", PROBLEMS)
def test_stage_construction(benchmark, name):
    benchmark.extra_info["costs"] = benchmark.pedantic(
        lambda: solve_stages(PROBLEMS[name]())
    ).num_costs


@pytest.mark.benchmark(group="trace and plan")
@pytest.mark.parametrize("name", [n for n, p in PLANNINGS.items() if p.micro_batches != "auto"])
def test_a_step_becomes_a_pipeline(benchmark, name):
    """Plan the train step with every layer unrolled, from the function to the complete plan."""
    plan = benchmark.pedantic(PLANNINGS[name].plan, rounds=1)
    assert plan.gap <= 0.011
    benchmark.extra_info["stages"] = [
        f"{len(stage.devices)}: {stage.mesh_shape}" for stage in plan.stages
    ]


@pytest.mark.benchmark(group="every option automatic")
def test_every_option_is_searched(benchmark):
    """Plan GPT-3.6B on 64 A100s, with open microbatches, schedule, stages and remat.

    The aim on two quiet cores is a minute.
    """
    plan = benchmark.pedantic(PLANNINGS["GPT-3.6B, 64 A100, all open"].plan, rounds=1)
    trials = autopar.get_last_search_result()
    benchmark.extra_info["combinations"] = len(trials)
    benchmark.extra_info["planned"] = sum(trial.seconds is not None for trial in trials)
    benchmark.extra_info["step_seconds"] = plan.predicted_seconds


@pytest.mark.benchmark(group="layers")
@pytest.mark.parametrize("num_layers", [8, 48])
def test_layer_clustering_of_20000_equations(benchmark, num_layers):
    size = 20_000
    random = np.random.default_rng(0)
    flops = np.where(random.random(size) < 0.1, random.random(size), 0.0)
    uses = random.integers(2, 60, size)
    values = [
        (e, float(random.integers(1000)), [e + 1, min(e + int(uses[e]), size - 1)])
        for e in range(size - 2)
    ]
    layers = benchmark.pedantic(
        cluster_layers, (flops, received_bytes(size, values), num_layers), rounds=3
    )
    assert all(a < b for a, b in pairwise(layers.stops))


@pytest.mark.benchmark(group="schedules")
@pytest.mark.parametrize("name", schedule_names())
def test_a_schedule_of_16_meshes_and_128_microbatches(benchmark, name):
    seconds = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0, "U": 0.0}
    pipeline = Pipeline(16, 128, schedule_kind(name).num_chunks or 1)
    benchmark.pedantic(lambda: make_schedule(name, pipeline).makespan(seconds), rounds=3)  # pyright: ignore


@pytest.mark.benchmark(group="resharding")
def test_resharding_between_two_times_64_devices(benchmark):
    mesh = LogicalMesh((8, 8), ("x", "y"))
    benchmark(reshard, (1024, 1024), (mesh, (("x",), ("y",))), (mesh, (("y",), ())))
