"""The command line: JSON output equals the API's values, and bad input is one message."""

import json
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

import autopar
import simulator
import simulator.cli
import simulator.transformer
from autopar.command_line import app, fit_command
from autopar.command_line.named_methods import MethodName, plan_with
from autopar.command_line.planning_progress import planning_progress
from autopar.command_line.user_step import load_function, load_step
from autopar.progress import log_progress, progress_listener
from simulator.cli.progress_bars import estimated_seconds, progress_bar
from simulator.hardware.cluster_paths import cluster_names, heterogeneous_cluster_names
from simulator.hardware.schema import SCHEMAS

MODULE = """
import jax
import jax.numpy as jnp
import autopar

def step(params, batch):
    loss = lambda w: jnp.mean((jax.nn.relu(batch @ w["a"]) @ w["b"]) ** 2)
    value, gradients = autopar.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

def shapes(features=64):
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    return {"a": array(features, 128), "b": array(128, 64)}, array(32, 64)

def make_step():
    return step, shapes()

def make_other():
    return lambda params, batch: step(params, batch * 2), shapes()

def with_method():
    method = autopar.Zero3Parallel(num_micro_batches=2)
    return step, shapes(), {"batch_argnums": (1,), "method": method, "tokens": 32}

def in_stages():
    layers = autopar.AutoLayerOption(2)
    return step, shapes(), {"method": autopar.PipeshardParallel(8, 4, layer_option=layers)}

def with_wrong_option():
    return step, shapes(), {"batch_argnum": 1}

def with_wrong_method():
    return step, shapes(), {"method": "shard"}

def with_options_in_a_list():
    return step, shapes(), [1]

def raises_in_make():
    raise RuntimeError("no data")

def raises_in_step():
    return step, shapes(features=63)

def depends_on_a_value():
    return lambda params, batch: (params, 1.0 if batch.sum() > 0 else 0.0), shapes()

def returns_nothing():
    pass

def too_large():
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    big = 2**19
    return step, ({"a": array(big, big), "b": array(big, big)}, array(32, big))

def prints():
    print("from make")
    def noisy(params, batch):
        print("from the step")
        return step(params, batch)
    return [noisy, shapes()]

def needs_arguments(width, depth=2, *rest, **options):
    return step, shapes()

def of_batch(size):
    return step, (shapes()[0], jax.ShapeDtypeStruct((size, 64), jnp.float32))

def needs_depth(width, depth):
    return step, shapes()

def exits():
    raise SystemExit(3)

def returns_texts():
    return step, ("a", "b")

def returns_a_number():
    return 3, shapes()

def returns_no_arguments():
    return step, 3
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with steps, and plans of one of them on one and two axes."""
    folder = tmp_path_factory.mktemp("steps")
    (folder / "steps_of_a_user.py").write_text(MODULE)
    (folder / "exits.py").write_text("raise SystemExit(3)")
    (folder / "needs.py").write_text("import a_package_that_is_absent")
    (folder / "broken.py").write_text("def make_step(:")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path])
        patch.chdir(folder)
        for method, name in (("shard", "plan.json"), ("data", "data.json")):
            result = run("plan", STEP, "--cluster", "dgx_h100", "--method", method, "-o", name)
            assert "1/" not in result.stderr
        (folder / "empty.json").write_text("")
        (folder / "binary.json").write_bytes(bytes(range(256)))
        (folder / "folder").mkdir()
        (folder / "program.json").write_text(PROGRAM_START)
        (folder / "cluster.yaml").write_text("name: mine\nhosts: -3\n")
        (folder / "broken.yaml").write_text("name: [mine")
        (folder / "truncated.json").write_text((folder / "plan.json").read_text()[:1000])
        yield folder


STEP = "steps_of_a_user:make_step"

PROGRAM_START = '{"version": 2, "program": {"meshes": [[0]], "instructions": [[]'


def run(*args, code=0):
    result = CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": "300"})
    assert result.exit_code == code, result.output
    return result


def values(*args, code=0):
    """Return the JSON that a command prints."""
    return json.loads(run(*args, "--json", code=code).stdout)


