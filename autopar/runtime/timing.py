"""Planned steps with a stopwatch: made-up inputs, the time of a step, and when each of its tasks ran."""

import time
from collections import defaultdict
from typing import TYPE_CHECKING, assert_never

import jax

from autopar.util import zeros
from simulator.engine.timeline import Timeline
from simulator.program import Free, Recv, Run, Send, walk
from simulator.spans import Span

if TYPE_CHECKING:
    from autopar.runtime.local_executable import LocalExecutable


def dummy_inputs(executable: "LocalExecutable") -> list[jax.Array]:
    """Zeros for every input, where the step wants them."""
    avals, homes = jax.tree.leaves(executable.step.in_avals), executable.homes
    made: dict[int, jax.Array] = {}
    for mesh in dict.fromkeys(home.mesh for home in homes):
        mine = [i for i, home in enumerate(homes) if home.mesh == mesh]
        made.update(
            zip(mine, zeros([avals[i] for i in mine], [homes[i] for i in mine]), strict=True)
        )
    return [made[i] for i in range(len(avals))]


def executed_timeline(executable: "LocalExecutable", leaves: list[jax.Array]) -> Timeline:
    """Run a step, each instruction by itself, and put what it took on the clocks of the program.

    An instruction starts when its mesh is free and what it waits for is there, as in a simulation. Run by itself a task takes as
    long as it does when nothing else disturbs it; what the host adds between tasks is not in the picture.
    """
    values = executable.job.start(dict(enumerate(leaves)), {})
    compute: dict[int, float] = defaultdict(float)
    communication: dict[int, float] = defaultdict(float)
    arrived: dict[tuple[str, int], float] = {}
    spans: list[Span] = []
    task: dict[int, str] = defaultdict(str)
    for mesh, instruction in walk(executable.program):
        begin = time.perf_counter()
        executable.job.execute(mesh, instruction, values)
        executable.job.wait_for(mesh, instruction, values)
        seconds = time.perf_counter() - begin
        match instruction:
            case Run():
                task[mesh] = str(instruction)
                start, compute[mesh] = compute[mesh], compute[mesh] + seconds
                spans.append(span_of(mesh, instruction, start, compute[mesh]))
            case Send(value, to):
                start = max(compute[mesh], communication[mesh])
                arrived[value, to] = communication[mesh] = start + seconds
                spans.append(span_of(mesh, instruction, start, start + seconds, task[mesh]))
            case Recv(value):
                start, compute[mesh] = compute[mesh], max(compute[mesh], arrived[value, mesh])
                if start < compute[mesh]:
                    task[mesh] = ""
                    spans.append(span_of(mesh, instruction, start, compute[mesh]))
            case Free():
                pass
            case _:
                assert_never(instruction)
    return Timeline(tuple(spans), executable.program.meshes, executable.memory)


def span_of(
    mesh: int, instruction: Run | Send | Recv, start: float, end: float, after: str = ""
) -> Span:
    """What an instruction is in a timeline; `after` is the task whose result a send sends."""
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
