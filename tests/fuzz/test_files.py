"""Mutated files of every kind are refused in a bounded line, or used with finite results."""

import json
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from autopar import plan_step
from autopar.plan import Plan
from experiments.sweep import make_sweep
from simulator import Cluster, load_cluster, load_program, predict
from simulator.calibration import fit_collective_profile
from simulator.files import read_table, read_text, read_yaml
from simulator.hardware.collective_profile import CollectiveProfile
from simulator.hardware.description import read, validate
from simulator.hardware.device import load_device
from simulator.hardware.kernel_profile import KernelProfile
from simulator.hlo import parse_hlo, temporary_memory
from simulator.program import Program, Run
from simulator.program_file import save_program
from simulator.transformer import Machine
from simulator.transformer import predict as predict_scenario
from simulator.transformer.scenario_files import Scenario
from tests.fuzz.outcomes import Outcomes
from tests.simulator.test_program_file import PROGRAM
from tests.steps import mlp_args, mlp_step

pytestmark = pytest.mark.fuzz

INPUTS = 2000
LINE, MOST = 2000, 20_000
"""Most characters of one line of an error, and of the error, which has a line per wrong field."""

UNEXPECTED = (UnicodeDecodeError, UnicodeEncodeError, ValidationError, json.JSONDecodeError)
"""Subclasses of ValueError that say nothing of the file."""
ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "simulator"

NUMBERS = (
    "0", "-1", "1", "2", "3.5", "1e308", "-1e308", "1e-308", "5e-324", ".inf", "-.inf", ".nan",
    "NaN", "Infinity", "1e400", "9" * 30, "9" * 400, "9" * 5000, "0x" + "f" * 5000, "1e15", "1e-15",
    "100000000", "true", "null",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    1e300,
    10**20,
    "",
    "x" * 10**5,
    [],
    {},
    [[]],
    {"a": {"b": [1]}},
    "\0",
    "../..",
    2.5,
)


def extreme_number(text: str, rng: random.Random) -> str:
    """Return `text` with one of its numbers replaced."""
    starts = [
        at
        for at, char in enumerate(text)
        if char.isdigit() and not (at and (text[at - 1].isalnum() or text[at - 1] == "."))
    ]
    if not starts:
        return text
    start = end = rng.choice(starts)
    while end < len(text) and (text[end].isdigit() or text[end] in ".e"):
        end += 1
    return text[:start] + rng.choice(NUMBERS) + text[end:]


def of_lines(text: str, rng: random.Random) -> str:
    """Return `text` with lines deleted, duplicated or swapped."""
    lines = text.splitlines(keepends=True)
    one, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    match rng.randrange(3):
        case 0:
            del lines[one]
        case 1:
            lines.insert(other, lines[one])
        case _:
            lines[one], lines[other] = lines[other], lines[one]
    return "".join(lines)


def nested(text: str, rng: random.Random) -> str:
    """Return `text` with brackets deep inside that are not closed."""
    at = rng.randrange(len(text) + 1)
    return text[:at] + rng.choice("[({") * rng.choice((1, 3, 200, 20_000)) + text[at:]


def bytes_mutated(text: str, rng: random.Random) -> bytes:
    """Return `data` with flipped bytes, with a missing end, or with bytes that are no text."""
    data = bytearray(text.encode())
    match rng.randrange(3):
        case 0:
            for _ in range(rng.randrange(1, 4)):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        case 1:
            del data[rng.randrange(len(data)) :]
        case _:
            at = rng.randrange(len(data))
            data[at:at] = rng.choice((b"\xff", b"\xc3\x28", b"\x80", b"\xed\xa0\x80", b"\0"))
    return bytes(data)


