"""On heterogeneous clusters each stage is planned and compiled for the devices of its pool."""

import re
from dataclasses import replace
from functools import cache
from itertools import groupby

import jax
import pandas as pd
import pytest

import autopar
from autopar import (
    AutoLayerOption,
    AutoStageOption,
    ManualStageOption,
    PlanMethod,
    StageError,
    UniformStageOption,
)
from autopar.ir.step_graph import StepGraph
from autopar.lowering.planned import PlannedStep
from autopar.lowering.target import compile_for
from autopar.pipeline.submeshes import Submesh
from autopar.plan import PipelineSchedule, Plan
from autopar.planning.pipeline_planner import PipelinePlanner
from autopar.planning.stage_construction import stage_problem
from autopar.sharding.options import AUTO
from autopar.sharding.solve_within_memory import MemoryBudgetError
from autopar.tracing.step_traces import TraceOptions
from autopar.tracing.trace import trace
from experiments.models import build_model
from experiments.models.model import Model
from simulator.costs.cost_model import ClusterCosts
from simulator.hardware.cluster import Cluster
from simulator.hardware.description import ClusterError
from simulator.hardware.heterogeneous import AnyCluster, HeterogeneousCluster, load_cluster
from tests.autopar.pipeline.stack_steps import (
    assert_as_serial,
    pipeline,
    stack_batch,
    stack_loss,
    stack_params,
    stack_step,
)
from tests.steps import model_step, sgd_args

LAYERS = 8
ONE_F_ONE_B = PipelineSchedule(name="1f1b")
V100 = Cluster.load("p3.16xlarge").with_size(devices_per_host=4)
A100 = Cluster.load("dgx_a100_40").with_size(devices_per_host=4)
MIXED = HeterogeneousCluster(
    name="mixed", description="four V100s, and four A100s", pools=(V100, A100)
)
UNEVEN = load_cluster("a2_uneven")


@pytest.fixture(scope="module")
def mlp() -> StepGraph:
    """Return an MLP whose products take most of the time."""
    model = build_model("mlp", {"dim": 2048, "num_layers": LAYERS, "batch_size": 2048})

    return trace(
        model_step(model),
        model.abstract_args(),
        (1,),
        16,
        TraceOptions(layers=AutoLayerOption(LAYERS), marked=True),
    )


def planned(step: StepGraph, cluster: AnyCluster, option=None, **options) -> Plan:
    option = option or AutoStageOption()
    planner = PipelinePlanner(step, cluster, AUTO, **options)
    return planner.plan(option, ONE_F_ONE_B, "PipeshardParallel")


def layers_by_pool(plan: Plan, cluster: AnyCluster) -> list[int]:
    """Return the number of layers of each pool; every stage is in one pool."""
    layers = [0] * len(cluster.pools)
    for stage in plan.stages:
        layers[cluster.pool_of(stage.devices)] += len(stage.layers)
    return layers


def cluster_of_pools(*pools: Cluster) -> HeterogeneousCluster:
    return HeterogeneousCluster(name="toy", description="", pools=pools)


def with_device(cluster: Cluster, **device) -> Cluster:
    return cluster.model_copy(update={"device": cluster.device.model_copy(update=device)})


# Stage construction


def test_faster_devices_get_more_layers(mlp):
    plan = planned(mlp, MIXED)
    slow, fast = layers_by_pool(plan, MIXED)
    assert slow + fast == LAYERS
    assert 0 < slow < fast
    assert sorted(device for stage in plan.stages for device in stage.devices) == list(range(8))
    reverse = cluster_of_pools(A100, V100)
    assert layers_by_pool(planned(mlp, reverse), reverse) == [fast, slow]


def test_devices_with_less_memory_get_fewer_layers(mlp):
    one = V100.with_size(devices_per_host=1)
    equal = planned(mlp, cluster_of_pools(one, one))
    assert layers_by_pool(equal, cluster_of_pools(one, one)) == [4, 4]
    small = with_device(one, memory_gb=0.8 * equal.predicted_bytes / 1e9, reserve_gb=0.0)
    for cluster in (cluster_of_pools(small, one), cluster_of_pools(one, small)):
        of_small, of_large = (
            layers_by_pool(planned(mlp, cluster), cluster)[i]
            for i in map(cluster.pools.index, (small, one))
        )
        assert 0 < of_small < 4 < of_large
    with pytest.raises(MemoryBudgetError):
        planned(mlp, cluster_of_pools(small, one), UniformStageOption(2))


def test_all_hosts_of_unequal_size_get_layers(mlp):
    plan = planned(mlp, UNEVEN)
    assert sorted(device for stage in plan.stages for device in stage.devices) == list(range(12))
    large, small = layers_by_pool(plan, UNEVEN)
    assert large > small > 0


