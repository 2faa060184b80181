"""Plans of small steps have the expected shardings, under a cost model of bandwidth alone."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
import pytest

import autopar
from autopar.ir.spec import LogicalMesh
from autopar.planning.step_planner import make_planned
from autopar.sharding.options import AUTO, DATA_PARALLEL, ZERO2, ZERO3
from autopar.sharding.pins import ShardingError
from autopar.sharding.plan_shardings import plan_shardings
from autopar.sharding.selection_problem import NoFasterError
from autopar.sharding.solve_within_memory import MemoryBudgetError
from autopar.tracing.trace import trace
from simulator.hardware.cluster import Cluster
from tests.steps import mlp_args, mlp_step
from tests.toy_costs import BandwidthOnly

COSTS = BandwidthOnly(1e9, 1e10)
LINE = LogicalMesh((4,), ("x",))


def specs(step, shardings, start, end=""):
    """Return the specs of the inputs whose paths start and end as given."""
    path_specs = zip(step.in_paths, shardings.inputs, strict=True)
    return {
        path: spec for path, spec in path_specs if path.startswith(start) and path.endswith(end)
    }


def wide_mlp():
    """Return a step with weights larger than activations, which favors model parallelism."""
    args = jax.eval_shape(lambda: mlp_args((256,) * 6, batch_size=32, features=256))
    return trace(mlp_step, args, (1,))


@pytest.fixture(scope="module")
def step():
    return trace(mlp_step, mlp_args((64, 64), batch_size=16, features=64), (1,))


def test_optimizer_state_has_the_spec_of_its_parameter():
    step = wide_mlp()
    plan = plan_shardings(step, LINE, COSTS)
    for name in ("mu", "nu"):
        states = specs(step, plan, f"0/opt_state/0/{name}", "kernel")
        assert list(states.values()) == list(specs(step, plan, "0/params", "kernel").values())


def test_data_parallelism_replicates_the_state(step):
    plan = plan_shardings(step, LINE, COSTS, DATA_PARALLEL)
    assert set(specs(step, plan, "1/").values()) == {(("x",), ())}
    assert not any(any(spec) for spec in specs(step, plan, "0/").values())


def test_zero2_shards_only_the_optimizer_state(step):
    plan = plan_shardings(step, LINE, COSTS, ZERO2)
    assert not any(any(spec) for spec in specs(step, plan, "0/params").values())
    for path, spec in specs(step, plan, "0/opt_state").items():
        assert any(spec) or path.endswith("count")


def test_values_that_only_an_output_reshards_are_constrained(step):
    """Otherwise XLA's partitioner may compute them as the output needs them."""
    plan = plan_shardings(step, LINE, COSTS, ZERO2, with_specs=True)
    constrained = {
        step.jaxpr.eqns[constraint.eqn].outvars[constraint.index]: constraint.spec
        for constraint in plan.constraints
        if constraint.side == "out"
    }
    outputs = zip(step.jaxpr.outvars, plan.outputs, strict=True)
    resharded = {var for var, spec in outputs if plan.specs.get(var, spec) != spec}
    assert resharded
    assert {var: constrained.get(var) for var in resharded} == {
        var: plan.specs[var] for var in resharded
    }


def test_zero3_shards_parameters(step):
    plan = plan_shardings(step, LINE, COSTS, ZERO3)
    assert all(any(spec) for spec in specs(step, plan, "0/params").values())


def test_data_parallelism_uses_all_axes_of_a_mesh(step):
    plan = plan_shardings(step, LogicalMesh((2, 2), ("x", "y")), COSTS, DATA_PARALLEL)
    assert set(specs(step, plan, "1/").values()) == {(("x", "y"), ())}


def test_carried_outputs_have_the_specs_of_their_inputs(step):
    plan = plan_shardings(step, LINE, COSTS)
    for o, i in step.carried.items():
        assert plan.outputs[o] == plan.inputs[i]


def test_fixed_options_are_never_cheaper_than_the_automatic_plan(step):
    best = plan_shardings(step, LINE, COSTS, AUTO).seconds
    assert all(
        best <= plan_shardings(step, LINE, COSTS, fixed).seconds
        for fixed in (DATA_PARALLEL, ZERO2, ZERO3)
    )


@pytest.mark.parametrize("examples", [16, 1])
def test_roles_of_inputs_follow_from_their_dependence_on_the_batch(examples):
    state, batch = mlp_args(batch_size=examples, tx=optax.adam(1e-2))
    step = trace(lambda s, b, lr: mlp_step(s, b), (state, batch, jnp.float32(1)), (1,))
    plan = plan_shardings(step, LINE, COSTS)
    roles = dict(zip(step.in_paths, plan.roles, strict=True))
    assert {role for path, role in roles.items() if path.startswith("0/params")} == {"parameter"}
    assert {role for path, role in roles.items() if path.startswith("0/opt_state")} == {"state"}
    assert roles["1/x"] == "batch"
    assert roles["2"] == "other"


