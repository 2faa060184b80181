"""The shipped pipeline schedules: a function per schedule lists the tasks of one mesh in order."""

from collections import Counter, deque
from collections.abc import Iterator

from autopar.pipeline.schedule_kinds import Pipeline, ScheduleError, ScheduleKind, most_in_flight
from autopar.plan import WHOLE_STEP_SCHEDULE
from simulator.program import Phase, Run


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
            f" {2 * meshes} for {meshes} meshes, not {batches}; use more microbatches, or another"
            " schedule"
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


SHIPPED_SCHEDULES = {
    "gpipe": ScheduleKind(
        _gpipe,
        lambda mesh, pipeline: pipeline.num_micro_batches,
        "all forwards, then all backwards (Huang et al., NeurIPS'19)",
        forward="inference",
    ),
    "1f1b": ScheduleKind(
        lambda mesh, pipeline: _alternating(mesh, pipeline, _depth_1f1b(mesh, pipeline)),
        _depth_1f1b,
        "a backward as soon as there is one, so that few activations are alive (PipeDream-flush,"
        " Narayanan et al., ICML'21)",
        forward="inference",
    ),
    "1f1b_overlap_friendly": ScheduleKind(
        lambda mesh, pipeline: _alternating(mesh, pipeline, _depth_overlap(mesh, pipeline)),
        _depth_overlap,
        "1f1b with about twice the warm-up, so that transfers hide behind tasks (Zhuang et al.,"
        " MLSys'23)",
        forward="inference",
    ),
    "interleaved_1f1b": ScheduleKind(
        _interleaved_1f1b,
        _in_flight_interleaved,
        "1f1b with several stages on each mesh: a smaller bubble, more transfers (Narayanan et"
        " al., SC'21)",
        None,
        "inference",
    ),
    "zero_bubble_h1": ScheduleKind(
        _zero_bubble_h1,
        lambda mesh, pipeline: min(pipeline.num_micro_batches, pipeline.num_meshes),
        "backward split in two; weight gradients fill the bubble of 1f1b in its memory (Qi et"
        " al., ICLR'24)",
        forward="inference",
    ),
    "zero_bubble_v": ScheduleKind(
        _zero_bubble_v,
        lambda mesh, pipeline: most_in_flight(_zero_bubble_v(mesh, pipeline)),
        "two stages on each mesh, the second on the way back: no bubble in the memory of 1f1b"
        " (ZB-V, Qi et al., NeurIPS'24)",
        2,
        "inference_v",
    ),
    "dualpipe_v": ScheduleKind(
        _dualpipe_v,
        lambda mesh, pipeline: most_in_flight(_dualpipe_v(mesh, pipeline)),
        "placed as zero_bubble_v, forwards beside backwards (DualPipe of DeepSeek-V3, arXiv"
        " 2412.19437, cut in half)",
        2,
        "inference_v",
    ),
    "inference": ScheduleKind(
        _inference, lambda mesh, pipeline: 1, "forwards only", None, "inference"
    ),
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