def api():
    """Return the function and the arguments of the step, for the API."""
    step = load_step(STEP)
    return step.fun, step.args


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("shard", autopar.ShardParallel(num_micro_batches=2)),
        ("data", autopar.DataParallel(num_micro_batches=2)),
        ("zero2", autopar.Zero2Parallel(num_micro_batches=2)),
        ("zero3", autopar.Zero3Parallel(num_micro_batches=2)),
        (
            "pipeline",
            autopar.PipeshardParallel(
                num_micro_batches=2, layer_option=autopar.AutoLayerOption(2), stage_option="auto"
            ),
        ),
    ],
)
def test_a_plan_is_that_of_the_method_with_the_name(folder, tmp_path, name, method):
    path = tmp_path / "plan.json"
    options = ["--cluster", "dgx_h100", "--method", name, "--micro-batches", 2, "-o", path]
    printed = autopar.Plan.from_json(run("plan", STEP, *options, "--json").stdout)
    assert printed == autopar.Plan.load(path)
    assert not autopar.report.diff(
        printed, autopar.plan_step(*api(), method=method, cluster="dgx_h100")
    )


def test_the_automatic_method_is_the_fastest_sharding_or_pipeline(folder, tmp_path):
    def seconds(method):
        return values(
            *("plan", STEP, "--cluster", "dgx_h100", "--method", method, "--micro-batches", 1),
            *("-o", tmp_path / "plan.json"),
        )["predicted_seconds"]

    two_dimensional = autopar.plan_step(*api(), cluster="dgx_h100", mesh_shape=(2, 4))
    assert seconds("auto") == min(
        seconds("shard"), seconds("pipeline"), two_dimensional.predicted_seconds
    )


def test_hosts_are_an_axis_of_the_mesh(folder, tmp_path):
    path = tmp_path / "plan.json"
    options = ["--method", "shard", "--hosts", 2, "-o", path]
    run("plan", STEP, "--cluster", "dgx_h100", *options)
    assert autopar.Plan.load(path).stages[0].mesh_shape == (2, 8)


def test_a_function_may_return_options(folder, tmp_path):
    path = tmp_path / "plan.json"
    place = f"{folder / 'steps_of_a_user.py'}:with_method"
    plan = values("plan", place, "--cluster", "dgx_h100", "-o", path)
    assert (plan["method"], plan["num_micro_batches"]) == ("Zero3Parallel", 2)
    row = values("predict", path, place, "--cluster", "dgx_h100")["dgx_h100"]
    assert row["tokens_per_s"] == pytest.approx(32 / row["seconds"])


def test_a_saved_plan_is_shown(folder):
    assert autopar.Plan.from_json(run("show", "plan.json", "--json").stdout) == autopar.Plan.load(
        "plan.json"
    )
    assert "0/a" in run("show", "plan.json").stdout


@pytest.mark.parametrize("fidelity", ["analytic", "compiled"])
def test_a_prediction_is_that_of_the_api(folder, fidelity):
    clusters = ["dgx_h100", "dgx_a100_80"]
    options = ["--compiled"] if fidelity == "compiled" else []
    rows = values(
        *("predict", "plan.json", STEP, "--cluster", clusters[0], "--cluster", clusters[1]),
        *options,
    )
    plan = autopar.Plan.load("plan.json")
    for name in clusters:
        expected = autopar.predict(*api(), plan, name, fidelity=fidelity)
        assert rows[name]["seconds"] == expected.seconds
        assert rows[name]["allocated"] == expected.memory.total


def test_a_small_cluster_is_extended_by_whole_hosts(folder):
    rows = values("predict", "plan.json", STEP, "--cluster", "a100_pcie_4")
    assert rows["a100_pcie_4"]["devices"] == 8


def test_a_prediction_is_a_column_of_a_table(folder):
    table = run("predict", "plan.json", STEP, "--cluster", "dgx_h100").stdout
    assert "dgx_h100" in table
    assert "memory, GB" in table


def test_the_difference_of_plans_is_that_of_the_api(folder):
    expected = autopar.report.diff(*map(autopar.Plan.load, ("plan.json", "data.json")))
    assert values("diff", "plan.json", "data.json", code=1)["lines"] == list(expected.lines)
    assert run("diff", "plan.json", "data.json", code=1).stdout == f"{expected}\n"
    assert run("diff", "plan.json", "plan.json").stdout == "the plans are the same\n"