def test_data_parallelism_of_an_indivisible_batch_is_refused():
    step = trace(mlp_step, mlp_args(batch_size=6), (1,))
    with pytest.raises(ShardingError, match=r"1/x has shape \(6, 32\).* 4 devices"):
        plan_shardings(step, LINE, COSTS, DATA_PARALLEL)


def test_the_automatic_plan_of_an_indivisible_batch_equals_one_device():
    args = mlp_args(batch_size=6)
    planned = autopar.parallelize(
        mlp_step, method=autopar.ShardParallel(devices=4), donate_argnums=()
    )
    autopar.testing.assert_allclose(planned(*args), jax.jit(mlp_step)(*args), rtol=1e-3, atol=1e-3)


def test_a_primitive_without_a_rule_is_replicated_with_a_warning():
    unknown = jax.extend.core.Primitive("primitive_without_rule")
    unknown.def_abstract_eval(lambda x: x)
    step = trace(lambda x: jnp.sin(unknown.bind(jnp.sin(x))), (jnp.ones((4, 2)),), (0,))
    plan = make_planned(step, LINE, Cluster.load("cpu-virtual"), AUTO, "ShardParallel", COSTS).plan
    (warning,) = plan.warnings
    assert "primitive_without_rule" in warning
    assert "autopar/primitives" in warning
    number = next(n for n, eqn in enumerate(step.jaxpr.eqns) if eqn.primitive is unknown)
    pins = {(c.eqn, c.side): c.spec for c in plan.stages[0].constraints}
    assert pins[number, "out"] == ((), ())


def test_smaller_memory_budgets_cost_more_seconds_until_no_plan_fits():
    step = trace(mlp_step, mlp_args((64, 64), batch_size=64, features=64), (1,))
    fast = BandwidthOnly(1e9, 1e13)  # replicated computation is cheapest
    best = plan_shardings(step, LINE, fast)
    assert not any(any(spec) for spec in best.inputs)
    plans = [best]
    error = None
    while error is None:
        budget = 0.9 * plans[-1].peak_bytes
        try:
            plans.append(plan_shardings(step, LINE, fast, memory_budget=budget))
        except MemoryBudgetError as refused:
            error = refused
    seconds, peaks = [plan.seconds for plan in plans], [plan.peak_bytes for plan in plans]
    assert len(plans) >= 3
    assert seconds == sorted(seconds)
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < 0.5 * peaks[0]
    assert error.budget == budget
    assert "num_micro_batches" in str(error)


def test_only_plans_that_are_faster_than_a_known_one_are_looked_for():
    step = trace(mlp_step, mlp_args((64, 64), batch_size=64, features=64), (1,))
    fast = BandwidthOnly(1e9, 1e13)  # replicated computation is cheapest
    best = plan_shardings(step, LINE, fast)
    assert plan_shardings(step, LINE, fast, limit=1.01 * best.seconds).seconds == best.seconds
    with pytest.raises(NoFasterError, match="no sharding takes less than") as slower:
        plan_shardings(step, LINE, fast, limit=0.99 * best.seconds)
    assert not slower.value.is_limited
    budget = 0.6 * best.peak_bytes
    small = plan_shardings(step, LINE, fast, memory_budget=budget)
    assert small.seconds > best.seconds
    again = plan_shardings(step, LINE, fast, memory_budget=budget, limit=1.01 * small.seconds)
    assert again.seconds == small.seconds
    with pytest.raises(NoFasterError, match="no sharding that fits in memory") as slower:
        plan_shardings(step, LINE, fast, memory_budget=budget, limit=0.99 * small.seconds)
    assert slower.value.is_limited


def test_any_sharding_may_be_within_the_largest_tolerance(step):
    best = plan_shardings(step, LINE, COSTS).seconds
    options = replace(AUTO, tolerance=1.0)
    assert plan_shardings(step, LINE, COSTS, options).seconds >= best
    with pytest.raises(NoFasterError):
        plan_shardings(step, LINE, COSTS, options, limit=0.5 * best)


def test_nothing_is_solved_if_even_the_smallest_options_exceed_the_budget(step, monkeypatch):
    def solve(*_):
        raise AssertionError("solved")

    monkeypatch.setattr("autopar.sharding.solve_within_memory.solve", solve)
    smallest = 4 * 3 * 64 * 64 / LINE.num_devices  # one kernel with its Adam state, in shards
    with pytest.raises(MemoryBudgetError) as refused:
        plan_shardings(step, LINE, COSTS, memory_budget=smallest)
    assert refused.value.least > smallest


def test_fixed_options_that_exceed_the_memory_budget_are_refused(step):
    whole = plan_shardings(step, LINE, COSTS, DATA_PARALLEL).peak_bytes
    with pytest.raises(MemoryBudgetError, match="no plan for mlp_step fits"):
        plan_shardings(step, LINE, COSTS, DATA_PARALLEL, memory_budget=0.9 * whole)
    assert plan_shardings(step, LINE, COSTS, ZERO3, memory_budget=0.9 * whole).peak_bytes < whole
