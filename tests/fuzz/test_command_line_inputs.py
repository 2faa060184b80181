"""Mutated plans, programs, clusters and scenarios through the command line.

Each is refused in one line, with exit code 2, or is used, with finite numbers.
"""

import json
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import autopar
import simulator
from autopar.command_line import app
from tests.fuzz.outcomes import limit

pytestmark = pytest.mark.filterwarnings("always")

MODULE = """
import jax
import jax.numpy as jnp
import autopar

def step(params, batch):
    loss = lambda w: jnp.mean((jax.nn.relu(batch @ w["a"]) @ w["b"]) ** 2)
    value, gradients = autopar.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

def make_step():
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    return step, ({"a": array(64, 128), "b": array(128, 64)}, array(32, 64))

def in_stages():
    layers = autopar.AutoLayerOption(2)
    method = autopar.PipeshardParallel(8, 4, layer_option=layers)
    return *make_step(), {"method": method}
"""
STEP, PIPELINE = "fuzzed_steps:make_step", "fuzzed_steps:in_stages"
SIMULATOR = Path(simulator.__file__).parent
MOST_CHARACTERS = 2000
"""Longest line of an error, its command and its file included."""

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 2**31, 2**63, 10**30, 10**400),
    *(0.5, -0.5, 1e-300, 1e300, -1e300, float("inf"), float("-inf"), float("nan")),
    *("", "x", "1", "nan", "\0", "é\n", "x" * 10_000, "../../etc", "x,y"),
    *([], {}, [[]], [0], [0, 0], ["x"], [None], {"a": 1}, {"": None}, {"name": []}),
)


def containers(document: Any) -> list[Any]:
    """Return all lists and mappings that are not empty, outer ones first."""
    if not isinstance(document, list | dict):
        return []
    children = document.values() if isinstance(document, dict) else document
    inner = [container for child in children for container in containers(child)]
    return [document, *inner] if document else inner


def mutate(document: Any, draw: Callable[..., Any]) -> None:
    """Change one place of a tree of lists and mappings."""
    places = containers(document)
    if not places:
        return
    container = draw(st.sampled_from(places))
    keys = list(container) if isinstance(container, dict) else list(range(len(container)))
    key, other = draw(st.sampled_from(keys)), draw(st.sampled_from(keys))
    match draw(st.sampled_from(["drop", "replace", "scale", "swap", "repeat", "rename", "nest"])):
        case "drop":
            del container[key]
        case "scale" if isinstance(container[key], int | float):
            factor = draw(st.sampled_from([-1, 0, 2, 0.5, 1e3, 1e-3, 1e15, 1e-15, 10**9]))
            container[key] *= factor
        case "swap":
            pair = deepcopy(container[other]), deepcopy(container[key])
            container[key], container[other] = pair
        case "repeat" if isinstance(container, list):
            container.insert(other, deepcopy(container[key]))
        case "repeat":
            container[f"{key}2"] = deepcopy(container[key])
        case "rename" if isinstance(container, dict):
            container[draw(st.sampled_from(["", f"{key}s", key.upper(), "x" * 1000]))] = (
                container.pop(key)
            )
        case "nest":
            value = container[key]
            for _ in range(draw(st.sampled_from([1, 2, 60, 400]))):
                value = [value] if draw(st.booleans()) else {"a": value}
            container[key] = value
        case _:
            container[key] = deepcopy(draw(st.sampled_from(VALUES)))


@st.composite
def mutated(draw: Callable[..., Any], texts: list[str], is_yaml: bool) -> bytes:
    """Draw a file with one to three changes of its values, and sometimes changes of its bytes."""
    load, dump = (yaml.safe_load, yaml_text) if is_yaml else (json.loads, json.dumps)
    document = deepcopy(load(draw(st.sampled_from(texts))))
    for _ in range(draw(st.integers(0, 3))):
        mutate(document, draw)
    data = dump(document).encode("utf-8", "surrogatepass")
    match draw(st.sampled_from(["as it is", "as it is", "as it is", "cut", "insert", "empty"])):
        case "cut":
            return data[: draw(st.integers(0, len(data)))]
        case "insert":
            at = draw(st.integers(0, len(data)))
            garbage = st.sampled_from([b"\xff", b"\0", b"[" * 5000, b"{", b'"', b"\n- x", b"&a *a"])
            return data[:at] + draw(garbage) + data[at:]
        case "empty":
            return draw(st.sampled_from([b"", b"null", b"[]", b"{}", b"3", b"\xef\xbb\xbf{}"]))
        case _:
            return data


