"""Programs are walked in dependency order, and deadlocks are shown."""

import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.memory import MemoryUse
from simulator.program import (
    DeadlockError,
    Free,
    Instruction,
    Program,
    Recv,
    Run,
    Send,
    parse_instruction,
    walk,
)

names = st.text(st.characters(categories=("L", "N"), include_characters="_./"), min_size=1)
instructions = st.one_of(
    st.builds(Run, st.integers(0, 99), st.sampled_from("FBIWUS"), st.integers(0, 99)),
    st.builds(Send, names, st.integers(0, 9)),
    st.builds(Recv, names, st.integers(0, 9)),
    st.builds(Free, st.lists(names, min_size=1).map(tuple)),
)


@given(instructions)
def test_an_instruction_parses_back_from_its_text(instruction: Instruction) -> None:
    assert parse_instruction(str(instruction)) == instruction


@pytest.mark.parametrize("text", ["", "1X0", "F0", "send x", "recv x>0", "free", "1F0 "])
def test_text_without_an_instruction_is_refused(text: str) -> None:
    with pytest.raises(
        ValueError, match=re.escape(f"{text!r} is not an instruction; expected e.g. '1F0'")
    ):
        parse_instruction(text)


def program(*rows: str) -> Program:
    """Return a program whose mesh i has device i and the instructions of row i, split at `|`."""
    parsed = tuple(
        tuple(parse_instruction(cell.strip()) for cell in row.split("|") if cell.strip())
        for row in rows
    )
    return Program(tuple((i,) for i in range(len(rows))), parsed)


TWO_STAGES = program(
    "0F0 | send x0>1 | 0F1 | send x1>1 | recv g0<1 | 0B0 | recv g1<1 | 0B1 | free x0,x1",
    "recv x0<0 | 1F0 | 1B0 | send g0>0 | recv x1<0 | 1F1 | 1B1 | send g1>0",
)


def test_a_program_prints_a_row_per_mesh() -> None:
    assert (
        str(program("0F0 | send x>1", "recv x<0 | 1F0"))
        == "mesh 0: 0F0 | send x>1\nmesh 1: recv x<0 | 1F0"
    )


def test_a_walk_yields_every_instruction_of_a_mesh_in_its_order() -> None:
    order = list(walk(TWO_STAGES))
    for mesh, row in enumerate(TWO_STAGES.instructions):
        assert tuple(instruction for i, instruction in order if i == mesh) == row


def test_a_walk_sends_before_it_receives() -> None:
    sent: Counter[tuple[str, int, int]] = Counter()
    for mesh, instruction in walk(TWO_STAGES):
        match instruction:
            case Send(value, to):
                sent[value, mesh, to] += 1
            case Recv(value, source):
                sent[value, source, mesh] -= 1
                assert sent[value, source, mesh] >= 0
            case _:
                pass


def test_the_error_of_a_deadlock_shows_where_meshes_wait() -> None:
    stuck = program("0F0 | recv y<1 | send x>1", "recv x<0 | send y>0", "2F0")
    expected = """\
deadlock: every unfinished mesh waits
  mesh 0: 0F0 | > recv y<1 | send x>1
  mesh 1: > recv x<0 | send y>0
  mesh 2: 2F0"""
    with pytest.raises(DeadlockError, match=f"^{re.escape(expected)}$"):
        list(walk(stuck))


def test_a_value_sent_to_one_mesh_is_not_received_by_another() -> None:
    with pytest.raises(DeadlockError, match=r"mesh 2: > recv x<0"):
        list(walk(program("send x>1", "recv x<0", "recv x<0")))


@pytest.mark.parametrize("devices", [(-1,), (3, -2), ()])
def test_devices_of_a_mesh_are_numbered_from_0(devices: tuple[int, ...]) -> None:
    with pytest.raises(
        ValueError,
        match=rf"mesh 1 has devices {re.escape(str(devices))}; expected at least one, by numbers",
    ):
        Program(((0,), devices), ((), ()))


def test_every_mesh_must_have_instructions_memory_and_levels() -> None:
    with pytest.raises(ValueError, match="2 meshes but 1 instruction lists"):
        Program(((0,), (1,)), ((),))
    with pytest.raises(ValueError, match="1 meshes but memory of 2"):
        Program(((0,),), ((),), memory=(MemoryUse(), MemoryUse()))
    with pytest.raises(
        ValueError, match=r"meshes with \[1\] instructions but \[2\] levels of memory"
    ):
        Program(((0,),), ((Run(0, "S"),),), levels=((({}, {}), ({}, {})),))
    with pytest.raises(ValueError, match="task 0S has 0 ops but 1 levels of memory; expected"):
        Program(((0,),), ((Run(0, "S"),),), op_levels={"0S": ({},)})


@pytest.mark.parametrize(
    ("transfer", "message"),
    [
        (Send("x", 2), "send of 'x' has mesh 2 at its other end; the program has 2 meshes"),
        (Send("x", -1), "has mesh -1 at its other end"),
        (Send("x", 10**5000), "has mesh a int too long to print at its other end"),
        (Recv("x", 10**30), "recv of 'x' has mesh 1000"),
        (Send("x", 1, -1), r"send of 'x' has -1 bytes; expected 0 to 1e\+18"),
        (Send("x", 1, 10**400), r"bytes; expected 0 to 1e\+18"),
    ],
)
def test_a_transfer_without_a_mesh_or_of_no_size_is_refused(
    transfer: Send | Recv, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Program(((0,), (1,)), ((transfer,), ()))


def test_aliased_outputs_are_counted_once() -> None:
    assert MemoryUse(arguments=10, outputs=7, aliased=6, temporaries=3).total == 14