@pytest.mark.slow
def test_equal_pools_are_planned_like_the_hosts_of_one_cluster(mlp):
    """The slow network rules out stages over both hosts."""
    two_pools, hosts = cluster_of_pools(V100, V100), V100.with_size(hosts=2)
    assert planned(mlp, two_pools).predicted_seconds == pytest.approx(
        planned(mlp, hosts).predicted_seconds, rel=0.02
    )


def test_costs_of_a_stage_equal_those_on_a_cluster_of_its_pool_alone(mlp):
    planner = PipelinePlanner(mlp, MIXED)
    problem = stage_problem(
        planner._stage_costs(AUTO, ONE_F_ONE_B), MIXED, AutoStageOption(), "1f1b"
    )
    for pool, cluster in enumerate((V100, A100)):
        pool_problem = stage_problem(
            PipelinePlanner(mlp, cluster)._stage_costs(AUTO, ONE_F_ONE_B),
            cluster,
            AutoStageOption(),
            "1f1b",
        )
        assert problem.pools[pool] == pool_problem.pools[0]
        assert problem.costs(2, 4, Submesh(pool, 1, 2)) == pool_problem.costs(
            2, 4, Submesh(0, 1, 2)
        )
    inside, across = (
        problem.transfer(4, Submesh(0, 1, 2), Submesh(pool, 1, 2), None) for pool in (0, 1)
    )  # pyright: ignore[reportOptionalCall]
    assert inside < across == problem.transfer(4, Submesh(1, 1, 2), Submesh(0, 1, 2), 2)  # pyright: ignore[reportOptionalCall]


def test_the_imbalance_of_a_stage_counts_the_speed_of_its_devices(mlp):
    """Tolerated stages have equal times, so half of the layers is too much for slow devices."""
    planner = PipelinePlanner(mlp, MIXED)
    option = AutoStageOption(stage_imbalance_tolerance=0.3)
    problem = stage_problem(planner._stage_costs(AUTO, ONE_F_ONE_B), MIXED, option, "1f1b")
    slow, fast = Submesh(0, 1, 4), Submesh(1, 1, 4)
    assert not problem.costs(0, 4, slow)
    assert problem.costs(2, LAYERS, fast) or problem.costs(1, LAYERS, fast)


def test_the_last_dp_result_can_be_given_as_manual_stages(mlp):
    plan, dp_result = planned(mlp, MIXED), autopar.get_last_dp_result()
    assert dp_result is not None
    assert dp_result.submesh_devices == tuple(stage.devices for stage in plan.stages)
    assert len({MIXED.pool_of(devices) for devices in dp_result.submesh_devices}) == 2
    option = ManualStageOption(
        dp_result.forward_stage_layer_ids,
        dp_result.submesh_shapes,
        dp_result.logical_mesh_shapes,
        submesh_devices=dp_result.submesh_devices,
    )
    assert planned(mlp, MIXED, option).stages == plan.stages


# From a step to its timeline


@cache
def gpt() -> Model:
    sizes = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_heads": 2,
        "sequence_length": 16,
        "vocab_size": 64,
    }
    return build_model("gpt", sizes | {"batch_size": 16})


def gpt_step(state, batch):
    return gpt().train_step(state, batch, autopar.value_and_grad)


TWO_STAGES = ManualStageOption(
    [[0], [1]], [(1, 4), (1, 2)], [(4,), (2, 1)], submesh_devices=[range(4, 8), (2, 3)]
)
METHOD = autopar.PipeshardParallel(
    num_micro_batches=2, layer_option=AutoLayerOption(2), stage_option=TWO_STAGES, cluster=MIXED
)


@cache
def gpt_plan() -> Plan:
    return autopar.plan_step(gpt_step, gpt().abstract_args(), method=METHOD, cluster=MIXED)


def test_a_plan_survives_json():
    plan = gpt_plan()
    assert (plan.cluster, [stage.devices for stage in plan.stages]) == (
        "mixed",
        [(4, 5, 6, 7), (2, 3)],
    )
    assert Plan.from_json(plan.to_json()) == plan
    assert "on devices 4-7" in str(plan)


@pytest.mark.slow
def test_each_stage_is_compiled_for_the_devices_of_its_pool(monkeypatch):
    compiled_for = []

    def record(jitted, avals, cluster, *options):
        compiled_for.append(cluster.device.name)
        return compile_for(jitted, avals, cluster, *options)

    monkeypatch.setattr("autopar.lowering.compilation.compile_for", record)
    timeline = autopar.simulate(gpt_step, gpt().abstract_args(), gpt_plan(), MIXED)
    # the first stage is on A100s
    assert [name for name, _ in groupby(compiled_for)] == [A100.device.name, V100.device.name]
    assert timeline.meshes == ((4, 5, 6, 7), (2, 3))
    assert timeline.fits(MIXED)
    assert 0 < timeline.makespan < 1


@pytest.mark.slow
def test_a_plan_with_manual_stages_equals_one_device():
    executable = assert_as_serial(gpt_step, METHOD, *sgd_args(gpt())).get_last_executable()
    assert executable is not None
    assert [stage.devices for stage in executable.plan.stages] == [(4, 5, 6, 7), (2, 3)]


