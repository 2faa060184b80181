"""A plan file that was changed so that it no longer fits its step is refused."""

import copy
import json
from typing import Any

import pytest

import autopar
from autopar.lowering.planned import PlannedStep
from autopar.plan import Plan, PlanError
from tests.autopar.pipeline.stack_steps import stack_batch, stack_params, stack_step
from tests.autopar.pipeline.test_instructions import planned


@pytest.fixture(scope="module")
def pipeline() -> PlannedStep:
    return planned(stack_step, (stack_params(), stack_batch()), "1f1b", 4)


def with_changed_stages(pipeline: PlannedStep, change) -> PlannedStep:
    data = json.loads(pipeline.plan.to_json())
    change(data["stages"])
    return PlannedStep(pipeline.step, Plan.from_json(json.dumps(data)))


def test_a_plan_without_the_last_layers_is_refused(pipeline):
    def drop_layers(stages):
        del stages[2:]

    with pytest.raises(PlanError, match=r"layers \[0, 1\], expected each of the step's 4 layers"):
        assert with_changed_stages(pipeline, drop_layers).program


@pytest.mark.parametrize(("field", "number"), [("index", 9), ("index", -1), ("eqn", 10_000)])
def test_a_constraint_on_a_value_that_the_stage_does_not_have_is_refused(pipeline, field, number):
    def move_constraint(stages):
        stages[0]["constraints"][0][field] = number

    with pytest.raises(PlanError, match="which stage 0 does not have"):
        assert with_changed_stages(pipeline, move_constraint).values


@pytest.mark.parametrize("side", ["inputs", "outputs", "constraints"])
def test_a_value_with_other_dims_is_refused(pipeline, side):
    def drop_dims(stages):
        value = next(value for value in stages[0][side] if value["shape"])
        value["shape"], value["spec"] = [], []

    with pytest.raises(PlanError, match=r"has shape \(\) in the plan, expected \d dims"):
        assert with_changed_stages(pipeline, drop_dims).values


def test_a_plan_of_one_stage_that_does_not_fit_is_refused_before_it_runs() -> None:
    args = stack_params(), stack_batch()
    plan = autopar.plan_step(
        stack_step, args, method=autopar.ShardParallel(devices=8), cluster="dgx_h100"
    )
    data = json.loads(plan.to_json())

    def run(data: Any) -> None:
        changed = autopar.PlanMethod(Plan.from_json(json.dumps(data)))
        autopar.parallelize(stack_step, method=changed).get_executable(*args)

    without_input = copy.deepcopy(data)
    del without_input["stages"][0]["inputs"][0]
    with pytest.raises(PlanError, match=r"inputs, expected the .* of the step"):
        run(without_input)
    data["stages"][0]["constraints"][0]["eqn"] = 10_000
    with pytest.raises(PlanError, match="which stage 0 does not have"):
        run(data)


def test_an_unchanged_plan_has_the_same_program(pipeline):
    assert with_changed_stages(pipeline, lambda stages: None).program == pipeline.program
