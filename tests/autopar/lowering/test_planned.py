"""A plan file that was changed so that it no longer fits its step is refused."""

import json

import pytest

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


def test_an_unchanged_plan_has_the_same_program(pipeline):
    assert with_changed_stages(pipeline, lambda stages: None).program == pipeline.program
