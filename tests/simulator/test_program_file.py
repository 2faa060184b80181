"""Programs are saved as JSON and loaded without JAX."""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from simulator.memory import MemoryUse
from simulator.program import Free, Program, Recv, Run, Send
from simulator.program_file import ProgramError, load_program, save_program
from simulator.work import Collective, Done, Gemm, Kernel, Loop, Start
from tests.simulator.bodies import programs

GATHER = Collective("gather", "all_gather", 3.5, ((0, 1),), axis="x")
KERNEL = Kernel("dot", "gemm", 2e12, 1e9, "f16", Gemm(1, 2, 3, 4))
PROGRAM = Program(
    meshes=((0, 1), (2, 3)),
    instructions=(
        (Run(0, "F"), Send("x", 1, 4), Free(("x",))),
        (Recv("x", 0, GATHER), Run(1, "F")),
    ),
    bodies={
        "0F": (
            KERNEL,
            Start(GATHER),
            Loop(3, (Loop(2, ()), Kernel("r", "memory", 0, 1, unmodelled="mystery"))),
            Done("gather"),
        ),
        "1F": (),
    },
    memory=(MemoryUse(3, roles={"parameters": 2, "inputs": 1}), MemoryUse(temporaries=5)),
    costed_for="dgx_a100_80 0123456789ab",
    levels=((({"inputs": 3}, {}),) * 3, (({"inputs": 3}, {}),) * 2),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(programs())
def test_a_saved_program_is_loaded_unchanged(tmp_path: Path, program: Program) -> None:
    save_program(program, tmp_path / "program.json")
    assert load_program(tmp_path / "program.json") == program


def test_every_field_of_a_program_is_saved(tmp_path: Path) -> None:
    save_program(PROGRAM, tmp_path / "program.json")
    assert load_program(tmp_path / "program.json") == PROGRAM


def edited_file(path: Path, change) -> Path:
    save_program(PROGRAM, path)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda data: data["program"]["bodies"]["0F"][0].pop("flops"),
            r"program\.bodies\.0F\.0\.Kernel\.flops: Field required",
        ),
        (lambda data: data["program"].pop("meshes"), r"program\.meshes: Field required"),
        (lambda data: data["program"]["meshes"].pop(), "1 meshes but 2 instruction lists"),
        (
            lambda data: data.update(version=1),
            r"a program of version 1, expected 2; compile it again .* simulator\.save_program",
        ),
        (lambda data: data.update(plan={}), "plan: Extra inputs are not permitted"),
    ],
)
def test_an_invalid_program_is_refused_with_the_field(tmp_path: Path, change, message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        load_program(edited_file(tmp_path / "program.json", change))


def test_text_and_missing_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "program.json").write_text("mesh 0: 0S0")
    with pytest.raises(
        ProgramError, match=r"Invalid JSON.*expected a program that save_program wrote"
    ):
        load_program(tmp_path / "program.json")
    with pytest.raises(ProgramError, match="can't be read"):
        load_program(tmp_path / "nothing.json")


PLAN = {
    "version": 2,
    "step": "train_step",
    "fingerprint": "0a1b",
    "cluster": "dgx_h100",
    "stages": [],
    "predicted_seconds": 0.0125,
    "predicted_bytes": 3_200_000_000,
}


@pytest.mark.parametrize("left_out", ["", "predicted_seconds"])
def test_the_error_of_a_plan_explains_how_to_compile_it(tmp_path: Path, left_out: str) -> None:
    fields = {name: value for name, value in PLAN.items() if name != left_out}
    (tmp_path / "plan.json").write_text(json.dumps(fields))
    with pytest.raises(ProgramError) as raised:
        load_program(tmp_path / "plan.json")
    message = str(raised.value)
    assert "is a plan of autopar for 'train_step', which holds no program" in message
    assert (
        f'compile_step(step, args, autopar.Plan.load("{tmp_path / "plan.json"}"), "dgx_h100"'
        in message
    )
    assert ("on dgx_h100 is 12.5 ms and 3.2 GB a device" in message) == (not left_out)


def test_json_without_a_program_or_plan_is_refused(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(
        ProgramError, match=r"the file: .*expected a program that save_program wrote"
    ):
        load_program(tmp_path / "list.json")
