"""Provenance of instructions: the phase of a training step, from the names of JAX's operations."""

import re

from simulator.hlo.text import Instruction, Module
from simulator.live_ranges import Pass
from simulator.work import TrainingPhase


def pass_of(name: str) -> Pass:
    """Return the pass of an operation with a name.

    `jvp(...)` is forward, `transpose(jvp(...))` backward; other names belong to the update.
    """
    return "backward" if "transpose(" in name else "forward" if "jvp(" in name else "other"


def phase_of(name: str) -> TrainingPhase:
    """Return the phase of an operation with a name; recomputation is a phase of its own."""
    if "rematted_computation" in name:
        return "recompute"
    origin = pass_of(name)
    return "update" if origin == "other" else origin


def name_of(instruction: Instruction) -> str | None:
    """Return the name that JAX gives an instruction; None for copies that the compiler adds."""
    name = re.search(r'op_name="([^"]*)"', instruction.attributes)
    return name and name[1]


def instruction_pass(module: Module, instruction: Instruction) -> Pass | None:
    """Return the pass of an instruction, None if it has no name.

    A loop has the pass of the instructions in it.
    """
    if instruction.opcode == "while":
        passes = {
            instruction_pass(module, inner)
            for inner in module.called(instruction, "body").instructions
        }
        if "backward" in passes:
            return "backward"
        if "forward" in passes:
            return "forward"
    name = name_of(instruction)
    return pass_of(name) if name is not None else None
