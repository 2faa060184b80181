"""Search strategies: exhaustive, or coordinate descent over one knob after the other."""

from collections.abc import Callable
from typing import Literal, assert_never

from autopar.tuning.search_space import Candidate, SearchSpace
from autopar.tuning.trials import Trial

type Search = Literal["exhaustive", "coordinate"]


def search(space: SearchSpace, evaluate: Callable[[Candidate], Trial], how: Search) -> list[Trial]:
    """Return the trials of a search in order, at most one per candidate.

    Args:
        space: the candidates.
        evaluate: the function that tries a candidate.
        how: "exhaustive" tries all candidates. "coordinate" is coordinate descent, as in Slapo's
            tuner: it starts at the first valid candidate and takes the best value of one knob after
            the other, until no single knob improves the candidate.
    """
    trials: dict[tuple[tuple[str, object], ...], Trial] = {}

    def evaluate_once(candidate: Candidate) -> Trial:
        key = tuple(candidate.items())
        if key not in trials:
            trials[key] = evaluate(candidate)
        return trials[key]

    match how:
        case "exhaustive":
            for candidate in space:
                evaluate_once(candidate)
        case "coordinate":
            _descend(space, evaluate_once)
        case _:
            assert_never(how)
    return list(trials.values())


def _descend(space: SearchSpace, evaluate: Callable[[Candidate], Trial]) -> None:
    valid = (trial for trial in map(evaluate, space) if trial.status != "invalid")
    best = next(valid, None)
    while best is not None:
        before = best
        for name in space.domains:
            for candidate in space.line(best.candidate, name):
                best = min(best, evaluate(candidate), key=lambda trial: trial.rank)
        if best is before:
            return
