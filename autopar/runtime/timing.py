"""Pipelines with a stopwatch: made-up inputs, the time of a step, and when each of its tasks ran."""

import time
from collections import defaultdict
from typing import TYPE_CHECKING, assert_never

import jax

from autopar.util import zeros
from simulator.program import Free, Recv, Run, Send, walk
from simulator.timeline import Category, Span, Stream, Timeline

if TYPE_CHECKING:
    from autopar.runtime.pipeline import PipelineExecutable


def dummy_inputs(executable: "PipelineExecutable") -> list[jax.Array]:
    """Zeros for every input, where the step wants them."""
    avals, homes = jax.tree.leaves(executable.step.in_avals), executable.inputs.homes
    made: dict[int, jax.Array] = {}
    for mesh in dict.fromkeys(home.mesh for home in homes):
        mine = [i for i, home in enumerate(homes) if home.mesh == mesh]
        made.update(zip(mine, zeros([avals[i] for i in mine], [homes[i] for i in mine]), strict=True))
    return [made[i] for i in range(len(avals))]


def executed_timeline(executable: "PipelineExecutable", leaves: list[jax.Array]) -> Timeline:
    """Run a step, each instruction by itself, and put what it took on the clocks of the program.

    An instruction starts when its mesh is free and what it waits for is there, as in a simulation. Run by itself a task takes as
    long as it does when nothing else disturbs it; what the host adds between tasks is not in the picture.
    """
    values = executable.inputs.start(leaves)
    compute: dict[int, float] = defaultdict(float)
    communication: dict[int, float] = defaultdict(float)
    arrived: dict[tuple[str, int], float] = {}
    spans: list[Span] = []
    task: dict[int, str] = defaultdict(str)

    def record(name: str, mesh: int, stream: Stream, start: float, seconds: float, category: Category) -> float:
        spans.append(Span(name, mesh, stream, start, start + seconds, category, task[mesh]))
        return start + seconds

    for mesh, instruction in walk(executable.program):
        begin = time.perf_counter()
        executable.dispatcher.execute(mesh, instruction, values)
        target = instruction.to if isinstance(instruction, Send) else mesh
        jax.block_until_ready([value for value in values[target].values() if not value.is_deleted()])
        seconds = time.perf_counter() - begin
        match instruction:
            case Run():
                task[mesh] = str(instruction)
                compute[mesh] = record(str(instruction), mesh, "compute", compute[mesh], seconds, "task")
            case Send(value, to):
                start = max(compute[mesh], communication[mesh])
                communication[mesh] = record(str(instruction), mesh, "communication", start, seconds, "send")
                arrived[value, to] = communication[mesh]
            case Recv(value):
                late = arrived[value, mesh] - compute[mesh]
                if late > 0:
                    task[mesh] = ""
                    compute[mesh] = record(str(instruction), mesh, "compute", compute[mesh], late, "bubble")
            case Free():
                pass
            case _:
                assert_never(instruction)
    return Timeline(tuple(spans), executable.program.meshes, executable.memory)
