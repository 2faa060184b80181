"""Plans round-trip through JSON, print as tables, and refuse other steps and damaged files."""

import gc
import json

import numpy as np
import pytest

import autopar
from autopar.plan import Plan, PlanError
from simulator import ProgramError, load_program
from tests.steps import mlp_args, mlp_step


@pytest.fixture(scope="module")
def plan():
    return autopar.plan_step(mlp_step, mlp_args(), cluster="p3.16xlarge", mesh_shape=(2, 4))


def test_a_plan_survives_json(plan):
    assert Plan.from_json(plan.to_json()) == plan


def test_a_saved_plan_is_no_program_and_says_so(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    with pytest.raises(
        ProgramError, match=f"is a plan of autopar for {plan.step!r}.*own estimate of the step on"
    ):
        load_program(tmp_path / "plan.json")


def test_a_plan_survives_a_file(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_a_plan_does_not_change(plan):
    with pytest.raises(ValueError, match="frozen"):
        plan.cluster = "another"


def test_a_printed_plan_shows_every_value_with_its_spec_and_bytes():
    def step(params, batch):
        return {name: p + batch.sum() for name, p in params.items()}, batch @ params["first"]

    params = {"first": np.ones((64, 8)), "layer_0": np.ones(16), "layer_1": np.ones(16)}
    plan = autopar.plan_step(
        step, (params, np.ones((32, 64))), cluster="p3.16xlarge", mesh_shape=(8,)
    )
    text = str(plan)
    assert text.startswith("ShardParallel on p3.16xlarge, mesh x=8, 1 microbatch(es)")
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines()]
    by_value = {row[0]: row[1:] for row in rows if row}
    first = next(v for v in plan.stages[0].inputs if v.path == "0/first")
    size = f"{first.device_bytes(plan.stages[0].mesh):,}"
    assert by_value["0/first"][:4] == ["", first.role, "(64, 8)", "float32"]
    assert by_value["0/first"][-1] == size
    assert by_value["0/layer_*"][:3] == ["2", "state", "(16,)"]
    assert by_value["result/0/layer_*"][0] == "2"


def test_bytes_per_device_are_those_of_a_shard(plan):
    mesh = plan.stages[0].mesh
    for value in plan.stages[0].inputs:
        ways = mesh.ways(axis for axes in value.spec for axis in axes)
        size = 4
        for n in value.shape:
            size *= n
        assert value.device_bytes(mesh) == size // ways


def test_a_plan_for_another_step_is_refused(plan):
    other = autopar.parallelize(mlp_step, method=autopar.PlanMethod(plan))
    with pytest.raises(PlanError, match=f"{plan.fingerprint}.*this step has"):
        other(*mlp_args(batch_size=32))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a plan"),
        ("[]", "not a plan"),
        ('{"version": 99}', "version 99, expected 3"),
        ("{}", "version None"),
    ],
)
def test_a_text_that_is_no_plan_is_refused(text, message):
    with pytest.raises(PlanError, match=message):
        Plan.from_json(text)


def test_the_error_of_a_damaged_plan_names_the_field(plan):
    data = json.loads(plan.to_json())
    data["stages"][0]["inputs"][0]["itemsize"] = "large"
    with pytest.raises(PlanError, match=r"stages\.0\.inputs\.0\.itemsize"):
        Plan.from_json(json.dumps(data))


@pytest.mark.parametrize("pin", [1, None, "xy", [3], [["x", 2]], {"x": 1}], ids=repr)
def test_a_pin_that_names_no_mesh_axes_is_refused(plan, pin):
    data = json.loads(plan.to_json())
    data["options"]["pins"] = {"0/w": pin}
    with pytest.raises(PlanError, match=r"options\.pins\.0/w: .*such as \['x', null\]; got "):
        Plan.from_json(json.dumps(data))


@pytest.mark.parametrize("number", [-1, 0])
def test_a_plan_has_at_least_one_microbatch(plan, number):
    data = json.loads(plan.to_json()) | {"num_micro_batches": number}
    with pytest.raises(PlanError, match="num_micro_batches: Input should be greater than 0"):
        Plan.from_json(json.dumps(data))


@pytest.mark.parametrize("spec", [["x", "x"], [["x", "x"], []], [["x"], ["x"]], [["x"]]])
def test_a_spec_that_cannot_shard_its_array_is_refused(plan, spec):
    data = json.loads(plan.to_json())
    output = next(value for value in data["stages"][0]["outputs"] if len(value["shape"]) == 2)
    output["spec"] = spec
    with pytest.raises(PlanError, match=r"stages\.0.*spec"):
        autopar.Plan.from_json(json.dumps(data))


def test_a_whole_step_is_one_stage_and_each_layer_is_in_one_stage(plan):
    data = json.loads(plan.to_json())
    stage = data["stages"][0]
    for stages in ([], [stage, stage]):
        with pytest.raises(PlanError, match=f"{len(stages)} stages of a step that is not a pip"):
            Plan.from_json(json.dumps(data | {"stages": stages}))
    pipeline = data | {"schedule": {"name": "1f1b"}}
    for layers in ([], [[1]], [[0], [0]]):
        stages = [stage | {"layers": numbers} for numbers in layers]
        with pytest.raises(PlanError, match="layers of stages are"):
            Plan.from_json(json.dumps(pipeline | {"stages": stages}))


@pytest.mark.parametrize("num_chunks", [2, 10**30])
def test_chunks_of_a_step_that_is_no_pipeline_are_refused(plan, num_chunks):
    values = json.loads(plan.to_json())
    values["schedule"]["num_chunks"] = num_chunks
    with pytest.raises(PlanError, match=r"num_chunks is .* not a pipeline; expected 1"):
        Plan.from_json(json.dumps(values))


def test_a_plan_with_numbers_that_are_not_finite_is_refused(plan):
    data = json.loads(plan.to_json())
    for number in (float("nan"), float("inf")):
        with pytest.raises(PlanError, match="predicted_seconds: Input should be a finite number"):
            Plan.from_json(json.dumps(data | {"predicted_seconds": number}))


@pytest.mark.slow
def test_plans_that_are_gone_leave_nothing_behind():
    from tests.autopar.pipeline.stack_steps import stack_batch, stack_params, stack_step

    def objects() -> int:
        method = autopar.PipeshardParallel(
            num_micro_batches=2, stage_option=autopar.UniformStageOption(2)
        )
        autopar.plan_step(
            stack_step, (stack_params(), stack_batch()), method=method, cluster="cpu-hosts"
        )
        autopar.shutdown()
        return len(gc.get_objects())

    counts = [objects() for _ in range(5)]
    assert counts[-1] < counts[1] + 500
