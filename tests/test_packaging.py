"""The distribution: licences, metadata, what a base install does without JAX and without CUDA."""

import json
import os
import re
import subprocess
import sys
import tomllib
from email import message_from_string
from fnmatch import fnmatch
from hashlib import sha256
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml

import simulator
from simulator import entry_point
from simulator.report.figure_style import pyplot
from simulator.transformer import predict
from simulator.transformer.scenario_files import Scenario, load_machine

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
EXTRAS = PROJECT["optional-dependencies"]
EXAMPLE = Path(simulator.__file__).parent / "transformer" / "examples" / "gpt3_175b.yaml"


def run(*command: str | Path, folder: Path, **environment: str) -> str:
    """Return what a command prints, run where the checkout is not importable."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    completed = subprocess.run(
        command, cwd=folder, env=inherited | environment, capture_output=True, text=True
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


# Licences and metadata


def test_the_licence_is_the_unmodified_text_of_apache_2():
    # the hash of the text at www.apache.org/licenses/LICENSE-2.0.txt
    digest = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
    assert sha256((ROOT / "LICENSE").read_bytes()).hexdigest() == digest
    assert PROJECT["license"] == "Apache-2.0"


def test_the_notice_lists_every_data_file_and_only_files_that_exist():
    notice = (ROOT / "NOTICE").read_text()
    patterns = re.findall(r"^  ([\w./*-]+)(?: \(.*\))?$", notice, re.MULTILINE)
    files = {
        path.relative_to(ROOT).as_posix()
        for folder in ("simulator", "tests/golden", "tests/simulator/data", "experiments")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    written_here = {
        "simulator/py.typed",
        "simulator/validation/data/README.md",
    }
    data = [
        file
        for file in sorted(files - written_here)
        if file.startswith(("simulator", "tests", "experiments/measurements"))
        and not file.endswith(".py")
    ]
    assert len(data) > 50
    assert [file for file in data if not any(fnmatch(file, p) for p in patterns)] == []
    assert [p for p in patterns if not any(fnmatch(file, p) for file in files)] == []


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])
    assert [author["name"] for author in PROJECT["authors"]] == [
        author["name"] for author in citation["authors"]
    ]


def test_the_changelog_has_a_section_for_what_is_not_released():
    assert "\n## [Unreleased]" in (ROOT / "CHANGELOG.md").read_text()


def test_both_packages_are_marked_as_typed():
    assert all((ROOT / package / "py.typed").is_file() for package in ("autopar", "simulator"))
    assert "Typing :: Typed" in PROJECT["classifiers"]


# Dependencies


def test_no_package_for_gpus_is_a_base_dependency():
    wheels = [name for name in PROJECT["dependencies"] if re.search("cuda|nvidia|nvcc", name)]
    assert wheels == []


def test_the_development_environment_has_all_extras_that_need_no_gpu():
    [own] = [
        name
        for name in PYPROJECT["dependency-groups"]["dev"]
        if isinstance(name, str) and name.startswith("autopar[")
    ]
    assert set(own.removeprefix("autopar[").rstrip("]").split(",")) == set(EXTRAS) - {
        "cuda12",
        "cuda13",
    }


def test_extras_that_errors_name_exist():
    modules = [*(ROOT / "autopar").rglob("*.py"), *(ROOT / "simulator").rglob("*.py")]
    sources = [path.read_text() for path in modules]
    named = {name for source in sources for name in re.findall(r"autopar\[(\w+)\]", source)}
    assert {"compile", "figures", "ray"} <= named <= set(EXTRAS)


def test_without_matplotlib_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"'autopar\[figures\]'"):
        pyplot()


# The simulator without JAX

WITHOUT_JAX = """
import sys


class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("jax", "jaxlib", "flax", "orbax", "optax", "autopar"):
            raise ModuleNotFoundError(f"{name} is blocked", name=name)


sys.meta_path.insert(0, Blocker())

import simulator
from simulator.transformer import predict
from simulator.transformer.scenario_files import Scenario, load_machine

scenario = Scenario.load(sys.argv[1])
machine = load_machine("dgx_h100", scenario.execution.devices, "eager")
print(repr(predict(scenario.model, scenario.execution, machine).seconds))
"""


def test_the_simulator_predicts_the_same_without_jax(tmp_path):
    output = run(sys.executable, "-c", WITHOUT_JAX, EXAMPLE, folder=tmp_path, PYTHONPATH=str(ROOT))
    scenario = Scenario.load(EXAMPLE)
    machine = load_machine("dgx_h100", scenario.execution.devices, "eager")
    assert float(output) == predict(scenario.model, scenario.execution, machine).seconds


def test_the_command_without_jax_says_in_a_line_what_to_install(tmp_path):
    block = WITHOUT_JAX.partition("import simulator")[0].replace(', "autopar"', "")
    start = f"{block}from simulator.entry_point import main\nmain()\n"
    done = subprocess.run(
        [sys.executable, "-c", start, "--help"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(
        r"autopar: jax is not installed; run `pip install autopar`.*\n", done.stderr
    )


def test_an_interrupt_while_the_command_is_imported_ends_it_without_a_traceback(monkeypatch):
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(entry_point, "import_module", interrupted)
    with pytest.raises(SystemExit) as end:
        entry_point.main()
    assert end.value.code == 130


# The wheel

STEP = """
import jax
import jax.numpy as jnp

