"""Propagation of a plan through its step gives every value the sharding of the plan."""

from dataclasses import replace

import pytest

from autopar.analysis.replay import replay
from autopar.ir.spec import axes_of
from autopar.plan import PlanError
from autopar.primitives.factors import OpFactors, assignment_of
from autopar.report import PlannedStep
from tests.autopar.report.planned_steps import OPTIONS, planned, step_graph


@pytest.mark.parametrize("shape", [(2,), (2, 2)])
@pytest.mark.parametrize("method", OPTIONS)
@pytest.mark.parametrize("step", ["mlp", "decoder", "mlp in microbatches"])
def test_values_are_where_inputs_and_constraints_put_them(step, method, shape):
    each = planned(step, method, shape)
    (stage,) = each.plan.stages
    played = replay(each)
    assert [played.values[var] for var in each.step.jaxpr.invars] == [
        value.spec for value in stage.inputs
    ]
    for constraint in stage.constraints:
        equation = played.equations[constraint.eqn]
        specs = equation.operands if constraint.side == "in" else equation.results
        assert specs[constraint.index] == constraint.spec


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_no_mesh_axis_splits_two_dims_of_a_value(shape):
    for spec in replay(planned("decoder", "ShardParallel", shape)).values.values():
        assert sum(len(axes) for axes in spec) == len(axes_of(spec))


def test_the_batch_runs_through_every_product_of_a_forward_and_backward_pass():
    products = [
        e for e in replay(planned("wide mlp")).equations if e.eqn.primitive.name == "dot_general"
    ]
    assert len(products) == 6 + 2 * 6 - 1  # the gradient of the batch is not computed
    assert all(each.batch for each in products)


def test_a_plan_for_another_step_is_refused():
    other = planned("mlp").plan
    with pytest.raises(PlanError, match="this plan is for mlp_step with fingerprint"):
        PlannedStep(step_graph("decoder"), other)
    mixed = planned("decoder")
    object.__setattr__(mixed := replace(mixed), "plan", other)
    with pytest.raises(PlanError, match="plan the step again"):
        replay(mixed)


def test_a_factor_that_only_a_free_operand_shares_with_the_result_is_read_off_the_result():
    """In a scatter-add into zeros, only the result says how the vocabulary is sharded."""
    vocabulary, hidden, tokens = (0,), (1,), (2,)
    factors = OpFactors(
        (16, 8, 4),
        ("parallel", "parallel", "sum"),
        ((vocabulary, hidden), (tokens,)),
        ((vocabulary, hidden),),
        True,
    )
    found = assignment_of(factors, [None, ((),)], [(("y",), ("x",))])
    assert found == (("y",), ("x",), ())


def test_an_axis_scattered_onto_a_dim_leaves_a_free_operand_its_own():
    """Rows of a free operand are sharded over y; partial sums over x are scattered onto them."""
    rows, inner = (0,), (1,)
    factors = OpFactors((16, 8), ("parallel", "sum"), ((rows, inner), (inner,)), ((rows,),), True)
    found = assignment_of(factors, [None, (("x",),)], [(("y", "x"),)])
    assert found == (("y",), ("x",))


def test_a_plan_with_an_input_fewer_is_refused():
    each = planned("mlp")
    (stage,) = each.plan.stages
    stage = stage.model_copy(update={"inputs": stage.inputs[1:]})
    plan = each.plan.model_copy(update={"stages": (stage,)})
    with pytest.raises(PlanError, match=r"has \d+ inputs, expected the \d+ of the step"):
        replay(PlannedStep(each.step, plan))
