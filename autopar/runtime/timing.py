"""Timelines of steps that were executed in this process, one instruction at a time."""

import time
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, assert_never

import jax

from autopar.lowering.pass_programs import of_first_pass
from autopar.util import zeros
from simulator.engine.timeline import Timeline
from simulator.program import Free, Instruction, Recv, Run, Send, walk
from simulator.spans import Span

if TYPE_CHECKING:
    from autopar.runtime.local_executable import LocalExecutable


def dummy_inputs(executable: "LocalExecutable") -> list[jax.Array]:
    """Return zeros for every input, sharded as the plan says."""
    avals = jax.tree.leaves(executable.step.in_avals)
    shardings = executable.homes
    inputs: dict[int, jax.Array] = {}
    for mesh in dict.fromkeys(sharding.mesh for sharding in shardings):
        numbers = [i for i, sharding in enumerate(shardings) if sharding.mesh == mesh]
        arrays = zeros([avals[i] for i in numbers], [shardings[i] for i in numbers])
        inputs.update(zip(numbers, arrays, strict=True))
    return [inputs[i] for i in range(len(avals))]


def executed_timeline(executable: "LocalExecutable", leaves: list[jax.Array]) -> Timeline:
    """Run the instructions of a step one at a time, and return their durations as a timeline.

    As in a simulation, an instruction starts when its mesh is free and its operands have arrived.
    So a task has the duration that it has when nothing else runs, and the timeline has no overhead
    of the host between tasks.

    Args:
        executable: the step.
        leaves: its inputs, sharded as the plan says.
    """
    spans = _spans(executable, leaves)
    return Timeline(tuple(spans), executable.program.meshes, executable.memory)


def _spans(executable: "LocalExecutable", leaves: list[jax.Array], offset: int = 0) -> list[Span]:
    """Run the instructions of a step one at a time, and return their spans.

    Args:
        executable: the step.
        leaves: its inputs.
        offset: the number by which the stages in the spans are larger.
    """
    before: list[Span] = []
    if executable.first_pass is not None:
        inputs = executable.inputs_of_first_pass(leaves)
        before = _spans(executable.first_pass, inputs, offset + len(executable.plan.stages))
    begin = max((span.end for span in before), default=0.0)
    values = executable.job.start(executable.inputs(leaves), {})
    compute: dict[int, float] = defaultdict(lambda: begin)
    communication: dict[int, float] = defaultdict(lambda: begin)
    arrived: dict[tuple[str, int], float] = {}
    spans: list[Span] = []
    task: dict[int, str] = defaultdict(str)

    def add(mesh: int, instruction: Instruction, start: float, end: float, after: str = "") -> None:
        named = of_first_pass(instruction, offset)
        assert not isinstance(named, Free)
        spans.append(span_of(mesh, named, start, end, after))

    for mesh, instruction in walk(executable.planned.program):
        start = time.perf_counter()
        executable.job.execute(mesh, instruction, values)
        executable.job.wait_for(mesh, instruction, values)
        seconds = time.perf_counter() - start
        match instruction:
            case Run():
                task[mesh] = str(replace(instruction, stage=instruction.stage + offset))
                start, compute[mesh] = compute[mesh], compute[mesh] + seconds
                add(mesh, instruction, start, compute[mesh])
            case Send(value, to):
                start = max(compute[mesh], communication[mesh])
                arrived[value, to] = communication[mesh] = start + seconds
                add(mesh, instruction, start, start + seconds, after=task[mesh])
            case Recv(value):
                start, compute[mesh] = compute[mesh], max(compute[mesh], arrived[value, mesh])
                if start < compute[mesh]:
                    task[mesh] = ""
                    add(mesh, instruction, start, compute[mesh])
            case Free():
                pass
            case _:
                assert_never(instruction)
    return [*before, *spans]


def span_of(
    mesh: int, instruction: Run | Send | Recv, start: float, end: float, after: str
) -> Span:
    """Return the span of an instruction in a timeline.

    Args:
        mesh: number of the mesh.
        instruction: the instruction.
        start: when it starts, in seconds.
        end: when it ends, in seconds.
        after: the task whose result a send transfers.
    """
    name = str(instruction)
    match instruction:
        case Run():
            return Span(name, mesh, "compute", start, end, "task", name)
        case Send():
            return Span(name, mesh, "communication", start, end, "send", after)
        case Recv():
            return Span(name, mesh, "compute", start, end, "bubble")
        case _:
            assert_never(instruction)
