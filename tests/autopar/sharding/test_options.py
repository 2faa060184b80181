"""Plans satisfy options and pins, and contradictions are refused."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import autopar
from autopar.ir.spec import LogicalMesh
from autopar.sharding.options import DATA_PARALLEL, ShardingOptions
from autopar.sharding.pins import ShardingError, check_patterns
from autopar.sharding.plan_shardings import plan_shardings
from autopar.sharding.selection_problem import InfeasibleError
from autopar.testing import assert_allclose
from autopar.tracing.trace import trace
from tests.steps import mlp_args, mlp_step, serial
from tests.toy_costs import BandwidthOnly

COSTS = BandwidthOnly(1e9, 1e10)
LINE, GRID = LogicalMesh((4,), ("x",)), LogicalMesh((2, 2), ("x", "y"))
KERNEL = "0/params/params/Dense_0/kernel"


@pytest.fixture(scope="module")
def step():
    return trace(mlp_step, mlp_args((64, 64), batch_size=16, features=64), (1,))


def inputs(step, **options):
    mesh = options.pop("mesh", LINE)
    shardings = plan_shardings(step, mesh, COSTS, ShardingOptions(**options))
    return dict(zip(step.in_paths, shardings.inputs, strict=True))


def test_a_pinned_input_has_the_spec_of_its_pin(step):
    unpinned = inputs(step)[KERNEL]
    for spec in [P(), P("x"), P(None, "x")]:
        pinned = inputs(step, pins={KERNEL: spec})[KERNEL]
        assert pinned == tuple(
            () if i >= len(spec) or spec[i] is None else (spec[i],) for i in range(2)
        )
    assert any(unpinned)


def test_a_pattern_pins_every_input_that_matches(step):
    specs = inputs(step, pins={"0/params/*/kernel": P("x"), "1/*": P()})
    assert [
        spec for path, spec in specs.items() if path.startswith("0/params") and "kernel" in path
    ] == [(("x",), ())] * 2
    assert specs["1/x"] == ((), ())


def test_outputs_can_be_pinned():
    args = (np.ones((8, 16), np.float32), np.ones((16, 32), np.float32))
    step = trace(lambda a, b: a @ b, args, ())
    for spec, expected in [(P("x"), (("x",), ())), (P(None, "x"), ((), ("x",)))]:
        assert plan_shardings(
            step, LINE, COSTS, ShardingOptions(pins={"result": spec})
        ).outputs == (expected,)


def test_values_with_a_checkpoint_name_can_be_pinned():
    def f(a, b):
        return jnp.sin(checkpoint_name(a @ b, "product")) @ b.T

    args = (np.random.default_rng(0).random((8, 16), np.float32), np.ones((16, 32), np.float32))
    options = ShardingOptions(pins={"product": P(("x", "y"))})
    planned = autopar.parallelize(
        f, batch_argnums=(), method=autopar.ShardParallel(devices=(2, 2), options=options)
    )
    plan = planned.get_executable(*args).plan
    named = [c for c in plan.stages[0].constraints if c.name.endswith("name")]
    assert [c.spec for c in named if c.side == "out"] == [(("x", "y"), ())]
    assert_allclose(planned(*args), f(*args))


def test_a_step_with_pins_equals_one_device():
    args = mlp_args()
    options = ShardingOptions(pins={"0/params/*/kernel": P("y", "x"), "1/x": P(None, "y")})
    planned = autopar.parallelize(
        mlp_step, method=autopar.ShardParallel(devices=(2, 4), options=options), donate_argnums=()
    )
    state, loss = planned(*args)
    assert state.params["params"]["Dense_1"]["kernel"].sharding.spec == P("y", "x")
    assert_allclose((state, loss), serial(mlp_step, *args), rtol=2e-3, atol=2e-3)


def test_the_batch_can_be_forced_onto_an_axis(step):
    specs = inputs(step, batch_axis="y", mesh=GRID)
    assert all("y" in specs[path][0] for path in ("1/x", "1/y"))
    with pytest.raises(ShardingError, match=r"1/x has shape \(6, 32\).* 4 devices"):
        inputs(trace(mlp_step, mlp_args(batch_size=6), (1,)), batch_axis="x")
    with pytest.raises(ShardingError, match=r"batch_axis='z' is no axis .*'x', 'y'"):
        inputs(step, batch_axis="z", mesh=GRID)
    without_batch = trace(mlp_step, mlp_args(), ())
    with pytest.raises(ShardingError, match=r"batch_axis='z' is no axis .*'x', 'y'"):
        inputs(without_batch, batch_axis="z", mesh=GRID)


def test_a_pin_that_contradicts_the_batch_axis_is_refused(step):
    with pytest.raises(ShardingError, match=r"1/x is pinned to .* rule out"):
        inputs(step, batch_axis="y", mesh=GRID, pins={"1/x": P("x")})


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"mode": "manul"}, "mode is 'manul', expected one of 'solve', 'heuristic', 'manual'"),
        (
            {"parameters": "whole"},
            "parameters is 'whole', expected one of 'any', 'replicated', 'sharded'",
        ),
        (
            {"optimizer_state": True},
            "optimizer_state is True, expected one of 'any', 'replicated', 'sharded'",
        ),
        (
            {"forbidden": frozenset({"allgather"})},
            r"forbidden is .*'allgather'.*, expected a set of some of 'all_reduce', 'all_gather'",
        ),
    ],
)
def test_errors_of_unknown_option_values_list_the_known_ones(option, message):
    with pytest.raises(ValueError, match=message):
        ShardingOptions(**option)


def test_forbidden_collectives_are_not_planned(step):
    def kinds(options):
        planned = autopar.parallelize(
            mlp_step, method=autopar.ShardParallel(devices=4, options=options)
        )
        return planned.get_executable(*mlp_args()).get_hlo_text()

    text = kinds(
        ShardingOptions(forbidden=frozenset({"all_gather", "all_to_all", "reduce_scatter"}))
    )
    assert "all-gather" not in text
    assert "all-to-all" not in text


def test_options_that_leave_no_plan_are_infeasible(step):
    everything = frozenset(
        {"all_gather", "all_to_all", "reduce_scatter", "all_reduce", "collective_permute"}
    )
    with pytest.raises(InfeasibleError):
        plan_shardings(
            step,
            LINE,
            COSTS,
            ShardingOptions(data_parallel=True, parameters="sharded", forbidden=everything),
        )


def test_reduce_scatter_can_be_preferred(step):
    replicated = plan_shardings(
        step, LINE, COSTS, ShardingOptions(data_parallel=True, parameters="replicated")
    )
    scattered = plan_shardings(
        step,
        LINE,
        COSTS,
        ShardingOptions(
            data_parallel=True,
            parameters="replicated",
            optimizer_state="sharded",
            prefer_reduce_scatter=True,
        ),
    )
    outs = [c.spec for c in scattered.constraints if c.side == "out" and len(c.spec) == 2]
    assert any(spec in [(("x",), ()), ((), ("x",))] for spec in outs)
    assert scattered.peak_bytes < replicated.peak_bytes


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({KERNEL: P("z")}, "names the axis 'z'; the mesh has x"),
        ({KERNEL: P("x", "x")}, "names the axis 'x' twice"),
        ({KERNEL: P(("x", "x"))}, "names the axis 'x' twice"),
        (
            {"0/params/params/Dense_0/bias": P(None, "x")},
            r"is for 2 dims, but its shape \(64,\) has 1",
        ),
        ({KERNEL: P("x"), "0/params/*/kernel": P(None, "x")}, "keep one"),
        ({"0/step": P("x")}, r"is for 1 dims, but its shape \(\) has 0"),
    ],
)
def test_pins_that_do_not_fit_are_refused(step, pins, message):
    with pytest.raises(ShardingError, match=message):
        inputs(step, pins=pins)


def test_a_pin_that_matches_nothing_is_refused(step):
    with pytest.raises(ShardingError, match=r"matches no input.*Dense_0/kernel"):
        check_patterns(["0/params/params/Dense_0/kernle"], step)


def test_a_pin_whose_axes_do_not_divide_the_dim_is_refused():
    step = trace(mlp_step, mlp_args((6,)), (1,))
    with pytest.raises(
        ShardingError, match=r"dim 1 of its shape \(32, 6\) can't be split over the 4 devices"
    ):
        inputs(step, pins={KERNEL: P(None, "x")})


def test_a_pin_that_contradicts_the_method_is_refused(step):
    from dataclasses import replace

    with pytest.raises(ShardingError, match="rule out"):
        plan_shardings(step, LINE, COSTS, replace(DATA_PARALLEL, pins={KERNEL: P("x")}))


def test_a_pin_of_a_carried_output_that_differs_from_its_input_is_refused(step):
    with pytest.raises(ShardingError, match="pin both alike"):
        inputs(step, pins={KERNEL: P("x"), f"result/{KERNEL}": P(None, "x")})
