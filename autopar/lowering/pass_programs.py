"""The program of a step in two passes over its microbatches.

The stages of the first pass follow the stages of the step, and its values have names of their own.
So the instructions of both passes are one program.
"""

from collections.abc import Sequence
from dataclasses import replace

from jax.extend.core import Var

from autopar.ir.array_sizes import array_bytes
from autopar.lowering.cross_mesh_resharding import reshard
from autopar.lowering.planned import PlannedStep
from autopar.lowering.program_memory import MeshMemory
from simulator.memory import Level, MemoryUse, sum_roles
from simulator.program import Free, Instruction, Program, Recv, Run, Send


def in_two_passes(planned: PlannedStep, first: Program, second: Program) -> Program:
    """Return the program of a step that has a first pass.

    Args:
        planned: the step with its plan.
        first: the program of its first pass.
        second: the program of the step without its first pass.
    """
    offset = len(planned.plan.stages)
    sends, receives = _handovers(planned)
    memory = MeshMemory(planned)
    rows: list[tuple[Instruction, ...]] = []
    levels: list[tuple[tuple[Level, Level], ...]] = []
    for mesh, row in enumerate(first.instructions):
        early = (of_first_pass(instruction, offset) for instruction in row)
        rows.append((*early, *sends[mesh], *receives[mesh], *second.instructions[mesh]))
        unread = memory.unread(mesh)
        if first.levels:
            before = [_with(level, unread) for level in first.levels[mesh]]
            arguments = memory.arguments(mesh)
            held = [(arguments, arguments)] * (len(sends[mesh]) + len(receives[mesh]))
            levels.append((*before, *held, *second.levels[mesh]))
    tasks = {task: _renumbered(task, offset) for task in first.bodies}
    whole = memory.unread(0)
    op_levels = {
        tasks[task]: tuple(sum_roles(level, whole) for level in task_levels)
        for task, task_levels in first.op_levels.items()
    }
    return replace(
        second,
        instructions=tuple(rows),
        bodies={**{tasks[task]: body for task, body in first.bodies.items()}, **second.bodies},
        memory=peaks_of_passes(planned, first.memory, second.memory),
        levels=tuple(levels),
        op_levels={**op_levels, **second.op_levels},
    )


def peaks_of_passes(
    planned: PlannedStep, first: Sequence[MemoryUse], second: Sequence[MemoryUse]
) -> tuple[MemoryUse, ...]:
    """Return the memory of each mesh at its peak in the two passes of a step.

    Args:
        planned: the step with its plan.
        first: the memory of each mesh in the first pass; empty if it is unknown.
        second: the memory in the second one.
    """
    memory = MeshMemory(planned)
    peaks: list[MemoryUse] = []
    for mesh, (early, late) in enumerate(zip(first, second, strict=True)):
        unread = memory.unread(mesh)
        early = replace(
            early,
            arguments=early.arguments + sum(unread.values()),
            roles=sum_roles(early.roles, unread) if early.roles else {},
        )
        peaks.append(max(early, late, key=lambda used: used.total))
    return tuple(peaks)


def _with(level: tuple[Level, Level], more: Level) -> tuple[Level, Level]:
    during, after = level
    return sum_roles(during, more), sum_roles(after, more)


def of_first_pass(instruction: Instruction, offset: int) -> Instruction:
    """Return an instruction of a first pass as it is in the program of both.

    Args:
        instruction: an instruction of the first pass.
        offset: number of stages of the step; 0 for an instruction of the step itself.
    """
    if not offset:
        return instruction
    match instruction:
        case Run(stage):
            return replace(instruction, stage=stage + offset)
        case Send(value) | Recv(value):
            return replace(instruction, value=f"first.{value}")
        case Free(values):
            return Free(tuple(f"first.{value}" for value in values))


def _renumbered(task: str, offset: int) -> str:
    """Return the name of a task of a stage that has a number `offset` larger."""
    digits = len(task) - len(task.lstrip("0123456789"))
    return f"{int(task[:digits]) + offset}{task[digits:]}"


def _handovers(planned: PlannedStep) -> tuple[list[list[Send]], list[list[Recv]]]:
    """Return for each mesh how it sends and receives the results of the first pass.

    Results that the step reads on the mesh that computes them stay there.
    """
    first = planned.first_pass
    assert first is not None
    meshes = range(planned.schedule.pipeline.num_meshes)
    sends: list[list[Send]] = [[] for _ in meshes]
    receives: list[list[Recv]] = [[] for _ in meshes]
    inputs = planned.step.completed
    for k, (i, result) in enumerate(zip(inputs, first.step.jaxpr.outvars, strict=True)):
        assert isinstance(result, Var)
        source = first.partition.producers[result].stage
        home = planned.partition.input_stages[i][0]
        mesh, to = first.schedule.mesh_of(source), planned.schedule.mesh_of(home)
        if mesh == to:
            continue
        before, after = first.values[source], planned.values[home]
        aval = planned.step.input_avals[i]
        resharding = reshard(
            aval.shape,
            (before.mesh, before.spec(result)),
            (after.mesh, after.spec(planned.step.jaxpr.invars[i])),
        )
        num_bytes = resharding.sent_bytes(array_bytes((), aval.dtype))
        sends[mesh].append(Send(f"first.result{k}", to, num_bytes))
        receives[to].append(Recv(f"first.result{k}", mesh))
    return sends, receives
