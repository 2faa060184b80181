"""Pass of a training step (forward, backward, update) that an operation belongs to, from the name that JAX gives it."""

import re
from typing import Literal

from simulator.hlo.text import Instruction, Module
from simulator.work import TrainingPhase

Pass = Literal["forward", "backward", "other"]
"""Where an instruction comes from: `jvp(...)` is forward, `transpose(jvp(...))` backward, all else the update."""


def pass_of(name: str) -> Pass:
    """The pass that an operation is of, by the name that JAX gives it."""
    return "backward" if "transpose(" in name else "forward" if "jvp(" in name else "other"


def phase_of(name: str) -> TrainingPhase:
    """The part of a training step, where what the backward pass computes again counts by itself."""
    if "rematted_computation" in name:
        return "recompute"
    found = pass_of(name)
    return "update" if found == "other" else found


def name_of(instruction: Instruction) -> str | None:
    """What JAX calls an instruction; None for copies that the compiler adds."""
    found = re.search(r'op_name="([^"]*)"', instruction.attributes)
    return found and found[1]


def instruction_pass(module: Module, instruction: Instruction) -> Pass | None:
    """The pass that an instruction is of; None if it has no name. A loop is of what is in it."""
    if instruction.opcode == "while":
        passes = {
            instruction_pass(module, each)
            for each in module.called(instruction, "body").instructions
        }
        if "backward" in passes:
            return "backward"
        if "forward" in passes:
            return "forward"
    name = name_of(instruction)
    return pass_of(name) if name is not None else None