def test_an_explanation_is_the_decision_of_the_api(folder):
    planned = autopar.planned_step(*api(), autopar.Plan.load("plan.json"))
    table = autopar.report.decisions(planned, runners_up=2)
    expected = table[table["name"] == "0/a"].iloc[0]
    (row,) = values("explain", "plan.json", STEP, "0/a", "--runners-up", 2)
    assert [row["choice"], row["result"], row["why"], row["memory_bytes"]] == [
        *(expected["choice"], expected["result"], expected["why"], expected["memory_bytes"])
    ]
    assert [(other["choice"], other["extra_seconds"]) for other in row["runners_up"]] == [
        (other.choice, other.extra_seconds) for other in expected["runners_up"]
    ]
    seconds = [
        row[f"{part}_seconds"] or 0.0
        for row in values("explain", "plan.json", STEP, "*")
        for part in ("compute", "communication", "resharding")
    ]
    assert sum(seconds) == pytest.approx(planned.plan.predicted_seconds)


def test_an_equation_is_explained_by_its_number(folder):
    rows = values("explain", "plan.json", STEP, "*dot_general")
    (row,) = values("explain", "plan.json", STEP, f"#{rows[0]['eqn']}", "--cluster", "dgx_h100")
    assert row == rows[0]
    text = run("explain", "plan.json", STEP, f"#{row['eqn']}").stdout
    assert f"#{row['eqn']} {row['name']}" in text
    assert "selected" in text


def test_every_stage_of_a_pipeline_is_explained(folder, tmp_path):
    path = tmp_path / "plan.json"
    place = "steps_of_a_user:in_stages"
    plan = values("plan", place, "--cluster", "dgx_h100", "-o", path)
    numbers = range(len(plan["stages"]))
    assert len(numbers) > 1
    assert {row["stage"] for row in values("explain", path, place, "*")} == {*numbers}
    last = values("explain", path, place, "*", "--stage", numbers[-1])
    assert {row["stage"] for row in last} == {numbers[-1]}
    assert "stage" in run("explain", path, place, "*", "--stage", len(numbers), code=2).output


def test_the_stages_of_a_pipeline_over_pools_are_explained_with_the_costs_of_their_pools(
    folder, tmp_path
):
    path = tmp_path / "plan.json"
    layers = autopar.AutoLayerOption(2)
    method = autopar.PipeshardParallel(16, 4, layer_option=layers)
    plan = autopar.plan_step(*api(), method=method, cluster="p3_beside_p4d")
    plan.save(path)
    assert [stage.devices[0] for stage in plan.stages] == [0, 8]
    explained = values("explain", path, STEP, "*", "--cluster", "p3_beside_p4d")
    assert explained == values("explain", path, STEP, "*")


def test_a_plan_for_a_pool_is_explained_with_the_costs_of_the_pool(folder, tmp_path):
    path = tmp_path / "plan.json"
    pool = simulator.load_cluster("p3_beside_p4d").pools[1]
    plan = autopar.plan_step(*api(), method=autopar.ShardParallel(8), cluster=pool)
    plan.save(path)
    rows = values("explain", path, STEP, "*", "--cluster", "p3_beside_p4d")
    seconds = sum(row[name] or 0 for row in rows for name in row if name.endswith("_seconds"))
    assert seconds == pytest.approx(plan.predicted_seconds, rel=1e-9)


def test_methods_are_compared_by_the_predictions_of_their_plans(folder):
    names = ["shard", "zero3"]
    options = [text for name in names for text in ("--method", name)]
    rows = values("compare", STEP, "--cluster", "dgx_h100", *options)
    methods = [autopar.ShardParallel(), autopar.Zero3Parallel()]
    for name, method in zip(names, methods, strict=True):
        plan = autopar.plan_step(*api(), method=method, cluster="dgx_h100")
        expected = autopar.predict(*api(), plan, "dgx_h100", fidelity="analytic")
        assert rows[name]["seconds"] == expected.seconds
    assert "zero2" in run("compare", STEP, "--cluster", "dgx_h100").stdout


