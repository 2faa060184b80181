"""Puts clocks on a program: what every mesh computes, communicates and waits for, and when.

All devices of a mesh do the same at the same time, so a mesh has one compute stream, which takes operations in order, and one
communication stream for each class of links, which takes what the compute stream hands it, in order. They meet where the compute stream
waits. A host hands the instructions to all. Computation and collectives may slow each other (`simulator.streams`). (`simulator.clock` finds the same makespan faster, and no timeline.)
"""

from typing import assert_never

from simulator.backend import Backend
from simulator.costs import CostModel, costs_of
from simulator.mixed import AnyCluster
from simulator.program import Free, Program, Recv, Run, Send, walk
from simulator.streams import Streams
from simulator.timeline import LINKS, Arrow, Span, Timeline
from simulator.work import Done, Start


def simulate(
    program: Program,
    cluster: AnyCluster,
    costs: CostModel | None = None,
    dispatch: float | None = None,
    backend: Backend | None = None,
) -> Timeline:
    """The timeline of one step of `program` on `cluster`, by default at the costs that `cluster` implies.

    A send moves `num_bytes` in equal parts from each device of its mesh to its partner in the other mesh. Gathers of what arrives are
    communication of the mesh that receives, which waits for them. `dispatch` are the seconds that the host of a mesh takes for each
    instruction, `host_launch_us` of the cluster by default; it runs ahead of the devices, which wait where it is late. A `backend` says so
    instead, and what the host takes for a step and for each kernel and collective, none of which starts before it is launched.

    Raises:
        DeadlockError: the meshes wait for one another.
        ValueError: a mesh has devices that the cluster lacks, a task has no body, there is no mesh at all, or both `dispatch` and a
            `backend` say what instructions cost.
    """
    if dispatch is not None and backend is not None:
        raise ValueError(
            f"dispatch={dispatch} and backend {backend.name!r}; expected one of them: a backend has its own instruction_us"
        )
    costs = costs or costs_of(cluster)
    if not program.meshes:
        raise ValueError("a program without meshes; expected at least one, with its devices and instructions")
    if dispatch is None:
        dispatch = max(pool.host_launch_us for pool in cluster.pools) * 1e-6
    for mesh, devices in enumerate(program.meshes):
        if max(devices) >= cluster.num_devices:
            raise ValueError(
                f"mesh {mesh} has devices {devices}; cluster {cluster.name!r} has devices 0 to {cluster.num_devices - 1}"
            )
    of_mesh, arrows = play(program, costs, dispatch, backend)
    spans = tuple(span for streams in of_mesh for span in streams.spans)
    levels = tuple(tuple(streams.levels) for streams in of_mesh) if program.levels else ()
    return Timeline(
        spans,
        program.meshes,
        program.memory,
        tuple(arrows),
        levels,
        program.matrix_flops(),
        program.unknown_kernels(),
        program.model_flops,
        program.examples,
    )


def play(
    program: Program, costs: CostModel, dispatch: float = 0.0, backend: Backend | None = None
) -> tuple[list[Streams], list[Arrow]]:
    """The streams of every mesh once all has happened, and the values on their way."""
    of_mesh = [Streams(mesh, devices, costs) for mesh, devices in enumerate(program.meshes)]
    if backend is not None:
        dispatch = 1e-6 * backend.instruction_us
        for streams in of_mesh:
            streams.launch = 1e-6 * backend.kernel_us
            streams.dispatch("step", 1e-6 * backend.step_us)
    sends: dict[tuple[str, int, int], Span] = {}
    arrows: list[Arrow] = []
    for mesh, instruction in walk(program):
        streams = of_mesh[mesh]
        streams.task = str(instruction)
        if dispatch and not isinstance(instruction, Free):
            streams.dispatch(str(instruction), dispatch)
        start, handed_over = streams.compute, streams.host
        match instruction:
            case Run():
                streams.play(program.body(instruction))
            case Send(value, to, num_bytes):
                pairs = program.pairs(mesh, to)
                seconds = costs.collective("permute", num_bytes / len(pairs), pairs)
                sends[value, mesh, to] = streams.communicate(str(instruction), seconds, "send", streams.link(pairs))
            case Recv(value, source, gather):
                sent = sends.pop((value, source, mesh))
                streams.wait_until(sent.end, str(instruction), "bubble")
                start = streams.compute
                if gather is not None:
                    streams.play((Start(gather), Done(gather.name)))
                arrows.append(Arrow(value, source, sent.start, mesh, streams.compute))
            case Free():
                pass
            case _:
                assert_never(instruction)
        streams.record_launches(str(instruction), handed_over)
        if program.levels:
            streams.record_levels(start, program.levels[mesh])
    for streams in of_mesh:
        for link in LINKS:
            streams.settle(link)
    return of_mesh, arrows
