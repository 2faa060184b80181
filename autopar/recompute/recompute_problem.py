"""The recomputation problem: which values to keep, compute again or offload in least time.

Forward values are computed one after the other, and read again by the backward pass. A value that
is kept is live until its last reader in the backward pass. A value that is computed again is live
until its last reader in the forward pass, and from the point at which its copy is made: right
before the backward pass reads it, or reads a copy that is computed from it. A value that is
offloaded is live until it is in host memory, and from the point at which it is fetched from there:
where the copy of a value that is computed again is made. Fetching it reads no other value.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np


@dataclass(frozen=True, slots=True)
class ForwardValue:
    """A value of the forward pass.

    Attributes:
        num_bytes: its size.
        seconds: the time that it takes to compute it.
        made: the program point at which it is computed.
        until: the last program point of the forward pass that reads it.
        late: the first and the last program point of the backward pass that read it; (inf, -inf)
            if the backward pass reads it only to compute others again.
        sources: the numbers of the values that it is computed from, which are smaller than its own.
        repeatable: whether it can be computed again.
        host_seconds: the time of its copies to host memory and back; inf if it can't be offloaded.
        sent: the last program point at which it is on the device, if it is offloaded and the
            forward pass does not read it later.
    """

    num_bytes: float
    seconds: float
    made: int
    until: int
    late: tuple[float, float] = (inf, -inf)
    sources: tuple[int, ...] = ()
    repeatable: bool = True
    host_seconds: float = inf
    sent: int = 0


@dataclass(frozen=True, slots=True)
class Choice:
    """What happens to values that are not kept.

    Attributes:
        repeated: the numbers of the values that are computed again.
        offloaded: the numbers of the values that are in host memory in between.
    """

    repeated: frozenset[int] = frozenset()
    offloaded: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return len(self.repeated) + len(self.offloaded)


@dataclass(frozen=True, eq=False)
class RecomputeProblem:
    """Forward values and the memory that all else takes.

    Attributes:
        values: the values, in the order in which they are computed.
        base: the bytes of everything else at each program point, shape (points,).
    """

    values: Sequence[ForwardValue]
    base: np.ndarray

    @cached_property
    def readers(self) -> list[list[int]]:
        """For each value the values that are computed from it."""
        readers: list[list[int]] = [[] for _ in self.values]
        for number, value in enumerate(self.values):
            for source in value.sources:
                readers[source].append(number)
        return readers

    @cached_property
    def earliest(self) -> list[float]:
        """For each value the earliest program point at which its copy may be made."""
        earliest: list[float] = [value.late[0] for value in self.values]
        for number in reversed(range(len(earliest))):
            readers = (r for r in self.readers[number] if self.values[r].repeatable)
            earliest[number] = min([earliest[number], *(earliest[r] for r in readers)])
        return earliest

    @cached_property
    def repeatable(self) -> list[bool]:
        """Whether each value may be computed again: where it is not live when its copy is made."""
        return [
            value.repeatable and value.until < earliest < inf
            for value, earliest in zip(self.values, self.earliest, strict=True)
        ]

    @cached_property
    def offloadable(self) -> list[bool]:
        """Whether each value may be offloaded: where it is in host memory before it is fetched."""
        return [
            value.host_seconds < inf and max(value.until, value.sent) < earliest < inf
            for value, earliest in zip(self.values, self.earliest, strict=True)
        ]

    def copied_at(self, choice: Choice) -> dict[int, float]:
        """Return for each value that is read the program point at which it is copied or fetched.

        Args:
            choice: what happens to the values.
        """
        copied: dict[int, float] = {}
        for number in sorted(choice.repeated | choice.offloaded, reverse=True):
            copies = (copied[reader] for reader in self._copies(number, choice, copied))
            first = min([self.values[number].late[0], *copies])
            if first < inf:
                copied[number] = first
        return copied

    def read(self, choice: Choice) -> Choice:
        """Return the choice without values that neither the backward pass nor a copy reads."""
        copied = self.copied_at(choice).keys()
        return Choice(choice.repeated & copied, choice.offloaded & copied)

    def live_bytes(self, choice: Choice) -> np.ndarray:
        """Return the bytes live at each program point, shape (points,).

        Args:
            choice: what happens to the values.
        """
        copied = self.copied_at(choice)
        change = np.zeros(len(self.base) + 1)
        for number, value in enumerate(self.values):
            copies = (copied[reader] - 1 for reader in self._copies(number, choice, copied))
            last = max([value.late[1], *copies])
            until: float = value.until
            if number in choice.offloaded:
                until = max(until, value.sent)
            elif number not in choice.repeated:
                until = max(until, last)
            spans: list[tuple[float, float]] = [(value.made, until)]
            if number in copied:
                spans.append((copied[number], last))
            for start, end in spans:
                if start <= end:
                    change[int(start)] += value.num_bytes
                    change[min(int(end) + 1, len(self.base))] -= value.num_bytes
        return self.base + np.cumsum(change)[:-1]

    def seconds(self, choice: Choice) -> float:
        """Return the time that it takes to compute values again, and to copy offloaded ones."""
        copied = self.copied_at(choice).keys()
        return sum(self.values[number].seconds for number in choice.repeated & copied) + sum(
            self.values[number].host_seconds for number in choice.offloaded & copied
        )

    def _copies(self, number: int, choice: Choice, copied: Mapping[int, float]) -> Iterator[int]:
        """Yield the values that are computed again from a value."""
        for reader in self.readers[number]:
            if reader in choice.repeated and reader in copied:
                yield reader
