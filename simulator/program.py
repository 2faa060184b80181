"""Programs: for each mesh the instructions it runs, and the one order in which anybody reads them.

The executor dispatches what `walk` yields, the engine puts clocks on it, a checker exhausts it: one meaning, several readers.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, Self, assert_never, get_args

from simulator.files import one_line
from simulator.memory import Level, MemoryUse
from simulator.work import Collective, Groups, OpList, matrix_flops, unmodelled_kernels

Phase = Literal["F", "B", "I", "W", "U", "S"]
"""Forward, backward (or its input- and weight-gradient halves), update; S is a whole step that is not cut into phases."""


@dataclass(frozen=True, slots=True)
class Run:
    """Run one task: stage, phase and microbatch, printed `1F0`. An update may take several rounds, told by `micro_batch`."""

    stage: int
    phase: Phase
    micro_batch: int = 0

    def __str__(self) -> str:
        return f"{self.stage}{self.phase}{self.micro_batch}"

    @property
    def task(self) -> str:
        """The key of its body: the same for every microbatch, another for every round of an update."""
        return (
            f"{self.stage}U{self.micro_batch}" if self.phase == "U" else f"{self.stage}{self.phase}"
        )


@dataclass(frozen=True, slots=True)
class Send:
    """Start sending `value` to mesh `to`, printed `send x>1`; `num_bytes` is what all devices of the mesh send together."""

    value: str
    to: int
    num_bytes: int = 0

    def __str__(self) -> str:
        return f"send {self.value}>{self.to}"


@dataclass(frozen=True, slots=True)
class Recv:
    """Wait for `value` from mesh `source`, printed `recv x<0`; devices that got parts of it `gather` the rest from one another."""

    value: str
    source: int
    gather: Collective | None = None

    def __str__(self) -> str:
        return f"recv {self.value}<{self.source}"


@dataclass(frozen=True, slots=True)
class Free:
    """Forget values that nothing needs any more, printed `free x,y`."""

    values: tuple[str, ...]

    def __str__(self) -> str:
        return f"free {','.join(self.values)}"


Instruction = Run | Send | Recv | Free


def parse_instruction(text: str) -> Instruction:
    """The instruction that prints as `text` (`num_bytes` of a send and the gather of a receive are not printed and don't come back)."""
    phases = "".join(get_args(Phase))
    if found := re.fullmatch(rf"(\d+)([{phases}])(\d+)", text):
        return Run(int(found[1]), found[2], int(found[3]))  # pyright: ignore[reportArgumentType]
    if found := re.fullmatch(r"send (.+)>(\d+)", text):
        return Send(found[1], int(found[2]))
    if found := re.fullmatch(r"recv (.+)<(\d+)", text):
        return Recv(found[1], int(found[2]))
    if found := re.fullmatch(r"free (.+)", text):
        return Free(tuple(found[1].split(",")))
    raise ValueError(
        f"{text!r} is not an instruction; expected e.g. '1F0', 'send x>1', 'recv x<0' or 'free x,y'"
    )


@dataclass(frozen=True, slots=True)
class Program:
    """What every mesh does in one step.

    Attributes:
        meshes: for each mesh, the ids of its devices in the cluster.
        instructions: for each mesh, its instructions in order.
        bodies: what one device launches for a task (`Run.task`); needed to simulate, not to run.
        memory: for each mesh, the memory of one of its devices.
        levels: for each mesh, what one of its devices holds while each instruction runs, and after it.
        model_flops: FLOP of the products and convolutions that the step needs, nothing computed twice, of all devices; None if nobody
            says.
        examples: that the step learns from; 0 if nobody says.
        costed_for: the cluster whose seconds the bodies have, as `simulator.costs.cost_fingerprint` writes it; nothing where they leave that to a cost
            model, so that any cluster can time them.
    """

    meshes: tuple[tuple[int, ...], ...]
    instructions: tuple[tuple[Instruction, ...], ...]
    bodies: Mapping[str, OpList] = field(default_factory=dict)
    memory: tuple[MemoryUse, ...] = ()
    levels: tuple[tuple[tuple[Level, Level], ...], ...] = ()
    model_flops: float | None = None
    examples: int = 0
    costed_for: str = ""

    @classmethod
    def single(cls, body: OpList, num_devices: int = 1, memory: MemoryUse | None = None) -> Self:
        """Return the program of a step that is one task on the first devices of a cluster.

        Args:
            body: what each device launches.
            memory: of one device.
        """
        run = Run(0, "S")
        used = () if memory is None else (memory,)
        return cls((tuple(range(num_devices)),), ((run,),), {run.task: body}, used)

    def __post_init__(self) -> None:
        for mesh, devices in enumerate(self.meshes):
            if not devices or min(devices) < 0:
                raise ValueError(
                    f"mesh {mesh} has devices {devices}; expected at least one, by numbers from 0 on"
                )
        if len(self.meshes) != len(self.instructions):
            raise ValueError(
                f"{len(self.meshes)} meshes but {len(self.instructions)} instruction lists; one each"
            )
        if self.memory and len(self.memory) != len(self.meshes):
            raise ValueError(
                f"{len(self.meshes)} meshes but memory of {len(self.memory)}; one each, or none"
            )
        if self.levels and list(map(len, self.levels)) != list(map(len, self.instructions)):
            counts = list(map(len, self.instructions)), list(map(len, self.levels))
            raise ValueError(
                f"meshes with {counts[0]} instructions but {counts[1]} levels of memory; one each, or none"
            )

    def body(self, run: Run) -> OpList:
        """What one device launches for a task; one that has no body: `ValueError`."""
        if run.task not in self.bodies:
            known = one_line(", ".join(sorted(self.bodies)) or "none")
            raise ValueError(
                f"task {run.task} has no body, so it can't be simulated; the program has bodies of: {known}"
            )
        return self.bodies[run.task]

    def matrix_flops(self) -> dict[str, float]:
        """FLOP of all products and convolutions of the step, on all devices, by what they compute in."""
        of_body = {task: matrix_flops(body) for task, body in self.bodies.items()}
        done: Counter[str] = Counter()
        for devices, row in zip(self.meshes, self.instructions, strict=True):
            for task, count in Counter(each.task for each in row if isinstance(each, Run)).items():
                for dtype, flops in of_body[task].items():
                    done[dtype] += len(devices) * count * flops  # pyright: ignore[reportArgumentType]
        return dict(done)

    def unmodelled_kernels(self) -> dict[str, int]:
        """How many kernels of the step one device of each mesh launches whose cost is not known, by what they are."""
        of_body = {task: unmodelled_kernels(body) for task, body in self.bodies.items()}
        found: Counter[str] = Counter()
        for each in (each for row in self.instructions for each in row if isinstance(each, Run)):
            found.update(of_body[each.task])
        return dict(found)

    def pairs(self, mesh: int, to: int) -> Groups:
        """Who sends to whom, from mesh to mesh; the larger one goes round the smaller one."""
        source, target = self.meshes[mesh], self.meshes[to]
        count = max(len(source), len(target))
        return tuple((source[i % len(source)], target[i % len(target)]) for i in range(count))

    def __str__(self) -> str:
        rows = (
            f"mesh {i}: " + " | ".join(map(str, row)) for i, row in enumerate(self.instructions)
        )
        return "\n".join(rows)


class DeadlockError(ValueError):
    """Every mesh waits for a value that no mesh can send any more."""


def walk(program: Program) -> Iterator[tuple[int, Instruction]]:
    """Yield (mesh, instruction) in an order in which every value is sent before it is received.

    Meshes take turns; one goes on until it must wait. A deadlock raises `DeadlockError` with the grid, `>` before the
    instruction at which each mesh is stuck.
    """
    position = [0] * len(program.meshes)
    in_flight: set[tuple[str, int, int]] = set()  # (value, source, target)
    progressed = True
    while progressed:
        progressed = False
        for mesh, row in enumerate(program.instructions):
            while position[mesh] < len(row):
                instruction = row[position[mesh]]
                match instruction:
                    case Send(value, to):
                        in_flight.add((value, mesh, to))
                    case Recv(value, source, _):
                        if (value, source, mesh) not in in_flight:
                            break
                        in_flight.remove((value, source, mesh))
                    case Run() | Free():
                        pass
                    case _:
                        assert_never(instruction)
                position[mesh] += 1
                progressed = True
                yield mesh, instruction
    if any(at < len(row) for at, row in zip(position, program.instructions, strict=True)):
        raise DeadlockError(f"deadlock: every unfinished mesh waits\n{_grid(program, position)}")


def _grid(program: Program, position: list[int]) -> str:
    rows = []
    for mesh, row in enumerate(program.instructions):
        cells = [
            f"> {text}" if i == position[mesh] else text for i, text in enumerate(map(str, row))
        ]
        rows.append(f"  mesh {mesh}: " + " | ".join(cells))
    return "\n".join(rows)
