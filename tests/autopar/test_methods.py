"""Methods without a solver: the heuristic and manual shardings."""

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
from tests.steps import mlp_args, mlp_step, serial
from tests.tiers import slow

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
