"""Ways through a space: all of it, or one knob after the other."""

from collections.abc import Callable, Iterator
from typing import Literal, assert_never

from autopar.tuning.search_space import Candidate, SearchSpace
from autopar.tuning.trials import Trial

type Search = Literal["exhaustive", "coordinate"]


def search(space: SearchSpace, evaluate: Callable[[Candidate], Trial], how: Search) -> list[Trial]:
    """What was tried, in that order, each candidate once.

    Args:
        how: "exhaustive" tries all; "coordinate" goes from the first candidate that is valid to the best in one knob after the other
            until no single knob makes it better (coordinate descent, as Slapo's tuner does it).
    """
    known: dict[tuple[tuple[str, object], ...], Trial] = {}

    def tried(candidate: Candidate) -> Trial:
        key = tuple(candidate.items())
        if key not in known:
            known[key] = evaluate(candidate)
        return known[key]

    match how:
        case "exhaustive":
            for candidate in space:
                tried(candidate)
        case "coordinate":
            _descend(space, tried)
        case _:
            assert_never(how)
    return list(known.values())


def _descend(space: SearchSpace, tried: Callable[[Candidate], Trial]) -> None:
    best = next(_valid(space, tried), None)
    while best is not None:
        before = best
        for name in space.domains:
            for candidate in space.line(best.candidate, name):
                best = min(best, tried(candidate), key=lambda trial: trial.rank)
        if best is before:
            return


def _valid(space: SearchSpace, tried: Callable[[Candidate], Trial]) -> Iterator[Trial]:
    return (trial for trial in map(tried, space) if trial.status != "invalid")
