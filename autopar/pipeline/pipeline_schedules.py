"""Pipeline schedules as data: the order of tasks on each mesh.

A schedule is one function that lists the tasks of one mesh, and so also which stages the mesh has.
Data dependences, transfers, deadlocks, time and memory follow from these lists. `register_schedule`
adds a schedule.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import assert_never

from autopar.plan import WHOLE_STEP_SCHEDULE
from simulator.engine.clock import Clock
from simulator.engine.max_plus import MaxPlusMap
from simulator.files import brief
from simulator.program import Free, Instruction, Phase, Program, Recv, Run, Send, walk


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The size of a pipeline.

    Attributes:
        num_meshes: number of meshes, which work at the same time.
        num_micro_batches: number of microbatches in one step.
        num_chunks: number of stages on each mesh.

    Raises:
        ValueError: one of them is less than 1.
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
        """Number of stages on all meshes together."""
        return self.num_meshes * self.num_chunks


@dataclass(frozen=True)
class Schedule:
    """The tasks of one step, in order, for each mesh.

    Attributes:
        name: name of the schedule.
        pipeline: size of the pipeline.
        rows: tasks of each mesh, in order.

    Raises:
        ScheduleError: the tasks of a stage are on several meshes, or a task runs twice or never.
    """

    name: str
    pipeline: Pipeline
    rows: tuple[tuple[Run, ...], ...]

    def __post_init__(self) -> None:
        tasks = [task for row in self.rows for task in row]
        for mesh, row in enumerate(self.rows):
            for task in row:
                if self._meshes.get(task.stage) != mesh:
                    raise ScheduleError(
                        f"{self.name}: task {task} is on mesh {mesh}, its stage is not"
                    )
        phases = {task.phase for task in tasks}
        once = phases & {"U", "S"}
        count = self.pipeline.num_stages * (
            len(phases - once) * self.pipeline.num_micro_batches + len(once)
        )
        if len(set(tasks)) != len(tasks) or len(tasks) != count:
            raise ScheduleError(
                f"{self.name}: {len(tasks)} tasks, {len(set(tasks))} distinct; expected"
                f" {count}\n{self}"
            )

    def __str__(self) -> str:
        return "\n".join(
            f"mesh {mesh}: {' '.join(map(str, row))}" for mesh, row in enumerate(self.rows)
        )

    @cached_property
    def _meshes(self) -> dict[int, int]:
        return {task.stage: mesh for mesh, row in enumerate(self.rows) for task in row}

    def mesh_of(self, stage: int) -> int:
        """Return the number of the mesh that a stage is on."""
        return self._meshes[stage]

    @property
    def phases(self) -> frozenset[Phase]:
        """Phases of the tasks."""
        return frozenset(task.phase for row in self.rows for task in row)

    def in_flight(self) -> list[int]:
        """Return the most microbatches whose activations each stage holds at a time."""
        release = "W" if "W" in self.phases else "B"
        if release not in self.phases:  # activations are not kept
            return [1] * self.pipeline.num_stages
        current, peak = Counter(), Counter()
        for row in self.rows:
            for task in row:
                current[task.stage] += (task.phase == "F") - (task.phase == release)
                peak[task.stage] = max(peak[task.stage], current[task.stage])
        return [peak[stage] for stage in range(self.pipeline.num_stages)]

    def needs(self, task: Run) -> tuple[Run, ...]:
        """Return the tasks of any mesh whose results `task` uses."""
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
        """Return the tasks as a program, with a transfer wherever another mesh uses a result.

        Mesh i is device i, and values are named after tasks.
        """
        users: dict[Run, list[int]] = {}
        for mesh, row in enumerate(self.rows):
            for task in row:
                for needed in self.needs(task):
                    if self.mesh_of(needed.stage) != mesh:
                        users.setdefault(needed, []).append(mesh)

        meshes = range(self.pipeline.num_meshes)
        return Program(
            tuple((mesh,) for mesh in meshes),
            tuple(tuple(self._instructions(mesh, users)) for mesh in meshes),
        )

    def _instructions(self, mesh: int, users: Mapping[Run, Sequence[int]]) -> Iterator[Instruction]:
        """Yield the tasks of a mesh with their transfers; `users` are the meshes to send to."""
        for task in self.rows[mesh]:
            for needed in self.needs(task):
                source = self.mesh_of(needed.stage)
                if source != mesh:
                    yield Recv(str(needed), source)
            yield task
            yield from (Send(str(task), user) for user in users.get(task, ()))

    def makespan(
        self,
        seconds: Mapping[Phase, float] | Callable[[Run], float],
        transfer: Callable[[int, int], float] = lambda source, destination: 0.0,
    ) -> float:
        """Return the seconds until the last task has ended and the last transfer has arrived.

        Every mesh starts each task as soon as it can. Transfers overlap with tasks, and a mesh
        sends one value after the other.

        Args:
            seconds: seconds of a task by phase, or a function of the task that is called once for
                all microbatches.
            transfer: (source mesh, destination mesh) -> seconds to send the result of a task.

        Raises:
            DeadlockError: the meshes wait for one another.
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
    """A named way to schedule pipelines of any size.

    Attributes:
        row: (mesh, pipeline) -> the tasks of the mesh, in order.
        in_flight: (mesh, pipeline) -> the most pairs (stage, microbatch) whose activations the mesh
            holds at a time. Planning calls it often, so it should not list the tasks.
        summary: what distinguishes the schedule, in a sentence.
        num_chunks: number of stages on each mesh; None for any number.
        forward: name of the schedule of forwards only with the same stages on the same meshes, for
            steps that follow; "" if there is none.
    """

    row: Callable[[int, Pipeline], Iterable[Run]]
    in_flight: Callable[[int, Pipeline], int]
    summary: str
    num_chunks: int | None = 1
    forward: str = "inference"


