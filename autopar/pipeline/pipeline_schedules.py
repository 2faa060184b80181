"""Pipeline schedules as data: in which order each mesh runs its tasks.

Stage s runs on mesh s modulo the number of meshes, so that with several chunks a mesh runs several stages. A schedule is one
function that lists the tasks of one mesh; what depends on what, transfers, deadlocks, clocks and memory follow from the lists.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import assert_never

from autopar.plan import WHOLE_STEP_SCHEDULE
from simulator.clock import Clock
from simulator.files import brief
from simulator.max_plus import MaxPlusMap
from simulator.program import Free, Instruction, Phase, Program, Recv, Run, Send, walk


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The size of a pipeline.

    Attributes:
        num_meshes: meshes that work at the same time.
        num_micro_batches: slices of the batch that go through it in one step.
        num_chunks: stages on each mesh; stage s is chunk s // num_meshes of mesh s % num_meshes.
    """

    num_meshes: int
    num_micro_batches: int
    num_chunks: int = 1

    def __post_init__(self) -> None:
        for name in ("num_meshes", "num_micro_batches", "num_chunks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; a pipeline needs at least one")

    @property
    def num_stages(self) -> int:
        return self.num_meshes * self.num_chunks

    def mesh_of(self, stage: int) -> int:
        return stage % self.num_meshes


@dataclass(frozen=True)
class Schedule:
    """For each mesh the tasks it runs in one step, in order.

    Raises:
        ValueError: a task runs on another mesh than its stage's, twice or never.
    """

    name: str
    pipeline: Pipeline
    rows: tuple[tuple[Run, ...], ...]

    def __post_init__(self) -> None:
        tasks = [task for row in self.rows for task in row]
        for mesh, row in enumerate(self.rows):
            for task in row:
                if self.pipeline.mesh_of(task.stage) != mesh:
                    raise ValueError(f"{self.name}: task {task} is on mesh {mesh}, its stage is not")
        phases = {task.phase for task in tasks}
        once = phases & {"U", "S"}
        count = self.pipeline.num_stages * (len(phases - once) * self.pipeline.num_micro_batches + len(once))
        if len(set(tasks)) != len(tasks) or len(tasks) != count:
            raise ValueError(f"{self.name}: {len(tasks)} tasks, {len(set(tasks))} distinct; expected {count}\n{self}")

    def __str__(self) -> str:
        return "\n".join(f"mesh {mesh}: {' '.join(map(str, row))}" for mesh, row in enumerate(self.rows))

    @property
    def phases(self) -> frozenset[Phase]:
        return frozenset(task.phase for row in self.rows for task in row)

    def in_flight(self) -> list[int]:
        """For each stage, of how many microbatches it holds activations at most."""
        release = "W" if "W" in self.phases else "B"
        held, most = Counter(), Counter()
        for row in self.rows:
            for task in row:
                held[task.stage] += (task.phase == "F") - (task.phase == release)
                most[task.stage] = max(most[task.stage], held[task.stage])
        if release not in self.phases:  # nothing is kept
            return [1] * self.pipeline.num_stages
        return [most[stage] for stage in range(self.pipeline.num_stages)]

    def needs(self, task: Run) -> tuple[Run, ...]:
        """Tasks of this or another mesh whose results `task` uses."""
        stage, batch = task.stage, task.micro_batch
        last = self.pipeline.num_stages - 1
        match task.phase:
            case "F":
                return (Run(stage - 1, "F", batch),) if stage else ()
            case "B" | "I":
                after = (Run(stage + 1, task.phase, batch),) if stage < last else ()
                return (Run(stage, "F", batch), *after)
            case "W":
                return (Run(stage, "I", batch),)
            case "U":
                final: Phase = "W" if "W" in self.phases else "B"
                return tuple(Run(stage, final, b) for b in range(self.pipeline.num_micro_batches))
            case "S":
                return ()

    def program(self) -> Program:
        """The tasks with a transfer wherever a result goes to another mesh; mesh i is device i, values are named by task."""
        users: dict[Run, list[int]] = {}
        for mesh, row in enumerate(self.rows):
            for task in row:
                for needed in self.needs(task):
                    if self.pipeline.mesh_of(needed.stage) != mesh:
                        users.setdefault(needed, []).append(mesh)

        def instructions(mesh: int) -> Iterator[Instruction]:
            for task in self.rows[mesh]:
                for needed in self.needs(task):
                    if (source := self.pipeline.mesh_of(needed.stage)) != mesh:
                        yield Recv(str(needed), source)
                yield task
                yield from (Send(str(task), user) for user in users.get(task, ()))

        meshes = range(self.pipeline.num_meshes)
        return Program(tuple((mesh,) for mesh in meshes), tuple(tuple(instructions(mesh)) for mesh in meshes))

    def clock(
        self,
        seconds: Mapping[Phase, float] | Callable[[Run], float],
        transfer: Callable[[int, int], float] = lambda source, destination: 0.0,
    ) -> dict[Run, tuple[float, float]]:
        """When each task starts and ends, in seconds, if every mesh starts it as soon as it can.

        Args:
            seconds: what a task takes, by phase or for every task.
            transfer: from one mesh to another, how long it takes to send what a task made; the meshes go on meanwhile, and a mesh
                sends one thing after the other.

        Raises:
            DeadlockError: the meshes wait for one another.
        """
        time = seconds if callable(seconds) else lambda task: seconds[task.phase]
        clocks = [0.0] * self.pipeline.num_meshes
        sending = [0.0] * self.pipeline.num_meshes
        arrived: dict[tuple[str, int], float] = {}
        spans: dict[Run, tuple[float, float]] = {}
        for mesh, instruction in walk(self.program()):
            match instruction:
                case Recv(value):
                    clocks[mesh] = max(clocks[mesh], arrived[value, mesh])
                case Run():
                    start, clocks[mesh] = clocks[mesh], clocks[mesh] + time(instruction)
                    spans[instruction] = start, clocks[mesh]
                case Send(value, to):
                    sending[mesh] = arrived[value, to] = max(clocks[mesh], sending[mesh]) + transfer(mesh, to)
                case Free():
                    pass
                case _:
                    assert_never(instruction)
        return spans

    def makespan(
        self,
        seconds: Mapping[Phase, float] | Callable[[Run], float],
        transfer: Callable[[int, int], float] = lambda source, destination: 0.0,
    ) -> float:
        """When the last task ends and the last transfer arrives, as in `clock` but much faster.

        Args:
            seconds: what a task takes, by phase or for a task; asked once for all microbatches.
            transfer: as for `clock`.
        """
        time = seconds if callable(seconds) else lambda task: seconds[task.phase]

        def effect(mesh: int, instruction: Instruction) -> MaxPlusMap:
            match instruction:
                case Run():
                    return MaxPlusMap.task(time(instruction))
                case Send(_, to):
                    return MaxPlusMap.transfer(transfer(mesh, to))
                case Recv() | Free():
                    return MaxPlusMap()
                case _:
                    assert_never(instruction)

        return self._arrays.play(effect)

    @cached_property
    def _arrays(self) -> Clock:
        return Clock.of(self.program())


