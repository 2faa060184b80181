"""Health of the workers: what each one is doing, so that the driver finds the one that hangs."""

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
"""Seconds that a worker may leave a query unanswered while steps run.

XLA lets the thread that answers run, so a slow process still answers, and only a stopped one is
silent for long.
"""

_RECENT_SECONDS = 10.0
"""Seconds for which the last answer of a worker that has become silent says what it is doing."""


class Unresponsive(Enum):
    """Why a worker does not answer."""

    GONE = "is gone"
    MUTE = "does not answer"


@dataclass(frozen=True, slots=True)
class Activity:
    """What a worker is doing.

    Attributes:
        mesh: the mesh of the instruction; None if the activity is not an instruction.
        instruction: the instruction, or another name of the activity.
        seconds: how long it has taken so far.
    """

    mesh: int | None
    instruction: str
    seconds: float

    @property
    def is_waiting(self) -> bool:
        """Whether the worker waits for another mesh."""
        return self.instruction.startswith("recv ")

    def __str__(self) -> str:
        mesh = "" if self.mesh is None else f" of mesh {self.mesh}"
        return f"has been at {self.instruction}{mesh} for {self.seconds:.0f} s"


type State = Activity | Unresponsive | None
"""The state of a worker; None if it is idle."""


class HealthMonitor:
    """Polls workers for their activity without blocking on their answers."""

    def __init__(self, actors: Sequence[Any]) -> None:
        self._actors = list(actors)
        self._queries: list[tuple[Any, float] | None] = [None] * len(actors)
        self._answers: list[tuple[State, float]] = [(None, 0.0)] * len(actors)

    def poll(self, is_excused: bool) -> None:
        """Collect the answers that have arrived and query those workers again.

        Args:
            is_excused: whether workers may be too busy to answer, so that their silence starts now.
        """
        now = time.monotonic()
        for host, query in enumerate(self._queries):
            if query is None:
                self._queries[host] = self._query(host), now
            elif ray.wait([query[0]], timeout=0)[0]:
                self._answers[host] = self._answer(query[0]), query[1]
                self._queries[host] = self._query(host), now
            elif is_excused:
                self._queries[host] = query[0], now

    def silence(self) -> list[float]:
        """Return for each worker the seconds since its unanswered query."""
        now = time.monotonic()
        return [0.0 if query is None else now - query[1] for query in self._queries]

    def states(self, seconds: float) -> list[State]:
        """Return the present state of each worker; all together have `seconds` to answer."""
        refs = [self._query(host) for host in range(len(self._actors))]
        if refs:
            ray.wait(refs, num_returns=len(refs), timeout=seconds)
        return [self._answer(ref) for ref in refs]

    def last(self, host: int) -> Activity | None:
        """Return the activity of a worker just before it fell silent.

        Returns:
            The activity in the last answer, or None if that answer is too old or says idle.
        """
        state, answered = self._answers[host]
        query = self._queries[host]
        is_recent = query is not None and query[1] - answered < _RECENT_SECONDS
        return state if isinstance(state, Activity) and is_recent else None

    def _query(self, host: int) -> Any:
        return self._actors[host].doing.options(concurrency_group="control").remote()

    def _answer(self, ref: Any) -> State:
        try:
            answer = ray.get(ref, timeout=0)
        except RayActorError:
            return Unresponsive.GONE
        except RayError:
            return Unresponsive.MUTE
        return None if answer is None else Activity(*answer)


def silence_seconds(environment: Mapping[str, str] = os.environ) -> float:
    """Return how long a worker may be silent while steps run, before it counts as hung.

    Raises:
        ValueError: AUTOPAR_SILENCE_SECONDS is not a positive number.
    """
    given = environment.get(_VARIABLE)
    try:
        seconds = _SILENCE_SECONDS if given is None else float(given)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ValueError(f"{_VARIABLE}={given!r}, expected a number of seconds above 0")
    return seconds


def culprit(states: Sequence[State], asked: Sequence[int]) -> int:
    """Return the host that most likely blocks the others.

    This is the first host that does not answer; otherwise the one that has been busy longest with
    something other than waiting for a mesh; otherwise the first of the hosts that were asked.

    Args:
        states: the state of each host.
        asked: the hosts whose answers are late.
    """
    for host, state in enumerate(states):
        if isinstance(state, Unresponsive):
            return host
    busy = [
        (state.seconds, -host)
        for host, state in enumerate(states)
        if isinstance(state, Activity) and not state.is_waiting
    ]
    return -max(busy)[1] if busy else asked[0]
