"""The event engine: plays a program on a cluster and records what every mesh does, and when.

`simulator.engine.streams` defines the streams of a mesh, their overlap and their contention.
The engine adds what happens between meshes: sends and receives, the host that issues instructions,
and NIC contention of messages (`simulator.engine.nic_sharing`). Collectives of several meshes are
assumed not to contend. `simulator.engine.clock` computes the same makespan faster, without a
timeline.
"""

from collections import deque
from collections.abc import Iterable
from typing import assert_never

from simulator.backend import Backend
from simulator.costs.cost_fingerprint import check_cost_fingerprint
from simulator.costs.cost_model import CostModel, costs_of
from simulator.engine.nic_sharing import MeshPair, Message, NicLoads, NicSharing, shared_nics
from simulator.engine.streams import RecordedStreams
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
    """Return the timeline of one step of `program` on `cluster`.

    A send moves `num_bytes` in equal parts from each device of its mesh to its partner in the other
    mesh. The gather of a received value is communication of the mesh that receives, which waits for
    it. The host of a mesh runs ahead of the devices; they wait where it is late.

    Args:
        program: what runs.
        cluster: where it runs.
        costs: seconds of kernels, collectives and messages; by default those of `cluster`.
        dispatch: seconds of a mesh's host for each instruction; by default `host_launch_us` of the
            cluster.
        backend: the software that drives the devices, instead of `dispatch`. It also has the
            seconds of the host for a step, and for each kernel and collective, none of which starts
            before it is launched.

    Raises:
        DeadlockError: the meshes wait for one another.
        ClusterError: the program stores the seconds of another cluster.
        ValueError: a mesh has devices that the cluster lacks, a task has no body, the program has
            no mesh, or both `dispatch` and `backend` are given.
    """
    if dispatch is not None and backend is not None:
        raise ValueError(
            f"dispatch={dispatch} and backend {backend.name!r}; expected one of them: a backend has"
            " its own instruction_us"
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
                f"mesh {mesh} has devices {devices}; cluster {cluster.name!r} has devices"
                f" 0 to {cluster.num_devices - 1}; simulate it on a larger cluster"
            )
    check_cost_fingerprint(program, cluster)
    meshes, arrows = play(program, costs, dispatch, backend)
    spans = tuple(span for streams in meshes for span in streams.spans)
    levels = tuple(tuple(streams.levels) for streams in meshes) if program.levels else ()
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
) -> tuple[list[RecordedStreams], list[Arrow]]:
    """Return the streams of every mesh after the step, and the values sent from mesh to mesh."""
    engine = _Engine(program, costs, dispatch, backend)
    if engine.shared_nics:
        engine.play_by_arrivals()
    else:
        for mesh, instruction in walk(program):
            engine.carry_out(mesh, instruction)
    for streams in engine.meshes:
        for link in LINKS:
            streams.settle(link)
    return engine.meshes, engine.arrows


def shared_nics_of(
    program: Program, instructions: Iterable[tuple[int, Instruction]], costs: CostModel
) -> dict[MeshPair, NicLoads]:
    """Return the NICs at which messages of several meshes may contend; empty if there are none.

    Args:
        program: the program.
        instructions: its instructions, each with its mesh. Of those that send from the same mesh to
            the same mesh, one is enough.
        costs: the cost model, which has the NICs that a message passes.
    """
    routes = dict.fromkeys((mesh, op.to) for mesh, op in instructions if isinstance(op, Send))
    return shared_nics({route: costs.nics(program.pairs(*route)) for route in routes})


class _Engine:
    """The streams of all meshes, and the messages between them."""

    def __init__(
        self, program: Program, costs: CostModel, dispatch: float, backend: Backend | None
    ) -> None:
        self._program = program
        self._costs = costs
        self._dispatch = dispatch if backend is None else 1e-6 * backend.instruction_us
        self.meshes = [
            RecordedStreams(mesh, devices, costs) for mesh, devices in enumerate(program.meshes)
        ]
        self.arrows: list[Arrow] = []
        instructions = ((mesh, op) for mesh, row in enumerate(program.instructions) for op in row)
        self.shared_nics = shared_nics_of(program, instructions, costs)
        self._sent: dict[tuple[str, int, int], Span] = {}
        self._nics = NicSharing()
        if backend is not None:
            for streams in self.meshes:
                streams.launch = 1e-6 * backend.kernel_us
                streams.dispatch("step", 1e-6 * backend.step_us)

    def carry_out(self, mesh: int, instruction: Instruction) -> None:
        """Let a mesh carry out its next instruction."""
        program = self._program
        streams = self.meshes[mesh]
        streams.task = str(instruction)
        if self._dispatch and not isinstance(instruction, Free):
            streams.dispatch(str(instruction), self._dispatch)
        start = streams.compute
        dispatched = streams.host
        match instruction:
            case Run():
                op_levels = program.op_levels.get(instruction.task, ()) if program.levels else ()
                streams.play_task(program.body(instruction), op_levels)
            case Send():
                self._send(streams, instruction)
            case Recv(value, source, gather):
                sent = self._sent.pop((value, source, mesh))
                streams.idle_until(sent.end, str(instruction), "bubble")
                start = streams.compute
                if gather is not None:
                    streams.play_body((Start(gather), Done(gather.name)))
                self.arrows.append(Arrow(value, source, sent.start, mesh, streams.compute))
            case Free():
                pass
            case _:
                assert_never(instruction)
        streams.record_host(str(instruction), dispatched)
        if program.levels:
            streams.record_levels(start, program.levels[mesh])

    def play_by_arrivals(self) -> None:
        """Carry out everything, where messages of several meshes contend for NICs.

        Meshes advance as far as they can without the arrival time of a message that is on its way;
        then the first of these messages arrives. A task that communicates between hosts waits until
        all earlier messages of its mesh have arrived, because its link carries its collectives
        after them. That is exact unless the task computes, and sends, without waiting for its
        collectives.
        """
        rows = self._program.instructions
        at = [0] * len(rows)
        awake = deque(range(len(rows)))
        while True:
            if not awake:
                message = self._nics.arrival()
                if message is None:
                    break
                self._arrive(message, self._nics.time)
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
            for _ in walk(self._program):  # raises an error that shows where
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
        return not self._nics.busy(mesh) or not self.meshes[mesh].uses("between hosts", body)

    def _send(self, streams: RecordedStreams, send: Send) -> None:
        pairs = self._program.pairs(streams.mesh, send.to)
        num_bytes = send.num_bytes / len(pairs)
        link = streams.link(pairs)
        seconds = self._costs.collective("collective_permute", num_bytes, pairs)
        value = send.value, streams.mesh, send.to
        nics = self.shared_nics.get((streams.mesh, send.to), {})
        if not nics and not (link == "between hosts" and self._nics.busy(streams.mesh)):
            self._sent[value] = streams.send(str(send), seconds, link)
            return
        streams.settle(link)
        latency = self._costs.collective("collective_permute", 0.0, pairs)
        ready = max(streams.compute, streams.free[link])
        self._nics.send(Message(str(send), value, ready, latency, seconds - latency, nics))

    def _arrive(self, message: Message, time: float) -> None:
        streams = self.meshes[message.mesh]
        self._sent[message.value] = streams.record_arrival(message.name, message.start, time)