import autopar


def step(params, batch):
    def loss(params):
        hidden = jnp.tanh(batch @ params["first"])
        return jnp.mean((hidden @ params["second"]) ** 2)

    gradients = jax.grad(loss)(params)
    return jax.tree.map(lambda value, gradient: value - 0.1 * gradient, params, gradients)


def shape(*dims):
    return jax.ShapeDtypeStruct(dims, jnp.float32)


args = {"first": shape(512, 2048), "second": shape(2048, 512)}, shape(256, 512)
plan = autopar.plan_step(step, args, cluster="dgx_h100", mesh_shape=(8,))
plan.save("plan.json")
print(autopar.predict(step, args, plan, "dgx_h100", fidelity="analytic").seconds)
try:
    autopar.predict(step, args, plan, "dgx_h100")
except ImportError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Return a wheel of the checkout, built from its source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    run("uv", "build", "--quiet", "--out-dir", folder, folder=ROOT)
    [path] = folder.glob("*.whl")
    return path


@pytest.mark.slow
def test_a_wheel_contains_licences_types_and_data_and_no_tests(wheel):
    with ZipFile(wheel) as archive:
        names = archive.namelist()
        [metadata] = [name for name in names if name.endswith(".dist-info/METADATA")]
        fields = message_from_string(archive.read(metadata).decode())
    info = metadata.removesuffix("METADATA")
    assert {f"{info}licenses/LICENSE", f"{info}licenses/NOTICE"} <= set(names)
    assert {"autopar/py.typed", "simulator/py.typed"} <= set(names)
    assert "simulator/hardware/clusters/dgx_h100.yaml" in names
    pages = {"report.html.j2", "base.html.j2", "base.css", "charts.js", "timeline.js"}
    assert {f"autopar/report/page_files/{page}" for page in pages} <= set(names)
    assert {name.split("/")[0] for name in names} == {"autopar", "simulator", info.rstrip("/")}
    assert fields["License-Expression"] == "Apache-2.0"
    assert set(fields.get_all("Provides-Extra", [])) == set(EXTRAS)


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory) -> Path:
    """Return the interpreter of a fresh environment with the wheel, without extras."""
    environment = tmp_path_factory.mktemp("environment") / "venv"
    # uv reads the pinned versions of dependencies from the checkout's pyproject.toml
    run("uv", "venv", "--quiet", "--python", sys.executable, environment, folder=ROOT)
    path = environment / "bin" / "python"
    run("uv", "pip", "install", "--quiet", "--python", path, wheel, folder=ROOT)
    return path


@pytest.mark.slow
def test_a_wheel_without_extras_installs_no_package_for_gpus(python):
    packages = run("uv", "pip", "list", "--quiet", "--python", python, folder=ROOT)
    assert "jaxlib" in packages
    assert not re.search("cuda|nvidia", packages)


@pytest.mark.slow
def test_a_wheel_without_extras_plans_and_predicts_and_names_the_extra_to_compile(python, tmp_path):
    (tmp_path / "step.py").write_text(STEP)
    seconds, error = run(python, "step.py", folder=tmp_path).splitlines()
    assert 0 < float(seconds) < 1
    assert "pip install 'autopar[compile]'" in error
    shown = run(python.with_name("autopar"), "show", "plan.json", folder=tmp_path, COLUMNS="200")
    assert "P(None, 'x')" in shown


@pytest.mark.slow
def test_the_command_line_of_a_wheel_plans_and_predicts_the_template_step(python, tmp_path):
    autopar = python.with_name("autopar")
    place, cluster = "my_step:make_step", ("--cluster", "dgx_h100")
    run(autopar, "new", "my_step.py", folder=tmp_path)
    run(autopar, "plan", place, *cluster, folder=tmp_path)
    predicted = run(autopar, "predict", "plan.json", place, *cluster, "--json", folder=tmp_path)
    assert json.loads(predicted)
    run(autopar, "report", "plan.json", place, folder=tmp_path)
    assert "<html" in (tmp_path / "report.html").read_text()
    assert "dgx_h100" in run(autopar, "clusters", folder=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (
            ("predict", "plan.json", "my_step:make_step", "--cluster", "h200", "--compiled"),
            "compile",
        ),
        (("validate", "mt-nlg", "--output", "figures"), "figures"),
    ],
)
def test_a_command_that_needs_an_extra_names_it_in_one_line(python, tmp_path, arguments, extra):
    autopar = python.with_name("autopar")
    run(autopar, "new", "my_step.py", folder=tmp_path)
    run(autopar, "plan", "my_step:make_step", "--cluster", "h200", folder=tmp_path)
    done = subprocess.run([autopar, *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert f"pip install 'autopar[{extra}]'" in line
    assert not (tmp_path / "figures").exists()


@pytest.mark.slow
def test_the_simulator_of_a_wheel_predicts_without_jax(python, tmp_path):
    assert float(run(python, "-c", WITHOUT_JAX, EXAMPLE, folder=tmp_path)) > 0