@dataclass(frozen=True, slots=True)
class ScheduleKind:
    """A named way to schedule a pipeline.

    Attributes:
        row: the tasks of one mesh.
        in_flight: of how many (stage, microbatch) a mesh holds activations at most, without listing its tasks: planning asks it often.
        summary: what is special about it, in a sentence.
    """

    row: Callable[[int, Pipeline], Iterator[Run]]
    in_flight: Callable[[int, Pipeline], int]
    summary: str


@lru_cache(maxsize=4)  # a search asks for the same one again and again; long ones take 100 MB with their clock
def make_schedule(name: str, pipeline: Pipeline) -> Schedule:
    """The schedule `name` (see `schedule_names`) of `pipeline`.

    Raises:
        ValueError: an unknown name, or several chunks where a mesh runs one stage.
    """
    kind = schedule_kind(name, pipeline)
    return Schedule(name, pipeline, tuple(tuple(kind.row(mesh, pipeline)) for mesh in range(pipeline.num_meshes)))


def schedule_kind(name: str, pipeline: Pipeline | None = None) -> ScheduleKind:
    """The registered schedule `name`; with a pipeline, checks that it can be scheduled so."""
    if name not in _KINDS:
        raise ValueError(f"unknown pipeline schedule {brief(name)}; expected one of {', '.join(schedule_names())}")
    if pipeline and pipeline.num_chunks > 1 and name not in ("interleaved_1f1b", "inference"):
        raise ValueError(
            f"schedule {name!r} runs one stage per mesh, not {pipeline.num_chunks}; use 'interleaved_1f1b'"
        )
    return _KINDS[name]


def splits_backward(name: str) -> bool:
    """Whether the backward pass comes in two parts, for inputs and for weights."""
    return "W" in make_schedule(name, Pipeline(1, 1)).phases


def has_backward(name: str) -> bool:
    """Whether there is a backward pass."""
    return bool({"B", "I"} & set(make_schedule(name, Pipeline(1, 1)).phases))


def schedule_names() -> tuple[str, ...]:
    """Return the names of the schedules that pipelines may have."""
    return tuple(name for name in _KINDS if name != WHOLE_STEP_SCHEDULE)


def _whole_step(mesh: int, pipeline: Pipeline) -> Iterator[Run]:
    yield Run(mesh, "S")


def _gpipe(mesh: int, pipeline: Pipeline) -> Iterator[Run]:
    batches = range(pipeline.num_micro_batches)
    yield from (Run(mesh, "F", batch) for batch in batches)
    yield from (Run(mesh, "B", batch) for batch in batches)
    yield Run(mesh, "U")