def value_mutated(data: Any, rng: random.Random) -> Any:
    """Return the tree `data` with one of its values or keys replaced, removed or wrapped."""
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key in (
            list(node)
            if isinstance(node, dict)
            else range(len(node))
            if isinstance(node, list)
            else ()
        ):
            places.append((node, key))
            walk(node[key])

    walk(data)
    if not places:
        return data
    node, key = rng.choice(places)
    match rng.randrange(5):
        case 0:
            node[key] = rng.choice(VALUES)
        case 1 if isinstance(node, dict):
            node[rng.choice((f"{key}x", str(key)[:-1], "x" * 10**5, 5))] = node.pop(key)
        case 2:
            del node[key]
        case 3:
            node[key] = rng.choice(([node[key]], {"a": node[key]}))
        case _ if isinstance(node[key], int | float):
            node[key] = rng.choice(
                (
                    node[key] * 10.0 ** rng.randrange(-20, 20),
                    -node[key],
                    0,
                    10 ** rng.randrange(19),
                    0.5,
                )
            )
        case _:
            node[key] = rng.choice(VALUES)
    return data


def mutated(
    text: str, rng: random.Random, load: Callable[[str], Any] | None, dump: Callable[[Any], str]
) -> bytes:
    """Return a file with one to three mutations, the last of which may change its bytes."""
    for _ in range(rng.randrange(1, 4)):
        kind = rng.randrange(7)
        if kind < 3 and load is not None:
            text = dump(value_mutated(load(text), rng))
            continue
        match kind:
            case 4:
                text = of_lines(text, rng) if text else text
                load = None  # it may be no YAML or JSON any more
            case 5:
                text, load = nested(text, rng), None
            case 6 if text:
                return bytes_mutated(text, rng)
            case _:
                text, load = extreme_number(text, rng), None
    return text.encode("utf-8", "surrogatepass")


def is_finite(value: object) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def outcome_of(numbers: Mapping[str, Any]) -> str:
    """Return "accepted" if the results are finite.

    Rates are nan for a program that does not give its number of examples.
    """
    undefined = {"examples_per_s", "tokens_per_s", "tflop_per_s_per_device", "mfu", "hfu"}
    wrong = {
        name: value
        for name, value in numbers.items()
        if not is_finite(value) and name not in undefined
    }
    return f"NOT FINITE: {wrong}" if wrong else "accepted"


STEP = replace(PROGRAM, costed_for="")


def use_cluster(path: Path) -> str:
    cluster = load_cluster(path)
    if not isinstance(cluster, Cluster):
        return outcome_of({"devices": cluster.num_devices})
    return outcome_of(predict(STEP, cluster).row()) if cluster.num_devices >= 4 else "accepted"


def use_device(path: Path) -> str:
    device = load_device(path.name, path)
    where = Cluster.load("dgx_a100_80").model_copy(update={"device": device})
    return outcome_of(predict(STEP, where).row())


def use_kernels(path: Path) -> str:
    kernels = validate(KernelProfile, read(path), path)
    device = Cluster.load("dgx_a100_80").device.model_copy(update={"kernels": kernels})
    where = Cluster.load("dgx_a100_80").model_copy(update={"device": device})
    return outcome_of(predict(STEP, where).row())


def use_collectives(path: Path) -> str:
    profile = validate(CollectiveProfile, read(path), path)
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute")
    return outcome_of(
        {kind: profile.curve(kind).seconds(kind, 1e9, size) for kind in kinds for size in (2, 8)}
    )


