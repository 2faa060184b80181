"""State of the workers as the driver knows it, so that a worker that hangs is found."""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

_VARIABLE = "AUTOPAR_SILENCE_SECONDS"
_SILENCE_SECONDS = 8.0
"""How long a worker may say nothing while steps run. XLA lets other threads run, so that a stopped process is told from a slow one."""

_RECENT_SECONDS = 10.0


class Silent(Enum):
    """Why a worker does not say what it is doing."""

    GONE = "is gone"
    MUTE = "does not answer"


@dataclass(frozen=True, slots=True)
class Doing:
    """What a worker is at, and for how many seconds; `mesh` is None for what is no instruction."""

    mesh: int | None
    instruction: str
    seconds: float

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for another mesh."""
        return self.instruction.startswith("recv ")

    def __str__(self) -> str:
        of = "" if self.mesh is None else f" of mesh {self.mesh}"
        return f"has been at {self.instruction}{of} for {self.seconds:.0f} s"


type State = Doing | Silent | None
"""None: it has nothing to do."""


class Watch:
    """Asks workers from time to time what they are doing, without waiting for their answers."""

    def __init__(self, actors: Sequence[Any]) -> None:
        self._actors = list(actors)
        self._asked: list[tuple[Any, float] | None] = [None] * len(actors)
        self._last: list[tuple[State, float]] = [(None, 0.0)] * len(actors)

    def poll(self, is_excused: bool) -> None:
        """Take the answers that have come, and ask again; who is excused owes none yet."""
        now = time.monotonic()
        for host, asked in enumerate(self._asked):
            if asked is None or ray.wait([asked[0]], timeout=0)[0]:
                if asked is not None:
                    self._last[host] = self._answer(asked[0]), asked[1]
                self._asked[host] = self._ask(host), now
            elif is_excused:
                self._asked[host] = asked[0], now

    def silence(self) -> list[float]:
        """For each worker, how many seconds it has owed an answer."""
        now = time.monotonic()
        return [0.0 if each is None else now - each[1] for each in self._asked]

    def states(self, seconds: float) -> list[State]:
        """What each worker is doing now, asked all at once and given so long to answer."""
        refs = [self._ask(host) for host in range(len(self._actors))]
        if refs:
            ray.wait(refs, num_returns=len(refs), timeout=seconds)
        return [self._answer(ref) for ref in refs]

    def last(self, host: int) -> Doing | None:
        """What a worker was at when it was asked before it fell silent; None where that is too long ago, or it had nothing to do."""
        (state, then), asked = self._last[host], self._asked[host]
        return (
            state
            if isinstance(state, Doing) and asked is not None and asked[1] - then < _RECENT_SECONDS
            else None
        )

    def _ask(self, host: int) -> Any:
        return self._actors[host].doing.options(concurrency_group="control").remote()

    def _answer(self, ref: Any) -> State:
        try:
            found = ray.get(ref, timeout=0)
        except RayActorError:
            return Silent.GONE
        except RayError:
            return Silent.MUTE
        return None if found is None else Doing(*found)


def silence_seconds(environment: Mapping[str, str] = os.environ) -> float:
    """How long a worker may say nothing while steps run, before it is taken for hung."""
    given = environment.get(_VARIABLE)
    try:
        seconds = _SILENCE_SECONDS if given is None else float(given)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ValueError(f"{_VARIABLE}={given!r}, expected a number of seconds")
    return seconds


def culprit(states: Sequence[State], asked: Sequence[int]) -> int:
    """The host that most likely keeps the others.

    One that does not answer; else of those that are at something and wait for no other mesh, the one that has been so for longest; else
    the first of those that were asked.
    """
    for host, state in enumerate(states):
        if isinstance(state, Silent):
            return host
    busy = [
        (each.seconds, -host)
        for host, each in enumerate(states)
        if isinstance(each, Doing) and not each.is_waiting
    ]
    return -max(busy)[1] if busy else asked[0]