class ScheduleError(ValueError):
    """A schedule is unknown, does not fit the pipeline, or does not run every task once."""


def register_schedule(
    name: str,
    row: Callable[[int, Pipeline], Iterable[Run]],
    *,
    num_chunks: int | None = 1,
    in_flight: Callable[[int, Pipeline], int] | None = None,
    forward: str = "",
    summary: str = "",
) -> None:
    """Add a pipeline schedule, for `PipeshardParallel(pipeline_schedule=name)` and for "auto".

    Args:
        name: name of the schedule.
        row: (mesh, pipeline) -> the tasks of that mesh, in order: F and B of each of its stages and
            every microbatch, and U of each of its stages. Instead of B there may be I, the
            gradients of inputs, and W, those of weights. A stage is on the mesh in whose row its
            tasks are; stage m must be the first one on mesh m.
        num_chunks: number of stages on each mesh; None for any number.
        in_flight: (mesh, pipeline) -> the most pairs (stage, microbatch) whose activations the mesh
            holds at a time; by default counted from the row.
        forward: name of the schedule of forwards only with the same stages on the same meshes, for
            `FollowParallel`: "inference" where stage s is on mesh s modulo the number of meshes,
            "inference_v" where the second chunk goes back over the meshes. With "", no step can
            follow.
        summary: what distinguishes the schedule, in a sentence.

    Raises:
        ScheduleError: the name is taken, or the schedule does not run a small pipeline.
    """
    if name in _KINDS:
        raise ScheduleError(
            f"there is a pipeline schedule {name!r} already; give yours another name"
        )
    kind = ScheduleKind(
        row,
        in_flight or (lambda mesh, pipeline: _most_in_flight(row(mesh, pipeline))),
        summary,
        num_chunks,
        forward,
    )
    _KINDS[name] = kind
    try:
        _check(make_schedule(name, Pipeline(2, 8, num_chunks or 1)))
    except BaseException:
        del _KINDS[name]
        make_schedule.cache_clear()
        raise


