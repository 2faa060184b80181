"""Pipeline schedules as data: the order of tasks on each mesh, and schedules by name.

A schedule is one function that lists the tasks of one mesh, and so also which stages the mesh has.
Data dependences, transfers, deadlocks, time and memory follow from these lists. `register_schedule`
adds a schedule.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import assert_never

from autopar.pipeline.schedule_kinds import Pipeline, ScheduleError, ScheduleKind, most_in_flight
from autopar.pipeline.shipped_schedules import SHIPPED_SCHEDULES
from autopar.plan import WHOLE_STEP_SCHEDULE
from simulator.engine.clock import Clock
from simulator.engine.max_plus import MaxPlusMap
from simulator.files import brief
from simulator.program import Free, Instruction, Phase, Program, Recv, Run, Send, walk

_KINDS = dict(SHIPPED_SCHEDULES)


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

    def waiting(self, stage: int) -> frozenset[tuple[int, int]]:
        """Return how many microbatches wait in a stage while it runs a task of another one.

        A pair has the number of microbatches that wait for the task that releases activations (B,
        or I of a backward pass in two parts), and the number of those that wait for their weight
        gradients (W) alone. Pairs that are smaller than another one are left out.
        """
        done: dict[int, Phase] = {}
        pairs = {(0, 0)}
        for row in self.rows:
            for task in row:
                if task.stage != stage or task.phase in ("U", "S"):
                    continue
                done.pop(task.micro_batch, None)
                phases = Counter(done.values())
                pairs.add((phases["F"], phases["I"]))
                if task.phase in ("F", "I"):
                    done[task.micro_batch] = task.phase
        if not self.phases & {"B", "I"}:  # activations are not kept
            return frozenset({(0, 0)})
        return frozenset(
            pair
            for pair in pairs
            if not any(pair != p and pair[0] <= p[0] and pair[1] <= p[1] for p in pairs)
        )

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

        return self._clock.makespan_with(effect)

    @cached_property
    def _clock(self) -> Clock:
        return Clock.of(self.program())


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
            every microbatch, and U of each of its stages. I, the gradients of inputs, and W, the
            gradients of weights, may stand in the place of B. A stage is on the mesh in whose row
            its tasks are; stage m must be the first one on mesh m.
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
        in_flight or (lambda mesh, pipeline: most_in_flight(row(mesh, pipeline))),
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