def test_automatic_stages_and_an_evaluation_on_them_equal_one_device():
    method = pipeline(devices=8, stage_option=AutoStageOption(), cluster=MIXED)
    train = assert_as_serial(stack_step, method, stack_params(), stack_batch())
    plan = train.get_last_executable().plan
    assert {MIXED.pool_of(stage.devices) for stage in plan.stages} == {0, 1}
    evaluate = autopar.parallelize(stack_loss, method=autopar.FollowParallel(train, 4))
    args = stack_params(), stack_batch()
    assert float(evaluate(*args)) == pytest.approx(float(jax.jit(stack_loss)(*args)), rel=1e-5)


@pytest.mark.slow
def test_decisions_of_a_stage_have_the_costs_of_its_pool():
    step, cluster = trace_of_gpt(), load_cluster("p3_beside_p4d")
    option = ManualStageOption(
        [[0], [1]], [(1, 2)] * 2, [(2,)] * 2, submesh_devices=[(0, 1), (8, 9)]
    )
    planned_step = PlannedStep(step, planned(step, cluster, option))
    for stage, pool in enumerate(cluster.pools):
        expected = autopar.report.decisions(planned_step, stage=stage, costs=ClusterCosts(pool))
        pd.testing.assert_frame_equal(autopar.report.decisions(planned_step, stage=stage), expected)


def trace_of_gpt() -> StepGraph:
    return trace(
        gpt_step,
        gpt().abstract_args(),
        (1,),
        2,
        TraceOptions(layers=AutoLayerOption(2), marked=True),
    )


# Errors


@pytest.mark.parametrize(
    "method", [autopar.ShardParallel(), autopar.DataParallel(), autopar.Zero3Parallel()]
)
def test_a_method_with_one_mesh_is_refused_on_a_heterogeneous_cluster(method):
    name = type(method).__name__
    with pytest.raises(
        ClusterError, match=rf"{name} shards .* 'a2_uneven' has 2 pools .* use PipeshardParallel"
    ):
        autopar.plan_step(
            stack_step, (stack_params(), stack_batch()), method=method, cluster="a2_uneven"
        )
    with pytest.raises(ClusterError, match="use PipeshardParallel"):
        autopar.parallelize(stack_step, method=replace(method, devices=8, cluster=MIXED))(
            stack_params(), stack_batch()
        )


def test_a_plan_with_one_mesh_is_predicted_if_its_devices_are_in_one_pool():
    args = stack_params(), stack_batch()
    plan = autopar.plan_step(stack_step, args, cluster="p3.16xlarge", mesh_shape=(2,))
    predicted = [
        autopar.simulate(stack_step, args, plan, cluster, fidelity="analytic")
        for cluster in (MIXED, MIXED.pools[0])
    ]
    assert predicted[0].makespan == predicted[1].makespan
    wide = autopar.plan_step(stack_step, args, cluster="p3.16xlarge", mesh_shape=(8,))
    with pytest.raises(ClusterError, match="lie in several pools of cluster"):
        autopar.simulate(stack_step, args, wide, MIXED, fidelity="analytic")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            UniformStageOption(4),
            r"stage 2: devices 6, 7, 8 lie in several pools of cluster 'a2_uneven'.*AutoStage",
        ),
        (
            ManualStageOption([range(8)], [(1, 2)], [(2,)], submesh_devices=[(7, 8)]),
            "stage 0: devices 7, 8 lie in",
        ),
        (
            ManualStageOption([range(8)], [(1, 2)], [(2,)], submesh_devices=[(11, 12)]),
            "expected numbers from 0 to 11",
        ),
        (
            ManualStageOption([range(8)], [(1, 2)], [(2,)], submesh_devices=[(1, 1)]),
            "each at most once",
        ),
        (
            ManualStageOption([range(8)], [(1, 2)], [(2,)], submesh_devices=[(1,)]),
            r"but the submeshes have \[2\]",
        ),
        (AutoStageOption(profile=True), "devices differ in cluster 'a2_uneven'.*profile=False"),
    ],
)
def test_stages_over_several_pools_are_refused(mlp, option, message):
    with pytest.raises(StageError, match=message):
        planned(mlp, UNEVEN, option)


def test_a_plan_for_another_cluster_is_refused():
    args = gpt().abstract_args()
    with pytest.raises(ClusterError, match=re.escape("'p3.16xlarge': it has 4 devices")):
        autopar.simulate(gpt_step, args, gpt_plan(), V100)
    other = cluster_of_pools(V100.with_size(hosts=2, devices_per_host=3), A100)
    with pytest.raises(ClusterError, match="lie in several pools of cluster 'toy'"):
        autopar.simulate(gpt_step, args, gpt_plan(), other)
    with pytest.raises(ValueError, match="the plan needs 8 devices, got 4"):
        autopar.parallelize(gpt_step, method=PlanMethod(gpt_plan(), devices=4)).get_executable(
            *args
        )
