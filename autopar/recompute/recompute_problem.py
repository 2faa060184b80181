"""The recomputation problem: which values to compute again, so that memory fits in least time.

Forward values are computed one after the other, and read again by the backward pass. A value that
is kept is live until its last reader in the backward pass. A value that is computed again is live
until its last reader in the forward pass, and from the point at which its copy is made: right
before the backward pass reads it, or reads a copy that is computed from it.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np


@dataclass(frozen=True, slots=True)
class ForwardValue:
    """A value of the forward pass.

    Attributes:
        num_bytes: Its size.
        seconds: The time that it takes to compute it.
        made: The program point at which it is computed.
        until: The last program point of the forward pass that reads it.
        late: The first and the last program point of the backward pass that read it; (inf, -inf)
            if the backward pass reads it only to compute others again.
        sources: The numbers of the values that it is computed from, which are smaller than its own.
        repeatable: Whether it can be computed again.
    """

    num_bytes: float
    seconds: float
    made: int
    until: int
    late: tuple[float, float] = (inf, -inf)
    sources: tuple[int, ...] = ()
    repeatable: bool = True


@dataclass(frozen=True, eq=False)
class RecomputeProblem:
    """Forward values and the memory that all else takes.

    Attributes:
        values: The values, in the order in which they are computed.
        base: The bytes of everything else at each program point, shape (points,).
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
            earliest[number] = min(
                [earliest[number], *(earliest[reader] for reader in self.readers[number])]
            )
        return earliest

    @cached_property
    def open(self) -> list[bool]:
        """Whether each value may be computed again: where it is not live when its copy is made."""
        return [
            value.repeatable and value.until < earliest < inf
            for value, earliest in zip(self.values, self.earliest, strict=True)
        ]

    def copied_at(self, repeated: Collection[int]) -> dict[int, float]:
        """Return for each repeated value that is read the program point of its copy."""
        copied: dict[int, float] = {}
        for number in sorted(repeated, reverse=True):
            copies = (copied[reader] for reader in self.readers[number] if reader in copied)
            first = min([self.values[number].late[0], *copies])
            if first < inf:
                copied[number] = first
        return copied

    def live_bytes(self, repeated: Collection[int]) -> np.ndarray:
        """Return the bytes live at each program point, shape (points,).

        Args:
            repeated: The numbers of the values that are computed again.
        """
        copied = self.copied_at(repeated)
        change = np.zeros(len(self.base) + 1)
        for number, value in enumerate(self.values):
            copies = (copied[reader] - 1 for reader in self.readers[number] if reader in copied)
            last = max([value.late[1], *copies])
            until = value.until if number in repeated else max(value.until, last)
            spans: list[tuple[float, float]] = [(value.made, until)]
            if number in copied:
                spans.append((copied[number], last))
            for start, end in spans:
                if start <= end:
                    change[int(start)] += value.num_bytes
                    change[min(int(end) + 1, len(self.base))] -= value.num_bytes
        return self.base + np.cumsum(change)[:-1]

    def seconds(self, repeated: Collection[int]) -> float:
        """Return the time that it takes to compute values again."""
        return sum(self.values[number].seconds for number in self.copied_at(repeated))