def test_a_method_without_a_plan_has_its_reason_instead(folder):
    clusters = ["--cluster", "p3_beside_p4d", "--cluster", "dgx_h100"]
    rows = values("compare", STEP, *clusters, "--method", "data")
    assert "error" in rows["data, p3_beside_p4d"]
    assert rows["data, dgx_h100"]["seconds"] > 0
    text = run("compare", STEP, *clusters, "--method", "data").stdout
    assert "data, p3_beside_p4d: no plan: " in text
    alone = run("compare", STEP, "--cluster", "p3_beside_p4d", "--method", "data", code=1)
    assert "data: " in alone.output


def test_a_new_step_plans_as_it_is(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    printed = run("new", "my_first_step.py").stdout
    assert printed == "next: autopar plan my_first_step:make_step --cluster dgx_h100\n"
    command = printed.split()[2:]
    run(*command, "--method", "zero2")
    assert autopar.Plan.load("plan.json").step == "train_step"
    assert "--force" in run("new", "my_first_step.py", code=2).output
    run("new", "my_first_step.py", "--force")


def test_clusters_are_listed():
    names = [*cluster_names(), *heterogeneous_cluster_names()]
    assert [row["name"] for row in values("clusters")] == names
    table = run("clusters").stdout
    assert all(name in table for name in names)
    assert "1 x 8 Tesla V100-SXM2-16GB + 1 x 8 NVIDIA A100-SXM4-40GB" in table


def test_a_saved_program_is_simulated_as_by_the_api(folder, tmp_path):
    plan = autopar.Plan.load("plan.json")
    program = autopar.compile_step(*api(), plan, "dgx_h100", fidelity="analytic")
    simulator.save_program(program, tmp_path / "step.json")
    row = values("simulate", tmp_path / "step.json", "--cluster", "dgx_h100")["dgx_h100"]
    assert row["seconds"] == simulator.predict(program, simulator.load_cluster("dgx_h100")).seconds
    assert "autopar.compile_step" in run("simulate", "plan.json", code=2).output


SCENARIO = Path(simulator.transformer.__file__).parent / "examples" / "gpt3_175b.yaml"


def test_a_transformer_is_predicted_from_its_sizes():
    options = ["--cluster", "dgx_h100", "--set", "execution.tensor=4"]
    rows = values("llm", SCENARIO, *options, code=1)
    assert rows["dgx_h100"]["seconds"] > 0
    assert not rows["dgx_h100"]["fits"]


def test_a_published_set_is_compared():
    (published,) = values("validate", "korthikanti-table5", "--no-write")
    assert published["mape"] > 0


def test_a_schema_is_printed():
    assert json.loads(run("schema", "device").stdout) == SCHEMAS["device"]()


def test_collectives_are_fitted(tmp_path):
    table = tmp_path / "rows.csv"
    rows = [f"toy,all_reduce,{n},{b},{b / 100 + n}" for n in (2, 4) for b in (1e3, 1e5, 1e7)]
    table.write_text("\n".join(["gpu,kind,size,bytes,us", *rows]))
    (error,) = values("fit-profiles", table, "-o", tmp_path / "links.yaml")
    assert error["kind"] == "all_reduce"
    assert (tmp_path / "links.yaml").exists()


def test_the_simulator_alone_has_its_subcommands_without_jax():
    code = "import sys, simulator.cli; print(sorted({'jax', 'autopar'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    commands = {command.callback for command in app.registered_commands}
    alone = {command.callback for command in simulator.cli.app.registered_commands}
    assert alone <= commands


FIT = ("fit", "steps_of_a_user:of_batch", "--cluster", "dgx_h100", "--method", "data")


def test_the_largest_batch_is_that_of_the_api(folder, tmp_path):
    options = ["--largest", "batch", "--memory-budget", "6.2e6", "--no-confirm"]
    found = values(*FIT, *options, "-o", tmp_path / "fit.json")
    expected = autopar.fit(
        load_function("steps_of_a_user:of_batch").made,
        "dgx_h100",
        largest="batch",
        method=autopar.DataParallel(memory_budget=6.2e6),
        confirm=False,
    )
    assert expected.refused is not None
    assert found["size"] == expected.size
    assert found["refused"]["size"] == expected.refused.size == expected.size + 8
    assert autopar.Plan.load(tmp_path / "fit.json").stages == expected.plan.stages
    names = {name for name in dir(expected) if not name.startswith("_")} - {"plan"}
    assert set(found) == names | {"predicted_bytes", "predicted_seconds"}


def test_savings_of_a_step_that_cannot_fit_are_a_negative_answer(folder, monkeypatch):
    plan_changes = fit_command.memory_savings
    answers = []

    def planned_once(*args, **options):
        if not answers:
            answers.append(plan_changes(*args, **options))
        return answers[0]

    monkeypatch.setattr(fit_command, "memory_savings", planned_once)
    options = ["--cluster", "cpu-virtual", "--method", "data", "--memory-budget", "1e4"]
    found = values("savings", STEP, *options, code=1)
    assert not found["fits"]
    assert found["num_bytes"] > found["budget"] == 1e4
    assert set(found["alone"][0]) == {"change", "num_bytes", "saved_bytes", "seconds", "fits"}
    assert "in order, until it fits:" in run("savings", STEP, *options, code=1).stdout


def test_json_has_the_names_of_the_python_api(folder):
    """The table of the page on the command line lists what is compared here."""
    plan = autopar.Plan.load("plan.json")
    assert set(values("show", "plan.json")) == set(autopar.Plan.model_fields)
    prediction = autopar.predict(*api(), plan, "dgx_h100", fidelity="analytic")
    names = set(prediction.row())
    assert set(values("predict", "plan.json", STEP, "--cluster", "dgx_h100")["dgx_h100"]) == names
    compared = values("compare", STEP, "--cluster", "dgx_h100", "--method", "shard")
    assert set(compared["shard"]) == names
    (row,) = values("explain", "plan.json", STEP, "0/a")
    table = autopar.report.decisions(autopar.planned_step(*api(), plan))
    assert set(row) == {"stage", *table.columns}
    assert all(set(other) == {"choice", "extra_seconds"} for other in row["runners_up"])
    assert [*values("diff", "plan.json", "plan.json")] == ["lines"]
    assert all([*row] == ["name", "devices", "description"] for row in values("clusters"))


def complete(words, *, shell="zsh"):
    """Return what a shell is offered after the words of a command line."""
    environment = {
        "_AUTOPAR_COMPLETE": f"complete_{shell}",
        "_TYPER_COMPLETE_ARGS": f"autopar {words}",
        "COMP_WORDS": f"autopar {words}",
        "COMP_CWORD": str(len(words.split()) + words.endswith(" ")),
    }
    result = CliRunner().invoke(app, [], env=environment, prog_name="autopar")
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize(
    ("words", "offered", "not_offered"),
    [
        ("pl", ["plan"], ["predict", "diff"]),
        ("plan step --method zer", ["zero2", "zero3"], ["shard"]),
        ("plan step --cluster dgx_", ["dgx_h100", "dgx_a100_80"], ["p3_beside_p4d"]),
        ("predict plan.json step --cluster p3_", ["p3_beside_p4d"], ["dgx_h100"]),
        ("compare step --cl", ["--cluster"], ["--method"]),
        ("validate mt", ["mt-nlg"], ["simumax-time"]),
        ("schema dev", ["device"], ["cluster"]),
        ("llm scenario.yaml --backend jit", ["jitted"], ["eager"]),
    ],
)
def test_a_shell_completes_names(words, offered, not_offered):
    text = complete(words)
    assert all(name in text for name in offered)
    assert not any(f'"{name}"' in text for name in not_offered)
    lines = complete(words, shell="bash").splitlines()
    assert set(offered) <= set(lines)
    assert not set(not_offered) & set(lines)


def test_completion_has_a_script_for_the_shell(monkeypatch):
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    result = CliRunner().invoke(app, ["--show-completion", "bash"], prog_name="autopar")
    assert result.exit_code == 0
    assert "_AUTOPAR_COMPLETE=complete_bash" in result.stdout


@pytest.mark.parametrize(("terminal", "as_json"), [(True, False), (True, True), (False, False)])
def test_progress_is_a_bar_on_a_terminal_only(monkeypatch, capsys, terminal, as_json):
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes stderr for a terminal
    with planning_progress("planning", as_json=as_json):
        log_progress("half of it", 1, 2)
    assert ("half of it" in capsys.readouterr().err) == (terminal and not as_json)


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_long_description_leaves_room_for_the_estimate(monkeypatch, capsys, width):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(width))
    with progress_bar("planning", total=10) as bar:
        bar.update("a long description " * 9, completed=5, expected=7200)
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err).splitlines()
    assert any(re.search(r"a long.* 0:00:00 of about \d:\d\d:\d\d", line) for line in lines)


