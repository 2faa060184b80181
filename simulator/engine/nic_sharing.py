"""Messages of several meshes that share a NIC.

A card gives each message that it carries at the same time an equal part of its speed, in either direction (processor sharing; Kleinrock,
Queueing Systems II, 1976, chapter 4). A message is as fast as the fullest card on its way lets it be. Latency is not shared.
"""

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

type Way = tuple[int, int]
"""From a mesh to another."""

type Parts = Mapping[Hashable, float]
"""What part of the time of each card a message takes while it meets nobody."""


@dataclass(slots=True, eq=False)
class Message:
    """What a mesh sends to another over network cards.

    Attributes:
        ready: when the mesh hands it over; it begins when those that the mesh handed over before have arrived.
        latency: seconds before it gets to the cards.
        left: seconds that remained of it at time `since`, if it met nobody.
        cards: on its way.
        speed: 1 if it meets nobody.
    """

    name: str
    value: tuple[str, int, int]
    ready: float
    latency: float
    left: float
    cards: Parts
    begun: float = 0.0
    since: float = 0.0
    speed: float = 1.0
    end: float = 0.0

    @property
    def mesh(self) -> int:
        """Who sends it."""
        return self.value[1]


@dataclass(slots=True)
class NicSharing:
    """The network cards of a cluster, and the messages on their way over them until `time`."""

    time: float = 0.0
    # by mesh; the first has begun
    _queues: defaultdict[int, deque[Message]] = field(default_factory=lambda: defaultdict(deque))
    _carried: defaultdict[Hashable, list[Message]] = field(
        default_factory=lambda: defaultdict(list)
    )  # by card
    _coming: list[tuple[float, int, Message]] = field(
        default_factory=list
    )  # when they get to the cards, a heap
    # when they arrive, a heap; some have become outdated
    _ends: list[tuple[float, int, Message]] = field(default_factory=list)
    _numbers: "count[int]" = field(default_factory=count)

    def busy(self, mesh: int) -> bool:
        """Whether messages of a mesh are on their way."""
        return bool(self._queues[mesh])

    def send(self, message: Message) -> None:
        """Take a message of a mesh that has handed it over now, or later than `time`."""
        queue = self._queues[message.mesh]
        queue.append(message)
        if len(queue) == 1:
            self._begin(message, message.ready)

    def arrival(self) -> Message | None:
        """Go on until a message arrives, at `time`; None if none is on its way."""
        while self._coming or self._ends:
            if not self._ends or (self._coming and self._coming[0][0] < self._ends[0][0]):
                at, _, message = heappop(self._coming)
                self.time = message.since = max(self.time, at)
                for card in message.cards:
                    self._carried[card].append(message)
                self._share(message.cards, [message])
                continue
            end, _, message = heappop(self._ends)
            if end == message.end:
                self.time = end
                self._leave(message)
                return message
        return None

    def _begin(self, message: Message, start: float) -> None:
        message.begun = start
        heappush(self._coming, (start + message.latency, next(self._numbers), message))

    def _leave(self, message: Message) -> None:
        message.end = -1.0
        for card in message.cards:
            self._carried[card].remove(message)
        self._share(message.cards, [])
        queue = self._queues[message.mesh]
        queue.popleft()
        if queue:
            self._begin(queue[0], max(queue[0].ready, self.time))

    def _share(self, cards: Iterable[Hashable], others: Iterable[Message]) -> None:
        """Give what passes these cards, and others, the speed that it has from now on."""
        for message in dict.fromkeys(
            (*others, *(each for card in cards for each in self._carried[card]))
        ):
            message.left -= (self.time - message.since) * message.speed
            loads = (
                sum(each.cards[card] for each in self._carried[card]) for card in message.cards
            )
            message.since, message.speed = self.time, 1 / max((1.0, *loads))
            message.end = self.time + max(0.0, message.left) / message.speed
            heappush(self._ends, (message.end, next(self._numbers), message))


def meetings(ways: Mapping[Way, Parts]) -> dict[Way, Parts]:
    """The cards of each way at which messages of several meshes may meet; of those that are always used alike, one. Empty if there are none."""
    users: defaultdict[Hashable, dict[Way, float]] = defaultdict(dict)
    for way, cards in ways.items():
        for card, part in cards.items():
            users[card][way] = part
    alike = {
        tuple(parts.items()): card
        for card, parts in users.items()
        if len({mesh for mesh, _ in parts}) > 1
    }
    kept = frozenset(alike.values())
    if not kept:
        return {}
    return {
        way: {card: part for card, part in cards.items() if card in kept}
        for way, cards in ways.items()
    }