def _inference(mesh: int, pipeline: Pipeline) -> Iterator[Run]:
    for chunk in range(pipeline.num_chunks):
        stage = mesh + chunk * pipeline.num_meshes
        yield from (Run(stage, "F", batch) for batch in range(pipeline.num_micro_batches))


def _alternating(mesh: int, pipeline: Pipeline, depth: int) -> Iterator[Run]:
    """`depth` forwards, then a backward for every forward."""
    batches = pipeline.num_micro_batches
    for step in range(batches + depth):
        if step >= depth:
            yield Run(mesh, "B", step - depth)
        if step < batches:
            yield Run(mesh, "F", step)
    yield Run(mesh, "U")


def _depth_1f1b(mesh: int, pipeline: Pipeline) -> int:
    return min(pipeline.num_micro_batches, pipeline.num_meshes - mesh)


def _depth_overlap(mesh: int, pipeline: Pipeline) -> int:
    return min(pipeline.num_micro_batches, 2 * (pipeline.num_meshes - mesh) - 1)


def _zero_bubble_h1(mesh: int, pipeline: Pipeline) -> Iterator[Run]:
    """Each I comes as in 1f1b, its W as many microbatches later as meshes come before, so that no mesh holds more than the first."""
    batches = pipeline.num_micro_batches
    warm_up = min(batches, pipeline.num_meshes - mesh - 1)
    yield from (Run(mesh, "F", batch) for batch in range(warm_up))
    for batch in range(batches + mesh):
        if batch + warm_up < batches:
            yield Run(mesh, "F", batch + warm_up)
        if batch < batches:
            yield Run(mesh, "I", batch)
        if batch >= mesh:
            yield Run(mesh, "W", batch - mesh)
    yield Run(mesh, "U")


def _interleaved_1f1b(mesh: int, pipeline: Pipeline) -> Iterator[Run]:
    """Microbatches go through the chunks in groups, as large as the pipeline is long if that divides them, else a bit larger."""
    size, batches = pipeline.num_meshes, pipeline.num_micro_batches
    chunks = range(pipeline.num_chunks)
    count = max(1, batches // size)
    groups = [range(batches * i // count, batches * (i + 1) // count) for i in range(count)]
    forward = [Run(mesh + chunk * size, "F", batch) for group in groups for chunk in chunks for batch in group]
    backward = [Run(mesh + chunk * size, "B", b) for group in groups for chunk in reversed(chunks) for b in group]
    warm_up = _interleaved_warm_up(mesh, pipeline)
    yield from forward[:warm_up]
    for step, task in enumerate(backward):
        yield from forward[warm_up + step : warm_up + step + 1]
        yield task
    yield from (Run(mesh + chunk * size, "U") for chunk in chunks)


def _interleaved_warm_up(mesh: int, pipeline: Pipeline) -> int:
    count = max(1, pipeline.num_micro_batches // pipeline.num_meshes)
    largest_group = -(-pipeline.num_micro_batches // count)
    return 2 * (pipeline.num_meshes - mesh - 1) + (pipeline.num_chunks - 1) * largest_group


def _in_flight_interleaved(mesh: int, pipeline: Pipeline) -> int:
    return min(pipeline.num_micro_batches * pipeline.num_chunks, _interleaved_warm_up(mesh, pipeline) + 1)


_KINDS = {
    "gpipe": ScheduleKind(
        _gpipe,
        lambda mesh, pipeline: pipeline.num_micro_batches,
        "all forwards, then all backwards (Huang et al., NeurIPS'19)",
    ),
    "1f1b": ScheduleKind(
        lambda mesh, pipeline: _alternating(mesh, pipeline, _depth_1f1b(mesh, pipeline)),
        _depth_1f1b,
        "a backward as soon as there is one, so that few activations are alive (PipeDream-flush, Narayanan et al., ICML'21)",
    ),
    "1f1b_overlap_friendly": ScheduleKind(
        lambda mesh, pipeline: _alternating(mesh, pipeline, _depth_overlap(mesh, pipeline)),
        _depth_overlap,
        "1f1b with about twice the warm-up, so that transfers hide behind tasks (Zhuang et al., MLSys'23)",
    ),
    "interleaved_1f1b": ScheduleKind(
        _interleaved_1f1b,
        _in_flight_interleaved,
        "1f1b with several stages on each mesh: a smaller bubble, more transfers (Narayanan et al., SC'21)",
    ),
    "zero_bubble_h1": ScheduleKind(
        _zero_bubble_h1,
        lambda mesh, pipeline: min(pipeline.num_micro_batches, pipeline.num_meshes),
        "backward split in two; weight gradients fill the bubble of 1f1b in its memory (Qi et al., ICLR'24)",
    ),
    "inference": ScheduleKind(_inference, lambda mesh, pipeline: 1, "forwards only"),
    WHOLE_STEP_SCHEDULE: ScheduleKind(_whole_step, lambda mesh, pipeline: 1, "the whole step as one program"),
}
