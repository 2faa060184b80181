"""Stage construction finds the best plan of small problems, by comparison with brute force."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.pipeline.pipeline_schedules import make_schedule
from autopar.pipeline.schedule_kinds import Pipeline
from autopar.pipeline.submeshes import HostPool, Submesh, enumerate_submeshes, fits, place
from autopar.planning.stage_dp import solve_stages
from autopar.planning.stage_problem import (
    PASSES,
    NoStagesError,
    PlacedStage,
    StageCost,
    StageProblem,
    in_flight_of,
    step_seconds,
    with_few_bubbles,
)

GOLDEN = Path(__file__).parents[2] / "golden"
INSTANCES = json.loads((GOLDEN / "stages.json").read_text())["instances"]
ARRAYS = np.load(GOLDEN / "stage_costs.npz")
MEMORY_BYTES = 100


@pytest.mark.parametrize("golden", INSTANCES, ids=lambda x: str(x["case"]))
def test_stage_construction_finds_the_recorded_optimum(golden):
    seconds, later = ARRAYS[f"seconds{golden['case']}"], ARRAYS[f"later{golden['case']}"]
    pool = HostPool(golden["hosts"], golden["devices_per_host"], MEMORY_BYTES)
    meshes = tuple(
        Submesh(0, int(hosts), int(devices))
        for hosts, devices in ARRAYS[f"submeshes{golden['case']}"]
    )
    assert meshes == enumerate_submeshes([pool], "whole_hosts")

    def costs(start, stop, mesh):
        entry = start, stop - 1, meshes.index(mesh)
        # each microbatch in flight takes one byte, and `later` + 1 of them fit
        return [
            StageCost(t, 0.0, MEMORY_BYTES - (n + 1), 1.0)
            for t, n in zip(seconds[entry], later[entry], strict=True)
        ]

    problem = StageProblem(golden["layers"], (pool,), meshes, golden["micro_batches"], costs)
    plan = solve_stages(problem)
    assert plan.seconds == pytest.approx(golden["objective"], rel=1e-6)
    assert step_seconds(problem, plan.stages) == pytest.approx(plan.seconds)


def feasible_plans(problem: StageProblem):
    """Yield all sequences of stages that fit the hosts and, with microbatches in flight, memory."""

    def rest(start: int, left: tuple[int, ...]):
        if start == problem.num_layers:
            if problem.leave_idle or not any(left):
                yield ()
            return
        for mesh in problem.submeshes:
            remaining = tuple(
                n - (pool == mesh.pool) * mesh.num_devices for pool, n in enumerate(left)
            )
            if min(remaining) >= 0:
                for stop in range(start + 1, problem.num_layers + 1):
                    for cost in problem.costs(start, stop, mesh):
                        yield from (
                            (PlacedStage(start, stop, mesh, cost), *others)
                            for others in rest(stop, remaining)
                        )

    for stages in rest(0, tuple(pool.num_devices for pool in problem.pools)):
        fit = all(
            stage.cost.fixed_bytes
            + problem.in_flight(len(stages) - 1 - i, len(stages)) * stage.cost.micro_batch_bytes
            <= problem.pools[stage.submesh.pool].memory_bytes
            for i, stage in enumerate(stages)
        )
        per_pool = [
            [s.submesh for s in stages if s.submesh.pool == i] for i in range(len(problem.pools))
        ]
        if fit and all(
            fits(pool, meshes) for pool, meshes in zip(problem.pools, per_pool, strict=True)
        ):
            yield stages


pools = st.sampled_from(
    [
        (HostPool(1, 4, 10),),
        (HostPool(2, 2, 8),),
        (HostPool(3, 1, 9),),
        (HostPool(1, 3, 10),),
        (HostPool(2, 3, 12),),
        (HostPool(1, 2, 10), HostPool(2, 1, 5)),
        (HostPool(1, 2, 6), HostPool(1, 2, 12)),
        (HostPool(1, 3, 12), HostPool(2, 2, 8)),
        (HostPool(1, 1, 5), HostPool(1, 2, 10), HostPool(2, 1, 9)),
    ]
)


@st.composite
def problems(draw):
    """Draw small problems with random pools of hosts, memory limits and transfers."""
    host_pools = draw(pools)
    meshes = enumerate_submeshes(
        host_pools, draw(st.sampled_from(["powers_of_two", "whole_hosts", "all"]))
    )
    layers = draw(st.integers(1, 4))
    micro_batches = draw(st.sampled_from([1, 2, 16]))
    kinds = draw(
        st.one_of(st.none(), st.lists(st.sampled_from("ab"), min_size=layers, max_size=layers))
    )
    seed = draw(st.integers(0, 1 << 16))

    def generator(*key) -> np.random.Generator:
        return np.random.default_rng([seed, *key])

    def costs(start, stop, mesh):
        key = [ord(kind) for kind in kinds[start:stop]] if kinds else [start, stop]
        random = generator(mesh.pool, mesh.hosts, mesh.devices_per_host, *key)
        rows = random.integers([1, 0, 0, 0], [20, 9, 9, 5], (random.integers(0, 4), 4))
        return [
            StageCost(float(t), float(once), float(fixed), float(per_batch))
            for t, once, fixed, per_batch in rows
        ]

    def bounds(start, stop, mesh):
        return [
            StageCost(
                cost.seconds * 0.7,
                cost.once_seconds - 1,
                cost.fixed_bytes,
                cost.micro_batch_bytes * 0.9,
            )
            for cost in costs(start, stop, mesh)
        ]

    def transfer(cut, source, destination, before):
        if source.pool == destination.pool and before is not None and before < source.num_devices:
            return float("inf")  # not enough memory
        meshes = (source.pool, source.num_devices, destination.pool, destination.num_devices)
        least = float(generator(cut, *meshes).integers(5))
        return (
            least if before is None else least + float(generator(cut, *meshes, before).integers(3))
        )

    problem = StageProblem(
        num_layers=layers,
        pools=host_pools,
        submeshes=meshes,
        num_micro_batches=micro_batches,
        costs=costs,
        in_flight=in_flight_of(
            draw(st.sampled_from(["gpipe", "1f1b", "zero_bubble_h1"])), micro_batches
        ),
        lower_bound=draw(st.sampled_from([None, bounds])),
        layer_kinds=kinds,
        transfer=draw(st.sampled_from([None, transfer])),
        leave_idle=draw(st.booleans()),
        backward=draw(st.booleans()),
    )
    return with_few_bubbles(problem) if draw(st.booleans()) else problem


@settings(max_examples=80)
@given(problems())
def test_stage_construction_finds_the_optimum_of_brute_force(problem):
    best = min((step_seconds(problem, stages) for stages in feasible_plans(problem)), default=None)
    if best is None:
        with pytest.raises(NoStagesError):
            solve_stages(problem)
        return
    plan = solve_stages(problem)
    assert plan.seconds == pytest.approx(best)
    assert step_seconds(problem, plan.stages) == pytest.approx(best)
    assert plan.stages in feasible_plans(problem)
    place(problem.pools, [stage.submesh for stage in plan.stages])
    assert solve_stages(problem) == plan


def test_exact_costs_are_computed_only_near_the_optimum():
    pool = HostPool(4, 4)
    requests = []

    def costs(start, stop, mesh):
        requests.append((start, stop, mesh))
        return [StageCost(1.1 * (stop - start) / mesh.num_devices + 0.001 * (stop - start))]

    def bounds(start, stop, mesh):
        return [StageCost((stop - start) / mesh.num_devices)]

    meshes = enumerate_submeshes([pool])
    problem = StageProblem(16, (pool,), meshes, 64, costs, lower_bound=bounds, layer_kinds=[0] * 16)
    assert solve_stages(problem).num_costs == len(requests) <= 16 * len(meshes) / 4
    assert len(set(requests)) == len(requests)


def test_faster_devices_get_more_layers():
    pools = HostPool(1, 2), HostPool(1, 2)

    def costs(start, stop, mesh):
        return [StageCost((stop - start) / (mesh.num_devices * (1 if mesh.pool else 3)))]

    plan = solve_stages(StageProblem(8, pools, enumerate_submeshes(pools), 100, costs))
    layers = {
        pool: sum(s.stop - s.start for s in plan.stages if s.submesh.pool == pool)
        for pool in (0, 1)
    }
    assert layers == {0: 6, 1: 2}


def test_devices_with_less_memory_get_fewer_layers():
    pools = HostPool(1, 1, 3), HostPool(1, 1, 100)

    def costs(start, stop, mesh):
        return [StageCost(stop - start, fixed_bytes=stop - start)]

    plan = solve_stages(StageProblem(8, pools, enumerate_submeshes(pools), 100, costs))
    layers = {stage.submesh.pool: stage.stop - stage.start for stage in plan.stages}
    assert layers == {0: 3, 1: 5}  # 4 and 4 would be faster, but do not fit


def test_the_error_of_too_little_memory_lists_layers_devices_and_submeshes():
    pool = HostPool(1, 2, 10)
    problem = StageProblem(
        2, (pool,), enumerate_submeshes([pool]), 4, lambda *_: [StageCost(1.0, fixed_bytes=11)]
    )
    with pytest.raises(
        NoStagesError, match=r"2 layers into stages for 1 x 2 devices with submeshes 1x1, 1x2"
    ):
        solve_stages(problem)


def test_the_error_of_stages_that_are_too_slow_names_the_limit():
    """Advice about memory would be wrong: faster stages are what is asked for."""
    pool = HostPool(1, 2)
    problem = StageProblem(2, (pool,), enumerate_submeshes([pool]), 4, lambda *_: [StageCost(1.0)])
    fastest = solve_stages(problem).seconds
    with pytest.raises(NoStagesError, match=r"fits in memory and takes less than \S+ s$"):
        solve_stages(problem, 0.5 * fastest)
    assert solve_stages(problem, 1.5 * fastest).seconds == fastest


def test_a_number_of_kinds_other_than_that_of_layers_is_refused():
    pool = HostPool(1, 1)
    with pytest.raises(ValueError, match="1 layer kinds for 2 layers"):
        StageProblem(2, (pool,), enumerate_submeshes([pool]), 4, lambda *_: [], layer_kinds=["a"])


def test_transfers_depend_on_both_neighboring_stages():
    pool = HostPool(1, 4)

    def transfer(cut, source, destination, before):
        return {(2, 1, 2): 3.0, (1, 1, 2): 10.0, (1, 2, 1): 20.0}.get(
            (cut, source.num_devices, destination.num_devices), 0.0
        )

    def costs(start, stop, mesh):
        return [StageCost(1.0)] if stop == start + 1 and mesh.num_devices < 4 else []

    plan = solve_stages(
        StageProblem(3, (pool,), enumerate_submeshes([pool]), 1, costs, transfer=transfer)
    )
    # The last two stages on 1x2 and 1x1 have a free transfer between them, instead of one of 3 s,
    # but an expensive one before them.
    assert [stage.submesh.num_devices for stage in plan.stages] == [1, 1, 2]
    assert plan.seconds == 3 * 1.0 + 3.0


def estimate_and_schedule(name, seconds, transfers, once, micro_batches):
    """Return the estimate and the schedule's makespan for one stage per device.

    A forward pass takes a third of a stage's seconds.
    """
    one_device = Submesh(0, 1, 1)
    problem = StageProblem(
        num_layers=len(seconds),
        pools=(HostPool(1, len(seconds)),),
        submeshes=(one_device,),
        num_micro_batches=micro_batches,
        costs=lambda *_: [],
        in_flight=in_flight_of(name, micro_batches),
        transfer=lambda cut, *_: transfers[cut - 1],
    )
    stages = [
        PlacedStage(i, i + 1, one_device, StageCost(s, o))
        for i, (s, o) in enumerate(zip(seconds, once, strict=True))
    ]
    share = {"F": 1 / 3, "B": 2 / 3}
    makespan = make_schedule(name, Pipeline(len(seconds), micro_batches)).makespan(
        lambda task: (
            once[task.stage] if task.phase == "U" else seconds[task.stage] * share[task.phase]
        ),
        lambda source, to: transfers[min(source, to)] / 2,
    )
    return step_seconds(problem, stages), makespan


def test_the_estimate_counts_waits_for_transfers_between_neighbors():
    """The first two of three stages have 3 and 2 of 9 microbatches in flight.

    They take 3 + 6 + 3 s for two microbatches, 7 // 2 = 3 times.
    """
    estimate, makespan = estimate_and_schedule("1f1b", [3, 3, 3], [6, 0], [0, 0, 0], 9)
    assert estimate == (3 + 6 + 3 + 3) + 3 * (3 + 6 + 3)
    assert estimate <= makespan <= 1.2 * estimate
    # an estimate from the slowest stage alone is too small
    assert 0.7 * makespan > (3 + 6 + 3 + 3) + 8 * 3
    overlapping = estimate_and_schedule("1f1b_overlap_friendly", [3, 3, 3], [4, 0], [0, 0, 0], 9)
    assert overlapping == pytest.approx((13 + 8 * 3, 13 + 8 * 3), rel=0.03)  # transfers overlap


def test_the_estimate_counts_the_update_of_a_fast_stage_at_the_end():
    """Its idle time in the steady state does not overlap with the update, which comes last."""
    assert estimate_and_schedule("1f1b", [3, 6], [0], [5, 0], 8) == pytest.approx(
        (9 + 7 * 6 + 5,) * 2
    )


@given(
    st.sampled_from(["1f1b", "1f1b_overlap_friendly"]),
    st.lists(
        st.tuples(st.integers(4, 8), st.sampled_from([0, 2, 4]), st.sampled_from([0, 5])),
        min_size=1,
        max_size=5,
    ),
)
def test_the_estimate_is_near_the_makespan_of_the_schedule(name, rows):
    """Transfers take less time than tasks."""
    seconds, transfers, once = zip(*rows, strict=True)
    estimate, makespan = estimate_and_schedule(name, seconds, transfers[1:], once, 24)
    assert 0.8 * makespan <= estimate <= 1.2 * makespan


@pytest.mark.parametrize("micro_batches", [4, 24])
@pytest.mark.parametrize("seconds", [[6, 6], [6, 6, 6, 6], [3, 6, 3], [6, 3, 3, 4]])
def test_the_estimate_with_few_bubbles_is_near_the_makespan_of_zero_bubble_h1(
    seconds, micro_batches
):
    """All passes take as long."""
    name, count = "zero_bubble_h1", len(seconds)
    problem = with_few_bubbles(
        StageProblem(
            num_layers=count,
            pools=(HostPool(1, count),),
            submeshes=(Submesh(0, 1, 1),),
            num_micro_batches=micro_batches,
            costs=lambda start, *_: [StageCost(seconds[start], 1.0)],
            in_flight=in_flight_of(name, micro_batches),
        )
    )
    estimate = solve_stages(problem).seconds / PASSES
    makespan = make_schedule(name, Pipeline(count, micro_batches)).makespan(
        lambda task: 1.0 if task.phase == "U" else seconds[task.stage] / 3, lambda *_: 0.0
    )
    assert 0.85 * makespan <= estimate <= makespan + 1e-9


def test_stages_that_do_not_fit_into_hosts_are_not_planned():
    pool = HostPool(2, 6)
    meshes = tuple(Submesh(0, 1, size) for size in (2, 4, 6))

    def costs(start, stop, mesh):
        return [StageCost(1.0 if mesh.num_devices == 4 else 10.0)]

    plan = solve_stages(StageProblem(3, (pool,), meshes, 1, costs))
    # three stages of 4 devices would take 3 s, but a host of 6 devices has room for only one
    assert plan.seconds == 20.0
    assert place([pool], [stage.submesh for stage in plan.stages])