def use_scenario(path: Path) -> str:
    found = Scenario.load(path)
    hosts = -(-found.execution.devices // 8)
    machine = Machine(Cluster.load("dgx_a100_80").with_size(hosts))
    return outcome_of(predict_scenario(found.model, found.execution, machine).row())


def use_program(path: Path) -> str:
    return outcome_of(predict(load_program(path), Cluster.load("dgx_a100_80")).row())


def use_plan(path: Path) -> str:
    plan = Plan.load(path)
    str(plan)
    return outcome_of(
        {
            "seconds": plan.predicted_seconds,
            "bytes": plan.predicted_bytes,
            "planning": plan.planning_seconds,
        }
    )


def use_hlo(path: Path) -> str:
    text = read_text(path)
    temporary_memory(text)
    program = Program((tuple(range(8)),), ((Run(0, "S"),),), {"0S": parse_hlo(text)})
    return outcome_of(predict(program, Cluster.load("dgx_a100_80")).row())


def use_sweep(path: Path) -> str:
    given = read_yaml(path)
    if not isinstance(given, dict):
        raise ValueError("snakemake takes only mappings")
    return "accepted" if make_sweep(given).cells else "EMPTY SWEEP"


def use_table(path: Path) -> str:
    profile, _ = fit_collective_profile(read_table(path), "fuzz")
    return outcome_of({"seconds": profile.all_reduce.seconds("all_reduce", 1e6, 4)})


def dump_yaml(data: Any) -> str:
    return yaml.safe_dump(data, sort_keys=False)


COLLECTIVES = "\n".join(
    [
        "gpu,kind,size,bytes,us",
        *(
            f"toy,all_reduce,{size},{count},{count / 100 + size}"
            for size in (2, 4)
            for count in (1000, 10**5, 10**7, 10**8)
        ),
    ]
)
SWEEP = {
    **yaml.safe_load((ROOT / "experiments/config/default.yaml").read_text()),
    **yaml.safe_load((ROOT / "experiments/config/smoke.yaml").read_text()),
}


@pytest.fixture(scope="module")
def plan() -> str:
    """Return the text of the file of a small plan."""
    return plan_step(mlp_step, mlp_args(), cluster="p3.16xlarge", mesh_shape=(2, 4)).to_json()


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the text of the file of a small program."""
    path = tmp_path_factory.mktemp("program") / "step.json"
    save_program(STEP, path)
    return path.read_text()


def shipped(pattern: str) -> list[str]:
    return [path.read_text() for path in sorted(SHIPPED.glob(pattern))]


KINDS: dict[str, tuple[str, list[str] | str, Callable[[Path], str]]] = {
    "clusters": ("yaml", shipped("hardware/clusters/*.yaml"), use_cluster),
    "heterogeneous clusters": (
        "yaml",
        shipped("hardware/clusters/heterogeneous/*.yaml"),
        use_cluster,
    ),
    "devices": ("yaml", shipped("hardware/devices/*.yaml"), use_device),
    "kernel profiles": ("yaml", shipped("hardware/profiles/kernels/*.yaml"), use_kernels),
    "collective profiles": (
        "yaml",
        shipped("hardware/profiles/collectives/*.yaml"),
        use_collectives,
    ),
    "scenarios": ("yaml", shipped("transformer/examples/*.yaml"), use_scenario),
    "sweeps": ("yaml", [dump_yaml(SWEEP)], use_sweep),
    "programs": ("json", "program", use_program),
    "plans": ("json", "plan", use_plan),
    "tables": ("csv", [COLLECTIVES], use_table),
    "HLO texts": (
        "txt",
        [path.read_text() for path in sorted((ROOT / "tests/simulator/data").glob("*.hlo.txt"))],
        use_hlo,
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_mutated_file_is_refused_in_a_line_or_gives_finite_numbers(
    kind: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
) -> None:
    ending, texts, use = KINDS[kind]
    originals: list[str] = texts if isinstance(texts, list) else [request.getfixturevalue(texts)]
    load, dump = {"yaml": (yaml.safe_load, dump_yaml), "json": (json.loads, json.dumps)}.get(
        ending, (None, str)
    )
    path, outcomes = tmp_path / f"mutated.{ending}", Outcomes()
    for original in originals:
        path.write_text(original)
        outcomes.add("the original", lambda: use(path).upper().replace("ACCEPTED", "accepted"), ())
    for seed in range(INPUTS):
        rng = random.Random(seed)
        path.write_bytes(mutated(rng.choice(originals), rng, load, dump))

        def attempt() -> str:
            try:
                return use(path)
            except ValueError as error:
                if type(error) in UNEXPECTED:
                    raise RuntimeError(f"{type(error).__name__}: {error}") from error
                text = str(error)
                if len(text) > MOST or max(map(len, text.splitlines() or [""])) > LINE:
                    return f"LONG TEXT of {len(text)}: {text[:200]}"
                raise

        outcomes.add(f"seed {seed}", attempt, (ValueError,), seconds=10)
    record_property(f"outcomes of {kind}", dict(outcomes.counts))
    assert not outcomes.faults, "\n".join(outcomes.faults[:20])
