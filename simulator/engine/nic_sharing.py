"""NIC contention: messages of several meshes that share network interface cards.

A NIC gives each message that it carries an equal part of its speed, in either direction (processor
sharing; Kleinrock, Queueing Systems II, 1976, chapter 4). A message is as fast as the most loaded
NIC on its way allows. Latency is not shared.
"""

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

type MeshPair = tuple[int, int]
"""The mesh that sends and the one that receives."""

type NicLoads = Mapping[Hashable, float]
"""The part of each NIC's time that a message takes while no other message is on its way."""


@dataclass(slots=True, eq=False)
class Message:
    """A value on its way from mesh to mesh over NICs.

    Attributes:
        name: the send, as it prints.
        value: the value, the mesh that sends it and the one that receives it.
        ready: when the mesh issues it. It starts once all earlier messages of the mesh arrived.
        latency: seconds before it reaches the NICs.
        left: seconds that it still needed at time `since`, if it shared no NIC from then on.
        nics: the NICs on its way.
        start: when it started.
        since: when its speed last changed.
        speed: the part of its full speed that it has.
        end: when it arrives, unless its speed changes.
    """

    name: str
    value: tuple[str, int, int]
    ready: float
    latency: float
    left: float
    nics: NicLoads
    start: float = 0.0
    since: float = 0.0
    speed: float = 1.0
    end: float = 0.0

    @property
    def mesh(self) -> int:
        """The mesh that sends it."""
        return self.value[1]


@dataclass(slots=True)
class NicSharing:
    """The NICs of a cluster, and the messages on their way over them until `time`."""

    time: float = 0.0
    # The messages of each mesh; the first one has started.
    _queues: defaultdict[int, deque[Message]] = field(default_factory=lambda: defaultdict(deque))
    # The messages on each NIC.
    _carried: defaultdict[Hashable, list[Message]] = field(
        default_factory=lambda: defaultdict(list)
    )
    # A heap of when messages reach the NICs.
    _coming: list[tuple[float, int, Message]] = field(default_factory=list)
    # A heap of when messages arrive. Entries are outdated once the message's speed changes.
    _ends: list[tuple[float, int, Message]] = field(default_factory=list)
    _numbers: "count[int]" = field(default_factory=count)

    def busy(self, mesh: int) -> bool:
        """Return whether messages of a mesh are on their way."""
        return bool(self._queues[mesh])

    def send(self, message: Message) -> None:
        """Queue a message that its mesh issues at `time` or later."""
        queue = self._queues[message.mesh]
        queue.append(message)
        if len(queue) == 1:
            self._start(message, message.ready)

    def arrival(self) -> Message | None:
        """Advance `time` until a message arrives and return it; None if none is on its way."""
        while self._coming or self._ends:
            if not self._ends or (self._coming and self._coming[0][0] < self._ends[0][0]):
                at, _, message = heappop(self._coming)
                self.time = message.since = max(self.time, at)
                for nic in message.nics:
                    self._carried[nic].append(message)
                self._share(message.nics, [message])
                continue
            end, _, message = heappop(self._ends)
            if end == message.end:
                self.time = end
                self._leave(message)
                return message
        return None

    def _start(self, message: Message, start: float) -> None:
        message.start = start
        heappush(self._coming, (start + message.latency, next(self._numbers), message))

    def _leave(self, message: Message) -> None:
        message.end = -1.0
        for nic in message.nics:
            self._carried[nic].remove(message)
        self._share(message.nics, [])
        queue = self._queues[message.mesh]
        queue.popleft()
        if queue:
            self._start(queue[0], max(queue[0].ready, self.time))

    def _share(self, nics: Iterable[Hashable], others: Iterable[Message]) -> None:
        """Update the speed of `others` and of all messages on these NICs."""
        carried = (message for nic in nics for message in self._carried[nic])
        for message in dict.fromkeys((*others, *carried)):
            message.left -= (self.time - message.since) * message.speed
            loads = [sum(other.nics[nic] for other in self._carried[nic]) for nic in message.nics]
            message.since = self.time
            message.speed = 1 / max((1.0, *loads))
            message.end = self.time + max(0.0, message.left) / message.speed
            heappush(self._ends, (message.end, next(self._numbers), message))


def shared_nics(routes: Mapping[MeshPair, NicLoads]) -> dict[MeshPair, NicLoads]:
    """Return the NICs of each route at which messages of several meshes may contend.

    Args:
        routes: the NICs on the way from mesh to mesh.

    Returns:
        The shared NICs of all routes; empty if no NIC is shared. Of several NICs with the same
        loads from every route, one is enough.
    """
    users: defaultdict[Hashable, dict[MeshPair, float]] = defaultdict(dict)
    for route, nics in routes.items():
        for nic, load in nics.items():
            users[nic][route] = load
    representatives = {
        tuple(loads.items()): nic
        for nic, loads in users.items()
        if len({mesh for mesh, _ in loads}) > 1
    }
    shared = frozenset(representatives.values())
    if not shared:
        return {}
    return {
        route: {nic: load for nic, load in nics.items() if nic in shared}
        for route, nics in routes.items()
    }