def test_planning_counts_to_its_end_in_one_direction_after_an_estimate(folder):
    shares, expected = [], []

    def listener(_text, share, seconds):
        shares.append(share)
        expected.append(seconds)

    cluster = simulator.load_cluster("dgx_h100")
    with progress_listener(listener):
        plan_with(MethodName.SHARD, load_step(STEP), cluster, 2)
    known = [share for share in shares if share is not None]
    assert known == sorted(known)
    assert known[0] == 0
    assert known[-1] == pytest.approx(1)
    assert len(set(known)) > 20  # equations are counted, not only the parts of planning
    first = next(i for i, seconds in enumerate(expected) if seconds)
    assert not any(shares[:first]), "an estimate precedes the work"


@pytest.mark.parametrize(
    ("elapsed", "share", "expected", "estimate"),
    [(0, 0, 30, 30), (10, 0.5, None, 20), (10, 0.5, 30, 20.9), (20, 1, 3000, 20)],
)
def test_estimates_go_from_the_expected_seconds_to_those_that_elapse(
    elapsed, share, expected, estimate
):
    assert estimated_seconds(elapsed, share, expected) == pytest.approx(estimate, rel=0.01)
    assert estimated_seconds(3, 0, None) is None


def test_every_subcommand_that_prints_values_prints_json():
    # `new` prints the next command, `schema` always prints JSON, `report` writes JSON in its page
    others = {"new", "schema", "report"}
    for command in app.registered_commands:
        assert command.callback is not None
        name = command.callback.__name__.replace("_", "-")
        assert ("--json" in run(name, "--help").stdout) == (name not in others)


