"""Programs: the instructions of each mesh, and `walk`, an order that respects sends and receives.

A program has several readers. A runtime dispatches the instructions that `walk` yields, the event
engine times them, and a check for deadlocks exhausts it.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal, Self, assert_never, get_args

from simulator.files import brief, one_line
from simulator.memory import Level, MemoryUse
from simulator.work import Collective, Groups, OpList, matrix_flops, unmodelled_kernels

MAX_BYTES = 10**18
"""The most bytes that a program may send at a time: more than all memory of any cluster."""

Phase = Literal["F", "B", "I", "W", "U", "S"]
"""Forward; backward or its halves, input and weight gradients; update; whole step."""


@dataclass(frozen=True, slots=True)
class Run:
    """Run one task: stage, phase and microbatch, printed `1F0`.

    An update may take several rounds, which `micro_batch` numbers.
    """

    stage: int
    phase: Phase
    micro_batch: int = 0

    def __str__(self) -> str:
        return f"{self.stage}{self.phase}{self.micro_batch}"

    @property
    def task(self) -> str:
        """The key of its body: one for all microbatches, but one for each round of an update."""
        return (
            f"{self.stage}U{self.micro_batch}" if self.phase == "U" else f"{self.stage}{self.phase}"
        )


@dataclass(frozen=True, slots=True)
class Send:
    """Start to send `value` to mesh `to`, printed `send x>1`.

    `num_bytes` is the sum over all devices of the mesh.
    """

    value: str
    to: int
    num_bytes: int = 0

    def __str__(self) -> str:
        return f"send {self.value}>{self.to}"


@dataclass(frozen=True, slots=True)
class Recv:
    """Wait for `value` from mesh `source`, printed `recv x<0`.

    Devices that receive a part of the value `gather` the rest from each other.
    """

    value: str
    source: int
    gather: Collective | None = None

    def __str__(self) -> str:
        return f"recv {self.value}<{self.source}"


@dataclass(frozen=True, slots=True)
class Free:
    """Free the memory of values after their last use, printed `free x,y`."""

    values: tuple[str, ...]

    def __str__(self) -> str:
        return f"free {','.join(self.values)}"


Instruction = Run | Send | Recv | Free


def parse_instruction(text: str) -> Instruction:
    """Return the instruction that prints as `text`.

    The text lacks `num_bytes` of a send and the gather of a receive, so the result does too.

    Raises:
        ValueError: no instruction prints so.
    """
    phases = "".join(get_args(Phase))
    if match := re.fullmatch(rf"(\d+)([{phases}])(\d+)", text):
        return Run(int(match[1]), match[2], int(match[3]))  # pyright: ignore[reportArgumentType]
    if match := re.fullmatch(r"send (.+)>(\d+)", text):
        return Send(match[1], int(match[2]))
    if match := re.fullmatch(r"recv (.+)<(\d+)", text):
        return Recv(match[1], int(match[2]))
    if match := re.fullmatch(r"free (.+)", text):
        return Free(tuple(match[1].split(",")))
    raise ValueError(
        f"{text!r} is not an instruction; expected e.g. '1F0', 'send x>1', 'recv x<0' or 'free x,y'"
    )


@dataclass(frozen=True, slots=True)
class Program:
    """One step: what every mesh does.

    Attributes:
        meshes: for each mesh, the ids of its devices in the cluster.
        instructions: for each mesh, its instructions in order.
        bodies: for each task (`Run.task`), what one device launches. A simulation needs it, a run
            does not.
        memory: for each mesh, the memory of one of its devices; empty if unknown.
        levels: for each mesh and instruction, the memory of one device during the instruction and
            after it, by role; empty if unknown.
        op_levels: for tasks (`Run.task`) whose memory is known over time, the memory of one device
            by role while each op of the body runs, everything included.
        model_flops: FLOP of the products and convolutions that the step needs, without remat, on
            all devices; None if unknown.
        examples: examples that the step learns from; 0 if unknown.
        costed_for: the cluster whose seconds the bodies store, as `cost_fingerprint` of
            `simulator.costs.cost_fingerprint` writes it; empty if they store none, so that any
            cluster can time them.
    """

    meshes: tuple[tuple[int, ...], ...]
    instructions: tuple[tuple[Instruction, ...], ...]
    bodies: Mapping[str, OpList] = field(default_factory=dict)
    memory: tuple[MemoryUse, ...] = ()
    levels: tuple[tuple[tuple[Level, Level], ...], ...] = ()
    op_levels: Mapping[str, tuple[Level, ...]] = field(default_factory=dict)
    model_flops: float | None = None
    examples: int = 0
    costed_for: str = ""

    @classmethod
    def single(cls, body: OpList, num_devices: int = 1, memory: MemoryUse | None = None) -> Self:
        """Return the program of a step that is one task on the first devices of a cluster.

        Args:
            body: what each device launches.
            num_devices: the number of devices.
            memory: the memory of one device, if known.
        """
        run = Run(0, "S")
        used = () if memory is None else (memory,)
        return cls((tuple(range(num_devices)),), ((run,),), {run.task: body}, used)

    def __post_init__(self) -> None:
        for mesh, devices in enumerate(self.meshes):
            if not devices or min(devices) < 0:
                raise ValueError(
                    f"mesh {mesh} has devices {devices};"
                    " expected at least one, by numbers from 0 on"
                )
        if len(self.meshes) != len(self.instructions):
            raise ValueError(
                f"{len(self.meshes)} meshes but {len(self.instructions)} instruction lists;"
                " expected a list for each mesh"
            )
        for instruction in chain.from_iterable(self.instructions):
            if isinstance(instruction, Send | Recv):
                self._check_transfer(instruction)
        if self.memory and len(self.memory) != len(self.meshes):
            raise ValueError(
                f"{len(self.meshes)} meshes but memory of {len(self.memory)}; expected that of each"
                " mesh, or none"
            )
        if self.levels and list(map(len, self.levels)) != list(map(len, self.instructions)):
            raise ValueError(
                f"meshes with {list(map(len, self.instructions))} instructions but"
                f" {list(map(len, self.levels))} levels of memory; expected a level for each"
                " instruction, or no levels"
            )
        for task, levels in self.op_levels.items():
            if len(levels) != len(self.bodies.get(task, ())):
                raise ValueError(
                    f"task {task} has {len(self.bodies.get(task, ()))} ops but {len(levels)} levels"
                    " of memory; expected a level for each op"
                )

    def _check_transfer(self, transfer: Send | Recv) -> None:
        """Check that a send or receive has a mesh at its other end, and a size.

        Raises:
            ValueError: it has not.
        """
        is_send = isinstance(transfer, Send)
        other = transfer.to if is_send else transfer.source
        what = f"{'send' if is_send else 'recv'} of {brief(transfer.value)}"
        if not 0 <= other < len(self.meshes):
            raise ValueError(
                f"{what} has mesh {brief(other)} at its other end; the program has"
                f" {len(self.meshes)} meshes, numbered from 0 on"
            )
        if is_send and not 0 <= transfer.num_bytes <= MAX_BYTES:
            raise ValueError(
                f"{what} has {brief(transfer.num_bytes)} bytes; expected 0 to {MAX_BYTES:.0e}"
            )

    def body(self, run: Run) -> OpList:
        """Return what one device launches for a task.

        Raises:
            ValueError: the task has no body.
        """
        if run.task not in self.bodies:
            tasks = one_line(", ".join(sorted(self.bodies)) or "none")
            raise ValueError(
                f"task {run.task} has no body, so it can't be simulated;"
                f" the program has bodies of: {tasks}"
            )
        return self.bodies[run.task]

    def matrix_flops(self) -> dict[str, float]:
        """Return FLOP of all products and convolutions of the step, on all devices, by dtype."""
        flops_by_task = {task: matrix_flops(body) for task, body in self.bodies.items()}
        total: Counter[str] = Counter()
        for devices, row in zip(self.meshes, self.instructions, strict=True):
            runs = Counter(op.task for op in row if isinstance(op, Run))
            for task, count in runs.items():
                for dtype, flops in flops_by_task[task].items():
                    total[dtype] += len(devices) * count * flops  # pyright: ignore[reportArgumentType]
        return dict(total)

    def unmodelled_kernels(self) -> dict[str, int]:
        """Return how many kernels of each sort without a cost model the step launches.

        One device of each mesh counts.
        """
        kernels_by_task = {task: unmodelled_kernels(body) for task, body in self.bodies.items()}
        launches: Counter[str] = Counter()
        for row in self.instructions:
            for op in row:
                if isinstance(op, Run):
                    launches.update(kernels_by_task[op.task])
        return dict(launches)

    def pairs(self, mesh: int, to: int) -> Groups:
        """Return the (source, target) devices of a send; the smaller mesh's devices repeat."""
        source, target = self.meshes[mesh], self.meshes[to]
        count = max(len(source), len(target))
        return tuple((source[i % len(source)], target[i % len(target)]) for i in range(count))

    def __str__(self) -> str:
        rows = (
            f"mesh {i}: " + " | ".join(map(str, row)) for i, row in enumerate(self.instructions)
        )
        return "\n".join(rows)


class DeadlockError(ValueError):
    """Every unfinished mesh waits for a value that no mesh can send any more."""


def walk(program: Program) -> Iterator[tuple[int, Instruction]]:
    """Yield (mesh, instruction) in an order in which every value is sent before it is received.

    Meshes take turns; each continues until it must wait.

    Raises:
        DeadlockError: no mesh can continue. The text shows the instructions of each mesh, with `>`
            before the one at which it is stuck.
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
