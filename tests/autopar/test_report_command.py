"""`autopar report`: the page has the API's numbers; bad input is one line that writes nothing."""

import json
import re
import sys

import pytest
from typer.testing import CliRunner

import autopar
from autopar.command_line import app
from autopar.command_line.user_step import load_step

MODULE = """
import jax
import jax.numpy as jnp
import autopar

def step(params, batch):
    loss = lambda w: jnp.mean((jax.nn.relu(batch @ w["a"]) @ w["b"]) ** 2)
    value, gradients = autopar.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

def shapes():
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    return {"a": array(64, 128), "b": array(128, 64)}, array(32, 64)

def make_step():
    return step, shapes(), {"tokens": 32}

def make_other():
    return lambda params, batch: step(params, batch * 2), shapes()
"""
STEP = "step_of_a_report:make_step"
OTHER = "step_of_a_report:make_other"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a step, plans of two methods, and a plan that is cut off."""
    folder = tmp_path_factory.mktemp("report")
    (folder / "step_of_a_report.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path])
        patch.chdir(folder)
        step = load_step(STEP)
        for name, method in (
            ("plan", autopar.ShardParallel()),
            ("data", autopar.DataParallel(num_micro_batches=2)),
        ):
            plan = autopar.plan_step(step.fun, step.args, method=method, cluster="dgx_h100")
            plan.save(f"{name}.json")
        plan = autopar.Plan.load("plan.json")
        plan.model_copy(update={"cluster": "of my own"}).save("own.json")
        (folder / "truncated.json").write_text((folder / "plan.json").read_text()[:1000])
        yield folder


def run(*args, code=0):
    arguments = [str(arg) for arg in args]
    result = CliRunner().invoke(app, ["report", *arguments], env={"COLUMNS": "300"})
    assert result.exit_code == code, result.output
    assert isinstance(result.exception, SystemExit | None)
    return result


def page_data(path):
    [block] = re.findall(r'id="data">(.*?)</script>', path.read_text(), re.DOTALL)
    return json.loads(block)


def test_plans_alone_are_shown_side_by_side(folder, tmp_path):
    path = tmp_path / "report.html"
    run("plan.json", "data.json", "-o", path)
    data = page_data(path)
    assert [plan["name"] for plan in data["plans"]] == ["plan.json", "data.json"]
    for plan, name in zip(data["plans"], ("plan.json", "data.json"), strict=True):
        assert plan["plan"]["seconds"] == autopar.Plan.load(name).predicted_seconds
        assert plan["prediction"] is None
    assert data["provenance"]["command"] == f"autopar report plan.json data.json -o {path}"


def test_predictions_of_a_step_are_those_of_the_api(folder, tmp_path):
    path = tmp_path / "report.html"
    run(
        "plan.json",
        "data.json",
        STEP,
        "--cluster",
        "dgx_h100",
        "--cluster",
        "dgx_a100_80",
        "-o",
        path,
    )
    plans = page_data(path)["plans"]
    step = load_step(STEP)
    names = [
        f"{file} on {c}" for file in ("plan.json", "data.json") for c in ("dgx_h100", "dgx_a100_80")
    ]
    assert [plan["name"] for plan in plans] == names
    for shown in plans:
        file, cluster = shown["name"].split(" on ")
        plan = autopar.Plan.load(file)
        prediction = autopar.predict(
            step.fun, step.args, plan, cluster, tokens=32, fidelity="analytic"
        )
        assert shown["prediction"]["row"] == prediction.row()
        assert shown["prediction"]["cluster"] == cluster


def test_without_a_cluster_a_plan_is_predicted_on_its_own(folder, tmp_path):
    path = tmp_path / "report.html"
    run("plan.json", STEP, "-o", path)
    [plan] = page_data(path)["plans"]
    assert (plan["name"], plan["prediction"]["cluster"]) == ("plan.json", "dgx_h100")
    assert "--cluster" in run("own.json", STEP, "-o", path, code=2).output


def test_alternatives_are_the_other_methods_and_the_combinations_of_the_search(folder, tmp_path):
    path = tmp_path / "report.html"
    run("data.json", STEP, "--alternatives", "-o", path)
    data = page_data(path)
    first, *others = data["alternatives"]
    assert first["shown"]
    assert first["seconds"] == data["plans"][0]["prediction"]["row"]["seconds"]
    by_name = {row["name"]: row for row in others}
    assert {"shard", "data", "zero2", "zero3", "pipeline"} <= set(by_name)
    assert by_name["data"]["seconds"] == first["seconds"]
    searched = [row for row in others if row["remark"].startswith("planner's estimate")]
    assert searched
    assert all(row["seconds"] and row["num_bytes"] for row in searched)
    ruled_out = [row for row in others if "takes at least" in row["remark"]]
    assert ruled_out
    assert all(row["seconds"] is None for row in ruled_out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["truncated.json"], "truncated.json: "),
        (["absent.json"], "absent.json: can't be read"),
        (["step_of_a_report.py"], "is not JSON"),
        (["plan.json", OTHER], "fingerprint"),
        (["plan.json", "step_of_a_report:absent"], "has no function 'absent'"),
        ([STEP], "is a step; give a plan of it first"),
        (["plan.json", "--cluster", "dgx_h100"], "--cluster is about predictions"),
        (["plan.json", "--compiled"], "--compiled is about predictions"),
        (["plan.json", "--alternatives"], "--alternatives is about predictions"),
        (["plan.json", STEP, "--cluster", "absent"], "absent"),
        (["plan.json", "-o", "plan.json"], "is one of the plans"),
        (["plan.json", "-o", "absent/report.html"], "can't be written"),
        (["plan.json", "-o", "."], "it is a folder"),
        (["plan.json", "-o", 300 * "a"], "can't be written (File name too long)"),
        ([300 * "a"], "can't be read (File name too long)"),
        (["plan.json", 300 * "a" + ":make_step"], "there is no module"),
        ([], "Missing argument"),
    ],
)
def test_bad_input_is_one_message_and_writes_nothing(folder, arguments, message):
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    result = run(*arguments, code=2)
    assert message in result.stderr
    assert "Traceback" not in result.output
    after = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert after == before
