"""Count the outcomes of fuzzed inputs, and limit the seconds of an input."""

import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

LIMIT = 60
"""Seconds that one input may take, in a test without a limit of its own."""


class Hang(Exception):
    """An input took longer than its limit."""


@contextmanager
def limit(seconds: int = LIMIT) -> Iterator[None]:
    """Raise `Hang` in the main thread when the block takes longer than `seconds`."""

    def ring(signum: int, frame: object) -> None:
        raise Hang(f"no end after {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@dataclass
class Outcomes:
    """The outcomes of the inputs of one kind.

    Attributes:
        counts: number of inputs by outcome, such as "right", "refused" or "accepted".
        faults: a line for each input with a fault: a wrong result, an internal error or a hang.
    """

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def add(
        self,
        what: str,
        attempt: Callable[[], str],
        errors: tuple[type[Exception], ...],
        seconds: int = LIMIT,
    ) -> None:
        """Count one input.

        Args:
            what: the input, as a reader needs it to reproduce a fault, e.g. "seed 17".
            attempt: uses the input and returns its outcome; an outcome in capitals, such as
                "WRONG", is a fault.
            errors: the errors that a bad input may raise.
            seconds: seconds that it may take.
        """
        try:
            with limit(seconds):
                outcome = attempt()
        except errors as error:
            outcome = "refused" if str(error).strip() else "EMPTY MESSAGE"
        except Hang as error:
            outcome = f"HANG: {error}"
        except Exception as error:  # an internal error may be any exception
            outcome = f"INTERNAL {type(error).__name__}: {error}"
        kind = outcome.split()[0].rstrip(":")
        self.counts[kind.lower()] += 1
        if kind.isupper():
            self.faults.append(f"{what}: {outcome[:300]}")


def as_table(counts: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return the lines of a table with a row per kind of input and a column per outcome."""
    outcomes = list(dict.fromkeys(outcome for row in counts.values() for outcome in row))
    width = max(map(len, counts))
    lines = [" | ".join([" " * width, *outcomes, "in all"])]
    for kind, row in counts.items():
        cells = [str(row.get(outcome, 0)).rjust(len(outcome)) for outcome in outcomes]
        lines.append(" | ".join([kind.ljust(width), *cells, str(sum(row.values())).rjust(6)]))
    return lines
