"""Methods without a solver: the heuristic, manual shardings, and given degrees of parallelism."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import autopar
from autopar.ir.spec import LogicalMesh
from autopar.plan import Plan
from autopar.report import classify
from autopar.sharding.heuristic import largest_dims
from autopar.testing import assert_allclose
from simulator.hardware.cluster import Cluster
from tests.steps import mlp_args, mlp_step, serial
from tests.tiers import pairs, slow

HEURISTIC = autopar.ShardingOptions(mode="heuristic")
COLUMN, ROW = P(None, "y"), P("y", None)
KERNELS = "0/params/params/Dense_{}/kernel"


def specs(plan):
    return {value.path: value.spec for value in plan.stages[0].inputs}


def run(method, step=mlp_step, args=None, **options):
    """Return the executable of a step, after comparing its results with one device."""
    args = args or mlp_args((64, 64, 64))
    planned = autopar.parallelize(step, method=method, donate_argnums=(), **options)
    assert_allclose(planned(*args), serial(step, *args), rtol=2e-3, atol=2e-3)
    return planned.get_last_executable()


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((16, 64), ((), ("x", "y"))),  # 64, then 32
        ((16, 24), (("y",), ("x",))),  # 24, then 16
        ((32, 16), (("x", "y"), ())),  # 32, then the first of two that are 16
        ((6, 5), (("x",), ())),
        ((5, 8), ((), ("x", "y"))),
        ((3,), ((),)),
        ((), ()),
    ],
)
def test_each_axis_shards_the_largest_dim_that_it_divides(shape, spec):
    assert largest_dims(shape, LogicalMesh((2, 4), ("x", "y"))) == spec


@pytest.mark.parametrize("devices", [(2, 4), *slow((4,), (1, 4))])
def test_the_heuristic_follows_its_rule(devices):
    plan = run(autopar.ShardParallel(devices, options=HEURISTIC)).plan
    mesh = plan.stages[0].mesh
    first = next(axis for axis, size in mesh.sizes.items() if size > 1)
    for value in plan.stages[0].inputs:
        expected = ((first,), ()) if value.role == "batch" else largest_dims(value.shape, mesh)
        assert value.spec == expected, value.path
    assert plan.gap is None
    assert plan.options.mode == "heuristic"
    assert Plan.from_json(plan.to_json()) == plan


def test_solving_is_never_dearer_than_the_heuristic():
    args = mlp_args((256,) * 3, 32, 256)
    plans = [
        autopar.plan_step(mlp_step, args, method=method, cluster="p3.16xlarge", mesh_shape=(2, 4))
        for method in (autopar.ShardParallel(), autopar.ShardParallel(options=HEURISTIC))
    ]
    assert plans[0].predicted_seconds <= plans[1].predicted_seconds


def test_a_heuristic_plan_is_explained_as_a_solved_one_is():
    executable = run(autopar.ShardParallel((2, 4), options=HEURISTIC))
    table = autopar.report.decisions(executable)
    seconds = table[["compute_seconds", "communication_seconds", "resharding_seconds"]].sum()
    assert seconds.sum() == pytest.approx(executable.plan.predicted_seconds)
    split = executable.plan.predicted_split
    assert list(seconds) == pytest.approx([split.compute, split.communication, split.resharding])


def test_the_heuristic_keeps_pins():
    options = autopar.ShardingOptions(
        mode="heuristic", pins={"1/*": P(), KERNELS.format(0): P("x")}
    )
    spec_by_path = specs(run(autopar.ShardParallel((4,), options=options)).plan)
    assert spec_by_path["1/x"] == ((), ())
    assert spec_by_path[KERNELS.format(0)] == (("x",), ())


def test_the_heuristic_does_without_forbidden_collectives_or_says_that_it_cannot():
    everything = frozenset({"all_gather", "all_to_all", "reduce_scatter", "all_reduce"})
    options = autopar.ShardingOptions(mode="heuristic", forbidden=everything)
    with pytest.raises(autopar.InfeasibleError, match="let the solver choose"):
        autopar.plan_step(
            mlp_step,
            mlp_args(),
            method=autopar.ShardParallel(options=options),
            cluster="p3.16xlarge",
            mesh_shape=(4,),
        )


def test_the_heuristic_plan_must_fit():
    method = autopar.ShardParallel(options=HEURISTIC, memory_budget=1e3)
    with pytest.raises(autopar.MemoryBudgetError, match="no plan for mlp_step fits"):
        autopar.plan_step(
            mlp_step, mlp_args(), method=method, cluster="p3.16xlarge", mesh_shape=(4,)
        )


def test_specs_by_hand_are_kept_and_the_rest_is_left_to_xla():
    state, batch = mlp_args((64, 64))
    by_path = {KERNELS.format(0): COLUMN, KERNELS.format(1): ROW, "1/*": P("x")}
    executable = run(autopar.ManualShardParallel((2, 4), pins=by_path), args=(state, batch))
    spec_by_path = specs(executable.plan)
    assert spec_by_path[KERNELS.format(0)] == ((), ("y",))
    assert spec_by_path[KERNELS.format(1)] == (("y",), ())
    assert spec_by_path["1/x"] == spec_by_path["1/y"] == (("x",), ())
    assert spec_by_path["0/params/params/Dense_0/bias"] == ((),)
    assert executable.plan.stages[0].constraints == ()
    assert "left to XLA" in executable.plan.warnings[0]
    classes = classify(executable)
    assert classes[KERNELS.format(0)].label == "data parallel on x, column on y"
    assert classes[KERNELS.format(1)].label == "data parallel on x, row on y"
    assert executable.out_shardings[0].params["params"]["Dense_1"]["kernel"].spec == P("y", None)


def test_pytrees_of_specs_are_equivalent_to_pins_by_path():
    state, batch = mlp_args((64, 64))
    kernels = {f"Dense_{i}": {"kernel": spec, "bias": None} for i, spec in enumerate((COLUMN, ROW))}
    in_specs = (state.replace(step=None, params={"params": kernels}, opt_state=None), P("x"))
    plans = [
        autopar.plan_step(
            mlp_step, (state, batch), method=method, cluster="p3.16xlarge", mesh_shape=(2, 4)
        )
        for method in (
            autopar.ManualShardParallel(in_specs=in_specs),
            autopar.ManualShardParallel(
                pins={
                    KERNELS.format(0): COLUMN,
                    KERNELS.format(1): ROW,
                    "1/x": P("x"),
                    "1/y": P("x"),
                }
            ),
        )
    ]
    assert plans[0].stages == plans[1].stages


def test_outputs_and_named_values_have_the_specs_of_the_user():
    def product(a, b):
        return {"sum": checkpoint_name(a @ b, "product") + 1, "a": a}

    args = (np.ones((8, 16), np.float32), np.ones((16, 32), np.float32))
    method = autopar.ManualShardParallel(
        (2, 4),
        in_specs=(None, P()),
        out_specs={"sum": P("y"), "a": None},
        pins={"product": P(None, "x")},
    )
    executable = run(method, product, args, batch_argnums=())
    assert executable.out_shardings["sum"].spec == P("y", None)
    (named,) = executable.plan.stages[0].constraints
    assert named.spec == ((), ("x",))


def test_microbatches_can_be_sharded_by_hand():
    method = autopar.ManualShardParallel((4,), num_micro_batches=2, in_specs=(P(), P("x")))
    run(method, args=mlp_args())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"in_specs": (P(),)}, "in_specs is .*Expected PartitionSpecs in the structure"),
        (
            {"in_specs": ("x", None)},
            "in_specs holds 'x', expected a jax.sharding.PartitionSpec or None",
        ),
        ({"in_specs": (None, P("z"))}, r"1/x is pinned to .* names the axis 'z'; the mesh has"),
        ({"out_specs": {"loss": P()}}, "out_specs is .*Expected"),
        ({"in_specs": (None, P("x")), "pins": {"1/*": P()}}, "keep one"),
    ],
)
def test_specs_that_cannot_hold_are_refused(options, message):
    method = autopar.ManualShardParallel(**options)
    with pytest.raises(autopar.ShardingError, match="(?s)" + message):
        autopar.plan_step(
            mlp_step, mlp_args(), method=method, cluster="p3.16xlarge", mesh_shape=(4,)
        )


def test_a_manual_plan_has_no_reasons():
    executable = run(autopar.ManualShardParallel((4,), in_specs=(None, P("x"))))
    with pytest.raises(autopar.PlanError, match="XLA propagates"):
        autopar.report.decisions(executable)


def test_a_step_of_the_data_parallel_specs_is_data_parallel():
    executable = run(autopar.ManualShardParallel((4,), in_specs=(P(), P("x"))))
    assert classify(executable).label == "data parallel"
    assert "all-reduce" in executable.get_hlo_text()
    assert jnp.isfinite(executable.plan.predicted_seconds)
    assert jax.tree.leaves(executable.in_shardings)[0].spec == P()


@pytest.mark.parametrize(
    ("devices", "degrees"),
    pairs(
        [None, 8, jax.devices()[::-1], jax.make_mesh((8,), ("i",))],
        [(2, 4), (-1, 4), (8, 1), (1, 8)],
    ),
)
def test_degrees_without_a_pipeline_are_a_mesh_of_the_same_devices(devices, degrees):
    method = autopar.get_3d_parallel_method(1, *degrees, devices=devices)
    assert isinstance(method, autopar.ShardParallel)
    executable = autopar.parallelize(mlp_step, method=method).get_executable(*mlp_args())
    assert executable.meshes[0].devices.shape == (8 // degrees[1], degrees[1])
    given = jax.devices()[::-1] if isinstance(devices, list) else jax.devices()
    assert list(executable.meshes[0].devices.flat) == given
    if executable.meshes[0].devices.shape[0] > 1:
        assert {v.path: v.spec for v in executable.plan.stages[0].inputs}["1/x"][0][:1] == ("x",)


@pytest.mark.parametrize(
    "degrees",
    [
        (-1, 1, 4),
        *slow((2, 2, 2), (1, 4, 2), (4, 1, 2)),
    ],
)
def test_degrees_with_a_pipeline_are_stages_of_that_shape(degrees):
    data, operator, stages = degrees
    method = autopar.get_3d_parallel_method(2, data, operator, stages, devices=8)
    args = mlp_args((64, 64, 64, 64))
    plan = autopar.plan_step(mlp_step, args, method=method, cluster="p3.16xlarge")
    assert len(plan.stages) == stages
    assert {stage.mesh_shape for stage in plan.stages} == {(8 // operator // stages, operator)}


@pytest.mark.slow
def test_degrees_with_a_pipeline_equal_one_device():
    method = autopar.get_3d_parallel_method(2, 2, 2, 2, devices=8)
    run(method, args=mlp_args((64, 64, 64, 64)))


def test_degrees_are_planned_for_an_absent_cluster():
    cluster = Cluster.load("p3.16xlarge").with_size(hosts=2)
    for method, shapes in (
        (autopar.get_3d_parallel_method(1, 4, 4, devices=16), [(4, 4)]),
        (autopar.get_3d_parallel_method(2, 2, 4, 2, devices=16), [(2, 4), (2, 4)]),
        (
            autopar.get_3d_parallel_method(
                1, 4, 4, 1, 16, allow_degenerate_into_shard_parallel=False
            ),
            [(4, 4)],
        ),
    ):
        plan = autopar.plan_step(mlp_step, mlp_args((64, 64, 64)), method=method, cluster=cluster)
        assert [stage.mesh_shape for stage in plan.stages] == shapes


def test_options_hold_with_a_pipeline_and_without():
    for stages in (1, 2):
        method = autopar.get_3d_parallel_method(
            1, -1, 1, stages, devices=8, memory_budget=1e9, cluster="dgx_h100"
        )
        assert (method.memory_budget, method.cluster) == (1e9, "dgx_h100")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"data_parallel": 3},
            "data_parallel=3 x operator_parallel=1 x pipeline_parallel=1 is not the number of"
            " devices, 8",
        ),
        ({"operator_parallel": 3}, "is not the number of devices, 8"),
        ({"data_parallel": 2.0}, "data_parallel is 2.0, expected"),
        ({"operator_parallel": 0}, "operator_parallel is 0, expected"),
        ({"pipeline_parallel": "2"}, "pipeline_parallel is '2', expected"),
        ({"num_micro_batches": 0}, "num_micro_batches is 0, expected"),
        ({"devices": 8.0}, "devices is 8.0, expected"),
        ({"allow_degenerate_into_shard_parallel": 1}, "expected True or False"),
        ({"pipeline_schedule": "1b1f"}, "pipeline_schedule is '1b1f', expected one of"),
        ({"pipeline_parallel": 16}, "is not the number of devices, 8"),
    ],
)
def test_degrees_that_make_no_sense_are_refused(options, message):
    with pytest.raises(autopar.OptionError, match=message):
        autopar.get_3d_parallel_method(**{"num_micro_batches": 1, "devices": 8} | options)