def _check(schedule: Schedule) -> None:
    """Raise ScheduleError unless tasks run after those they need, and stage m is on mesh m."""
    name = schedule.name
    done: set[Run] = set()
    for _, task in walk(schedule.program()):
        if isinstance(task, Run):
            missing = [str(needed) for needed in schedule.needs(task) if needed not in done]
            if missing:
                raise ScheduleError(
                    f"{name}: task {task} comes before {', '.join(missing)}, which it needs"
                )
            done.add(task)
    for mesh in range(schedule.pipeline.num_meshes):
        if schedule.mesh_of(mesh) != mesh:
            raise ScheduleError(
                f"{name}: stage {mesh} is on mesh {schedule.mesh_of(mesh)}, expected mesh {mesh}"
            )


def _most_in_flight(row: Iterable[Run]) -> int:
    """Return the most pairs (stage, microbatch) whose activations a mesh holds at a time."""
    tasks = list(row)
    release = "W" if any(task.phase == "W" for task in tasks) else "B"
    return max(
        accumulate(((task.phase == "F") - (task.phase == release) for task in tasks), initial=0)
    )


# A search uses the same schedule again and again. A long one takes 100 MB with its clock.
@lru_cache(maxsize=4)
def make_schedule(name: str, pipeline: Pipeline) -> Schedule:
    """Return the schedule `name` of `pipeline`.

    Args:
        name: one of `schedule_names`.
        pipeline: size of the pipeline.

    Raises:
        ScheduleError: the name is unknown, or the schedule does not run that number of stages per
            mesh, or needs more microbatches.
    """
    kind = schedule_kind(name, pipeline)
    return Schedule(
        name,
        pipeline,
        tuple(tuple(kind.row(mesh, pipeline)) for mesh in range(pipeline.num_meshes)),
    )


def schedule_kind(name: str, pipeline: Pipeline | None = None) -> ScheduleKind:
    """Return the registered schedule `name`.

    Args:
        name: one of `schedule_names`.
        pipeline: if given, a pipeline that the schedule must be able to run.

    Raises:
        ScheduleError: the name is unknown, or the schedule does not run that number of stages per
            mesh.
    """
    if name not in _KINDS:
        raise ScheduleError(
            f"unknown pipeline schedule {brief(name)}; expected one of"
            f" {', '.join(schedule_names())}"
        )
    chunks = _KINDS[name].num_chunks
    if pipeline and chunks is not None and pipeline.num_chunks != chunks:
        others = ", ".join(
            other
            for other in schedule_names()
            if _KINDS[other].num_chunks in (None, pipeline.num_chunks)
        )
        raise ScheduleError(
            f"schedule {name!r} runs {chunks} stage(s) per mesh, not {pipeline.num_chunks}; use"
            f" num_chunks={chunks}, or one of {others}"
        )
    return _KINDS[name]


def smallest(name: str) -> Pipeline:
    """Return a small pipeline that the schedule `name` can run."""
    return Pipeline(1, 2, schedule_kind(name).num_chunks or 1)


def splits_backward(name: str) -> bool:
    """Return whether the schedule has I and W in place of B.

    I computes the gradients of inputs, W the gradients of weights.
    """
    return "W" in make_schedule(name, smallest(name)).phases


