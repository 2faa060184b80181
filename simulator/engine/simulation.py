"""Puts clocks on a program: what every mesh computes, communicates and waits for, and when.

All devices of a mesh do the same at the same time, so a mesh has one compute stream, which takes operations in order, and one
communication stream for each class of links, which takes what the compute stream hands it, in order. They meet where the compute stream
waits. A host hands the instructions to all. What several meshes send at the same time shares the network cards (`simulator.engine.nic_sharing`); their
collectives are not taken to meet. Computation and collectives may slow each other (`simulator.engine.streams`). (`simulator.engine.clock` finds the same makespan faster, and no timeline.)
"""

from collections import deque
from collections.abc import Iterable
from typing import assert_never

from simulator.backend import Backend
from simulator.costs.cost_fingerprint import check_cost_fingerprint
from simulator.costs.cost_model import CostModel, costs_of
from simulator.engine.nic_sharing import Message, NicSharing, Parts, Way, meetings
from simulator.engine.streams import Streams
from simulator.engine.timeline import Timeline
from simulator.hardware.heterogeneous import AnyCluster
from simulator.program import Free, Instruction, Program, Recv, Run, Send, walk
from simulator.spans import LINKS, Arrow, Span
from simulator.work import Done, OpList, Start


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
        ClusterError: the program has the seconds of another cluster.
        ValueError: a mesh has devices that the cluster lacks, a task has no body, there is no mesh at all, or both `dispatch` and a
            `backend` say what instructions cost.
    """
    if dispatch is not None and backend is not None:
        raise ValueError(
            f"dispatch={dispatch} and backend {backend.name!r}; expected one of them: a backend has its own instruction_us"
        )
    costs = costs or costs_of(cluster)
    if not program.meshes:
        raise ValueError(
            "a program without meshes; expected at least one, with its devices and instructions"
        )
    if dispatch is None:
        dispatch = max(pool.host_launch_us for pool in cluster.pools) * 1e-6
    for mesh, devices in enumerate(program.meshes):
        if max(devices) >= cluster.num_devices:
            raise ValueError(
                f"mesh {mesh} has devices {devices}; cluster {cluster.name!r} has devices 0 to {cluster.num_devices - 1}"
            )
    check_cost_fingerprint(program, cluster)
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
        program.unmodelled_kernels(),
        program.model_flops,
        program.examples,
    )


def play(
    program: Program, costs: CostModel, dispatch: float = 0.0, backend: Backend | None = None
) -> tuple[list[Streams], list[Arrow]]:
    """The streams of every mesh once all has happened, and the values on their way."""
    engine = _Engine(program, costs, dispatch, backend)
    if engine.meetings:
        engine.play_in_time()
    else:
        for mesh, instruction in walk(program):
            engine.carry_out(mesh, instruction)
    for streams in engine.of_mesh:
        for link in LINKS:
            streams.settle(link)
    return engine.of_mesh, engine.arrows


def meetings_of(
    program: Program, played: Iterable[tuple[int, Instruction]], costs: CostModel
) -> dict[Way, Parts]:
    """Where messages of several meshes may meet at network cards, so that when they arrive depends on what they all do.

    `played` are the instructions, each with its mesh; of those that send the same way, one is enough.
    """
    ways = dict.fromkeys((mesh, each.to) for mesh, each in played if isinstance(each, Send))
    return meetings({way: costs.cards(program.pairs(*way)) for way in ways})


class _Engine:
    def __init__(
        self, program: Program, costs: CostModel, dispatch: float, backend: Backend | None
    ) -> None:
        self._program, self._costs = program, costs
        self._dispatch = dispatch if backend is None else 1e-6 * backend.instruction_us
        self.of_mesh = [
            Streams(mesh, devices, costs) for mesh, devices in enumerate(program.meshes)
        ]
        self.arrows: list[Arrow] = []
        played = ((mesh, each) for mesh, row in enumerate(program.instructions) for each in row)
        self.meetings = meetings_of(program, played, costs)
        self._sent: dict[tuple[str, int, int], Span] = {}
        self._cards = NicSharing()
        if backend is not None:
            for streams in self.of_mesh:
                streams.launch = 1e-6 * backend.kernel_us
                streams.dispatch("step", 1e-6 * backend.step_us)

    def carry_out(self, mesh: int, instruction: Instruction) -> None:
        """Let a mesh carry out its next instruction."""
        program, streams = self._program, self.of_mesh[mesh]
        streams.task = str(instruction)
        if self._dispatch and not isinstance(instruction, Free):
            streams.dispatch(str(instruction), self._dispatch)
        start, handed_over = streams.compute, streams.host
        match instruction:
            case Run():
                streams.play(program.body(instruction))
            case Send():
                self._send(streams, instruction)
            case Recv(value, source, gather):
                sent = self._sent.pop((value, source, mesh))
                streams.wait_until(sent.end, str(instruction), "bubble")
                start = streams.compute
                if gather is not None:
                    streams.play((Start(gather), Done(gather.name)))
                self.arrows.append(Arrow(value, source, sent.start, mesh, streams.compute))
            case Free():
                pass
            case _:
                assert_never(instruction)
        streams.record_launches(str(instruction), handed_over)
        if program.levels:
            streams.record_levels(start, program.levels[mesh])

    def play_in_time(self) -> None:
        """Carry out everything where messages of several meshes meet at network cards.

        Meshes go on as far as they can without knowing when a message arrives that is still on its way; then the first of these arrives. A
        task that communicates between hosts waits until what its mesh sent before has arrived, after which its link takes it anyway. (This is
        exact unless it computes, and sends, without waiting for that communication.)
        """
        rows = self._program.instructions
        at, awake = [0] * len(rows), deque(range(len(rows)))
        while True:
            if not awake:
                message = self._cards.arrival()
                if message is None:
                    break
                self._arrive(message, self._cards.time)
                awake.extend((message.mesh, message.value[2]))
            mesh = awake.popleft()
            row = rows[mesh]
            while at[mesh] < len(row) and self._is_ready(mesh, row[at[mesh]]):
                instruction = row[at[mesh]]
                self.carry_out(mesh, instruction)
                at[mesh] += 1
                if (
                    isinstance(instruction, Send)
                    and (instruction.value, mesh, instruction.to) in self._sent
                ):
                    awake.append(instruction.to)
        if any(done < len(row) for done, row in zip(at, rows, strict=True)):
            for _ in walk(self._program):  # which raises, and shows where
                pass
            raise AssertionError("the engine is stuck where the walk is not")

    def _is_ready(self, mesh: int, instruction: Instruction) -> bool:
        match instruction:
            case Recv(value, source, gather):
                if (value, source, mesh) not in self._sent:
                    return False
                body: OpList = () if gather is None else (Start(gather),)
            case Run():
                body = self._program.body(instruction)
            case _:
                return True
        return not self._cards.busy(mesh) or not self.of_mesh[mesh].uses("between hosts", body)

    def _send(self, streams: Streams, send: Send) -> None:
        pairs = self._program.pairs(streams.mesh, send.to)
        num_bytes, link = send.num_bytes / len(pairs), streams.link(pairs)
        seconds, value = (
            self._costs.collective("collective_permute", num_bytes, pairs),
            (send.value, streams.mesh, send.to),
        )
        cards = self.meetings.get((streams.mesh, send.to), {})
        if not cards and not (link == "between hosts" and self._cards.busy(streams.mesh)):
            self._sent[value] = streams.communicate(str(send), seconds, "send", link)
            return
        streams.settle(link)
        latency = self._costs.collective("collective_permute", 0.0, pairs)
        ready = max(streams.compute, streams.free[link])
        self._cards.send(Message(str(send), value, ready, latency, seconds - latency, cards))

    def _arrive(self, message: Message, time: float) -> None:
        streams, link = self.of_mesh[message.mesh], "between hosts"
        streams.free[link] = time
        span = Span(
            message.name,
            message.mesh,
            "communication",
            message.begun,
            time,
            "send",
            message.name,
            link=link,
        )
        streams.spans.append(span)
        self._sent[message.value] = span