def yaml_text(document: Any) -> str:
    return yaml.safe_dump(document, allow_unicode=True, sort_keys=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a folder with steps, their plans, and a program."""
    folder = tmp_path_factory.mktemp("fuzzed")
    (folder / "fuzzed_steps.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path])
        patch.chdir(folder)
        for place, name in ((STEP, "plan.json"), (PIPELINE, "pipeline.json")):
            run("plan", place, "--cluster", "dgx_h100", "-o", name)
        from fuzzed_steps import in_stages, make_step  # pyright: ignore[reportMissingImports]

        for make, name in ((make_step, "plan"), (in_stages, "pipeline")):
            plan = autopar.Plan.load(f"{name}.json")
            program = autopar.compile_step(*make()[:2], plan, "dgx_h100")
            simulator.save_program(program, f"{name}_program.json")
        yield folder


def run(*arguments: object) -> tuple[int, str, str]:
    """Return the exit code of a command, and what it prints; check what all commands fulfil."""
    with limit(60):
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code in (0, 1, 2), result.output
    if result.exit_code == 2:
        assert result.stdout == ""
        assert result.stderr.count("\n") == 1, result.stderr
        assert len(result.stderr) < MOST_CHARACTERS, result.stderr
    elif "--json" in arguments and result.stdout:
        json.loads(result.stdout, parse_constant=not_finite)
    return result.exit_code, result.stdout, result.stderr


def not_finite(constant: str) -> None:
    raise AssertionError(f"JSON with {constant}")


def use_plan(path: Path, place: str) -> None:
    run("show", path)
    run("diff", path, "plan.json", "--json")
    run("predict", path, place, "--cluster", "dgx_h100", "--json")
    run("explain", path, place, "*", "--json")
    run("report", path, "-o", path.with_suffix(".html"))
    run("report", path, place, "--cluster", "dgx_h100", "-o", path.with_suffix(".html"))


def use_program(path: Path) -> None:
    run("simulate", path, "--cluster", "dgx_h100", "--json", "--trace", path.with_suffix(".trace"))
    run("simulate", path, "--cluster", "p3_beside_p4d")


def use_cluster(path: Path) -> None:
    run("simulate", "plan_program.json", "--cluster", path, "--json")
    run("predict", "plan.json", STEP, "--cluster", path, "--json")
    run("plan", STEP, "--cluster", path, "--method", "shard", "-o", path.with_suffix(".json"))
    run("llm", EXAMPLE, "--cluster", path, "--json")


EXAMPLE = SIMULATOR / "transformer" / "examples" / "gpt3_175b.yaml"


def use_scenario(path: Path) -> None:
    run("llm", path, "--cluster", "dgx_h100", "--json")
    run("llm", path, "--backend", "jitted")


def shipped(pattern: str) -> list[str]:
    return [path.read_text() for path in sorted(SIMULATOR.glob(pattern))]


TIERS = [pytest.param(8, id="a few"), pytest.param(500, id="500", marks=pytest.mark.slow)]


def check_all(
    count: int, texts: list[str], ending: str, use: Callable[[Path], None], tmp_path: Path
) -> None:
    """Use a number of mutated files."""
    path = tmp_path / f"mutated.{ending}"

    @settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(mutated(texts, ending == "yaml"))
    def check(data: bytes) -> None:
        path.write_bytes(data)
        use(path)

    check()


@pytest.mark.parametrize("count", TIERS)
@pytest.mark.parametrize(("name", "place"), [("plan", STEP), ("pipeline", PIPELINE)])
def test_a_mutated_plan(folder: Path, tmp_path: Path, count: int, name: str, place: str) -> None:
    texts = [(folder / f"{name}.json").read_text()]
    check_all(count, texts, "json", lambda path: use_plan(path, place), tmp_path)


@pytest.mark.parametrize("count", TIERS)
def test_a_mutated_program(folder: Path, tmp_path: Path, count: int) -> None:
    texts = [(folder / f"{name}_program.json").read_text() for name in ("plan", "pipeline")]
    check_all(count, texts, "json", use_program, tmp_path)


@pytest.mark.parametrize("count", TIERS)
def test_a_mutated_cluster(folder: Path, tmp_path: Path, count: int) -> None:
    texts = shipped("hardware/clusters/*.yaml") + shipped("hardware/clusters/heterogeneous/*.yaml")
    check_all(count, texts, "yaml", use_cluster, tmp_path)


@pytest.mark.parametrize("count", TIERS)
def test_a_mutated_scenario(folder: Path, tmp_path: Path, count: int) -> None:
    check_all(count, shipped("transformer/examples/*.yaml"), "yaml", use_scenario, tmp_path)