def has_backward(name: str) -> bool:
    """Return whether the schedule has a backward pass."""
    return bool({"B", "I"} & set(make_schedule(name, smallest(name)).phases))


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
    """Yield `depth` forwards, then a backward after every forward."""
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
    """Yield tasks in the order of 1f1b, with the gradients of weights delayed.

    Each W comes as many microbatches later as there are meshes before this one. So no mesh holds
    more activations than the first one.
    """
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
    """Yield tasks chunk by chunk for groups of microbatches.

    A group has one microbatch per mesh if that divides the number of microbatches, and more
    otherwise.
    """
    size, batches = pipeline.num_meshes, pipeline.num_micro_batches
    chunks = range(pipeline.num_chunks)
    count = max(1, batches // size)
    groups = [range(batches * i // count, batches * (i + 1) // count) for i in range(count)]
    forward = [
        Run(mesh + chunk * size, "F", batch)
        for group in groups
        for chunk in chunks
        for batch in group
    ]
    backward = [
        Run(mesh + chunk * size, "B", b)
        for group in groups
        for chunk in reversed(chunks)
        for b in group
    ]
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
    return min(
        pipeline.num_micro_batches * pipeline.num_chunks, _interleaved_warm_up(mesh, pipeline) + 1
    )


def _inference_v(mesh: int, pipeline: Pipeline) -> Iterator[Run]:
    for stage in _v_stages(mesh, pipeline):
        yield from (Run(stage, "F", batch) for batch in range(pipeline.num_micro_batches))


def _v_stages(mesh: int, pipeline: Pipeline) -> tuple[int, int]:
    """Return the stages of a mesh if the second chunk goes back over the meshes.

    The first mesh then has the first and the last stage.
    """
    return mesh, 2 * pipeline.num_meshes - 1 - mesh


class _Tasks:
    """The tasks of a mesh with two chunks, with microbatches in order for each chunk and phase.

    Attributes:
        listed: the tasks.
    """

    def __init__(self, stages: tuple[int, int], num_micro_batches: int) -> None:
        self._stages, self._count = stages, num_micro_batches
        self._next: Counter[tuple[int, Phase]] = Counter()
        self.listed: list[Run] = []

    def add(self, chunk: int, *phases: Phase) -> None:
        """List the next microbatch of each phase, if there is one."""
        for phase in phases:
            if (batch := self._next[chunk, phase]) < self._count:
                self.listed.append(Run(self._stages[chunk], phase, batch))
            self._next[chunk, phase] += 1

    def done(self, chunk: int, phase: Phase) -> int:
        """Return the number of microbatches of a phase that have been listed."""
        return self._next[chunk, phase]


def _zero_bubble_v(mesh: int, pipeline: Pipeline) -> Iterator[Run]:
    """Yield tasks of a pipeline that goes down the meshes and back up.

    Where F, I and W take equally long, no mesh waits between its first task and its last one. Each
    mesh holds as many activations as the first mesh of 1f1b.
    """
    meshes = pipeline.num_meshes
    tasks = _Tasks(_v_stages(mesh, pipeline), pipeline.num_micro_batches)
    # Enough rounds to fill the pipeline; `tasks` leaves out microbatches that do not exist.
    rounds = max(pipeline.num_micro_batches, 2 * meshes - 1)
    for _ in range(2 * (meshes - mesh) - 1):
        tasks.add(0, "F")
    for _ in range(mesh):
        tasks.add(1, "F")
        tasks.add(0, "F")
    for _ in range(meshes - mesh):
        tasks.add(1, "F", "I", "W")
    while tasks.done(1, "F") < rounds:
        if tasks.done(0, "F") < rounds:
            tasks.add(0, "F")
        tasks.add(0, "I", "W")
        tasks.add(1, "F", "I", "W")
    for _ in range(mesh):
        tasks.add(0, "I")
        tasks.add(1, "I")
    for _ in range(meshes - mesh):
        tasks.add(0, "I", "W")
    for chunk in (1, 0):
        for _ in range(tasks.done(chunk, "I") - tasks.done(chunk, "W")):
            tasks.add(chunk, "W")
    yield from tasks.listed
    yield from (Run(stage, "U") for stage in sorted(_v_stages(mesh, pipeline)))


def _dualpipe_v(mesh: int, pipeline: Pipeline) -> Iterator[Run]:
    """Yield tasks in which forwards of one chunk alternate with backwards of the other one.

    The communication of each may overlap with the computation of the other.
    """
    meshes, batches = pipeline.num_meshes, pipeline.num_micro_batches
    if batches < 2 * meshes:
        raise ScheduleError(
            "schedule 'dualpipe_v' needs at least twice as many microbatches as meshes:"
            f" {2 * meshes} for {meshes} meshes, not {batches}"
        )
    tasks = _Tasks(_v_stages(mesh, pipeline), batches)
    later = meshes - mesh - 1
    delayed: deque[int] = deque()  # chunks of the W tasks that are still to be listed
    for _ in range(2 * later):
        tasks.add(0, "F")
    for _ in range(mesh + 1):
        tasks.add(0, "F")
        tasks.add(1, "F")
    for _ in range(later):
        tasks.add(1, "I", "W", "F")
    for _ in range(batches - 2 * meshes + mesh + 1):
        tasks.add(0, "F")
        tasks.add(1, "I", "W", "F")
        tasks.add(0, "I", "W")
    for _ in range(later):
        tasks.add(1, "I", "W", "F")
        tasks.add(0, "I", "W")
    # The chunks alternate. In the second half only I is listed, which the mesh before depends on.
    for number in range(2 * (mesh + 1)):
        chunk = 1 - number % 2
        tasks.add(chunk, "I")
        if number < mesh + 1:
            tasks.add(chunk, "W")
        else:
            delayed.append(chunk)
    for _ in range(later):
        tasks.add(delayed.popleft(), "W")
        tasks.add(0, "I")
        delayed.append(0)
    for chunk in delayed:
        tasks.add(chunk, "W")
    yield from tasks.listed
    yield from (Run(stage, "U") for stage in sorted(_v_stages(mesh, pipeline)))


_KINDS = {
    "gpipe": ScheduleKind(
        _gpipe,
        lambda mesh, pipeline: pipeline.num_micro_batches,
        "all forwards, then all backwards (Huang et al., NeurIPS'19)",
    ),
    "1f1b": ScheduleKind(
        lambda mesh, pipeline: _alternating(mesh, pipeline, _depth_1f1b(mesh, pipeline)),
        _depth_1f1b,
        "a backward as soon as there is one, so that few activations are alive (PipeDream-flush,"
        " Narayanan et al., ICML'21)",
    ),
    "1f1b_overlap_friendly": ScheduleKind(
        lambda mesh, pipeline: _alternating(mesh, pipeline, _depth_overlap(mesh, pipeline)),
        _depth_overlap,
        "1f1b with about twice the warm-up, so that transfers hide behind tasks (Zhuang et al.,"
        " MLSys'23)",
    ),
    "interleaved_1f1b": ScheduleKind(
        _interleaved_1f1b,
        _in_flight_interleaved,
        "1f1b with several stages on each mesh: a smaller bubble, more transfers (Narayanan et"
        " al., SC'21)",
        None,
    ),
    "zero_bubble_h1": ScheduleKind(
        _zero_bubble_h1,
        lambda mesh, pipeline: min(pipeline.num_micro_batches, pipeline.num_meshes),
        "backward split in two; weight gradients fill the bubble of 1f1b in its memory (Qi et"
        " al., ICLR'24)",
    ),
    "zero_bubble_v": ScheduleKind(
        _zero_bubble_v,
        lambda mesh, pipeline: _most_in_flight(_zero_bubble_v(mesh, pipeline)),
        "two stages on each mesh, the second on the way back: no bubble in the memory of 1f1b"
        " (ZB-V, Qi et al., NeurIPS'24)",
        2,
        "inference_v",
    ),
    "dualpipe_v": ScheduleKind(
        _dualpipe_v,
        lambda mesh, pipeline: _most_in_flight(_dualpipe_v(mesh, pipeline)),
        "placed as zero_bubble_v, forwards beside backwards (DualPipe of DeepSeek-V3, arXiv"
        " 2412.19437, cut in half)",
        2,
        "inference_v",
    ),
    "inference": ScheduleKind(_inference, lambda mesh, pipeline: 1, "forwards only", None),
    "inference_v": ScheduleKind(
        _inference_v,
        lambda mesh, pipeline: 1,
        "forwards only, placed as zero_bubble_v",
        2,
        "inference_v",
    ),
    WHOLE_STEP_SCHEDULE: ScheduleKind(
        _whole_step, lambda mesh, pipeline: 1, "the whole step as one program"
    ),
}