def test_what_a_step_prints_is_not_part_of_the_result(folder, tmp_path):
    result = run("plan", "steps_of_a_user:prints", *PLAN[1:], "-o", tmp_path / "p.json", "--json")
    assert autopar.Plan.from_json(result.stdout).step == "noisy"
    assert result.stderr.startswith("from make\nfrom the step\n")


def test_a_step_that_fits_nowhere_is_a_negative_answer(folder, tmp_path):
    path = tmp_path / "p.json"
    result = run("plan", "steps_of_a_user:too_large", "--cluster", "h200", "-o", path, code=1)
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert "fits into 150 GB per device" in line
    assert not path.exists()


PLAN = ("plan", "--cluster", "dgx_h100")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*PLAN, "nowhere:make_step"), "there is no module 'nowhere' in"),
        ((*PLAN, "nowhere.inside:make_step"), "there is no module 'nowhere' in"),
        ((*PLAN, "nowhere.py:make_step"), "nowhere.py: there is no such file"),
        ((*PLAN, "make_step"), "'make_step': expected MODULE:FUNCTION"),
        ((*PLAN, "steps_of_a_user:make_steps"), "has no function 'make_steps'; it has make_step"),
        ((*PLAN, "exits:make_step"), "importing exits raises SystemExit (line 1 of exits.py): 3"),
        (
            (*PLAN, "exits.py:make_step"),
            "importing exits.py raises SystemExit (line 1 of exits.py)",
        ),
        ((*PLAN, "needs:make_step"), "importing needs raises ModuleNotFoundError (line 1"),
        ((*PLAN, "broken:make_step"), "importing broken raises SyntaxError"),
        ((*PLAN, "steps_of_a_user:raises_in_make"), "RuntimeError (line 39 of steps_of_a_user.py)"),
        ((*PLAN, "steps_of_a_user:raises_in_step"), "raises_in_step raises TypeError (line 7 of"),
        ((*PLAN, "steps_of_a_user:depends_on_a_value"), "It depends on the value of an argument"),
        ((*PLAN, "steps_of_a_user:returns_nothing"), "returns None; expected (step, args)"),
        ((*PLAN, "steps_of_a_user:returns_no_arguments"), "returns a function and a int"),
        ((*PLAN, "steps_of_a_user:with_wrong_option"), "the option 'batch_argnum'; expected some"),
        (
            (*PLAN, "steps_of_a_user:with_wrong_method"),
            "with_wrong_method returns is 'shard', expected",
        ),
        ((*PLAN, "steps_of_a_user:with_options_in_a_list"), "returns options [1]; expected a dict"),
        ((*PLAN, "steps_of_a_user:needs_arguments"), "needs width; expected a function without"),
        ((*PLAN, "steps_of_a_user:exits"), "steps_of_a_user:exits raises SystemExit"),
        ((*PLAN, "steps_of_a_user:returns_texts"), "step can't be traced: Argument 'a' of type"),
        ((*PLAN, "steps_of_a_user:returns_a_number"), "returns a int and a tuple; expected the"),
        ((*PLAN, "folder:make_step"), "folder has no function 'make_step'"),
        ((*PLAN, "folder.py:make_step"), "folder.py: there is no such file"),
        (("plan", STEP, "--cluster", "folder"), "unknown cluster 'folder'"),
        (("plan", STEP, "--cluster", "cluster.yaml"), "cluster.yaml: "),
        (("plan", STEP, "--cluster", "broken.yaml"), "broken.yaml: is not YAML: line 1"),
        ((*PLAN, STEP, "--hosts", "0"), "Invalid value for '--hosts'"),
        ((*PLAN, STEP, "--hosts", "many"), "Invalid value for '--hosts'"),
        ((*PLAN, STEP, "--micro-batches", "-1"), "Invalid value for '--micro-batches'"),
        ((*PLAN, STEP, "-o", "folder"), "folder: can't be written (it is a folder)"),
        ((*PLAN, STEP, "more"), "unexpected extra argument"),
        (("plna", STEP), "No such command 'plna'. Did you mean 'plan'"),
        (("show",), "Missing argument"),
        (("show", "empty.json"), "empty.json: not a plan: is not JSON"),
        (("show", "binary.json"), "binary.json: is not UTF-8: byte 0x80 in line 2"),
        (("show", "folder"), "folder: can't be read (Is a directory)"),
        (("predict", "empty.json", STEP, "--cluster", "dgx_h100"), "empty.json: not a plan"),
        (("explain", "plan.json", STEP, "*", "--runners-up", "-1"), "'--runners-up'"),
        (("explain", "plan.json", STEP, "*", "--stage", "one"), "'--stage'"),
        (("explain", "plan.json", STEP, "*", "--stage", "1"), "the plan is not a pipeline"),
        (
            ("explain", "plan.json", STEP, "*", "--cluster", "dgx_a100_80"),
            "the plan is for cluster 'dgx_h100', but --cluster is 'dgx_a100_80'",
        ),
        (("explain", "plan.json", STEP, "*", "--cluster", "folder"), "unknown cluster 'folder'"),
        (("compare", STEP, "--cluster", "dgx_h100", "--method", "sharded"), "is not one of"),
        (("simulate", "program.json"), "expected a program that save_program wrote"),
        (("simulate", "folder"), "Is a directory"),
        (("simulate", "binary.json"), "is not UTF-8"),
        (("llm", "folder"), "Is a directory"),
        (("llm", "nowhere.yaml"), "No such file"),
        (("llm", SCENARIO, "--backend", "fast"), "'fast'"),
        (("validate", "--data", "nowhere"), "nowhere: is neither a file nor a folder"),
        (("validate", "--data", "folder"), "folder: no rows to compare"),
        (("validate", "--worst", "-1"), "Invalid value for '--worst'"),
        (("validate", "mt-nlg", "--output", "plan.json"), "it is a file"),
        ((*FIT,), "neither of largest and fewest are given"),
        ((*FIT, "--largest", "width"), "'width' is not one of 'batch', 'sequence', 'layers'"),
        (
            ("fit", "steps_of_a_user:needs_depth", "--cluster", "h200", "--largest", "layers"),
            "takes (width, depth), expected a function of the size",
        ),
        (("fit-profiles", "folder"), "Is a directory"),
        (("fit-profiles", "empty.json", "-o", "links.yaml"), "empty.json: is not CSV"),
        (("calibrate", "mine.yaml", "--budget", "0"), "Invalid value for '--budget'"),
        (("new", "plan.json"), "expected the name of a Python module"),
        (("new", "broken.py"), "broken.py exists"),
        (("new", "jax.py"), "jax.py would hide the installed module jax"),
        (
            ("fit", STEP, "--cluster", "h200", "--fewest", "gpus", "--hosts", "3"),
            "--hosts 3 is given, but --fewest searches the number of hosts",
        ),
        (("plan", STEP, "--cluster", "dgx_h1000"), "unknown cluster 'dgx_h1000'; expected one of"),
        (("plan", STEP, "--cluster", "nowhere.yaml"), "nowhere.yaml: can't be read"),
        (("plan", STEP), "Missing option '--cluster'"),
        ((*PLAN, STEP, "--method", "zero4"), "'zero4' is not one of"),
        ((*PLAN, STEP, "--micro-batch", "2"), "No such option: --micro-batch"),
        ((*PLAN, STEP, "--method", "data", "--micro-batches", "3"), "can't be cut into 3"),
        ((*PLAN, STEP, "-o", "nowhere/plan.json"), "nowhere/plan.json: can't be written"),
        (("plan", STEP, "--cluster", "h200", "--hosts", "2"), "'h200' has no inter_host"),
        (("plan", STEP, "--cluster", "p3_beside_p4d", "--hosts", "3"), "pools of unlike hosts"),
        (("show", "truncated.json"), "truncated.json: not a plan: is not JSON"),
        (("show", "nowhere.json"), "nowhere.json: can't be read"),
        (("show", "exits.py"), "exits.py: not a plan"),
        (("diff", "plan.json", "truncated.json"), "truncated.json: not a plan"),
        (
            ("predict", "plan.json", "steps_of_a_user:make_other", "--cluster", "dgx_h100"),
            "this plan is for step with fingerprint",
        ),
        (("predict", "plan.json", STEP, "--cluster", "dgx"), "unknown cluster 'dgx'"),
        (("explain", "plan.json", STEP, "0/c"), "no such value; expected an input"),
        (("explain", "data.json", "steps_of_a_user:make_other", "0/a"), "this plan is for step"),
        (("compare", STEP, "--cluster", "dgx"), "unknown cluster 'dgx'"),
        (
            ("compare", "steps_of_a_user:raises_in_step", "--cluster", "dgx_h100"),
            "raises_in_step raises TypeError",
        ),
        (("simulate", "truncated.json"), "expected a program that save_program wrote"),
        (("llm", "data.json"), "expected"),
        (("llm", SCENARIO, "--cluster", "dgx"), "unknown cluster 'dgx'"),
        (("validate", "nothing"), "unknown set 'nothing'; expected some of"),
        (("schema", "rack"), "unknown kind of file 'rack'; expected one of"),
        (("validate", "--data", "x" * 300), "is neither a file nor a folder"),
        (("fit-profiles", "exits.py", "-o", "nowhere/x.yaml"), "can't be written"),
        (("fit-profiles", "/"), "/: is a folder; expected a .csv file"),
        (("new", f"{'x' * 300}.py"), "can't be written"),
        ((*PLAN, f"{'x' * 300}.py:make_step"), "there is no such file"),
        (("calibrate", "mine.yam"), "expected a path that ends in .yaml"),
        (("new", "my-step.py"), "expected the name of a Python module"),
        (("new", "nowhere/my_step.py"), "can't be written"),
    ],
)
def test_bad_input_is_one_line_that_says_what_to_do(folder, arguments, message):
    before = sorted(Path().iterdir())
    result = run(*arguments, code=2)
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("autopar")
    assert message in line
    assert sorted(Path().iterdir()) == before


def test_the_version_is_that_of_the_package_and_needs_no_command():
    result = run("--version")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"autopar {version('autopar')}, jax {version('jax')}\n"
