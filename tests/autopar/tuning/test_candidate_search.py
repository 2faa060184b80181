"""Candidate searches find the fastest valid candidate that fits, in few evaluations."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.tuning.candidate_search import search
from autopar.tuning.search_space import Candidate, SearchSpace
from autopar.tuning.trials import Trial, TuningResult

costs = st.dictionaries(
    st.sampled_from("abc"),
    st.lists(st.integers(1, 99), min_size=1, max_size=4, unique=True),
    min_size=1,
)


def fits(seconds: Callable[[Candidate], float]) -> Callable[[Candidate], Trial]:
    return lambda candidate: Trial(candidate, "fits", seconds(candidate), 1)


@given(costs, st.randoms())
def test_all_are_tried_and_the_best_of_them_found(
    knobs: dict[str, list[int]], random: object
) -> None:
    space = SearchSpace(knobs)
    times = {tuple(c.values()): random.random() for c in space}  # pyright: ignore[reportAttributeAccessIssue]
    found = TuningResult(
        tuple(search(space, fits(lambda c: times[tuple(c.values())]), "exhaustive"))
    )
    assert [trial.candidate for trial in found.trials] == list(space)
    assert times[tuple(found.best.values())] == min(times.values())


@given(costs)
def test_where_knobs_do_not_interfere_one_after_the_other_is_enough(
    knobs: dict[str, list[int]],
) -> None:
    trials = search(SearchSpace(knobs), fits(lambda c: sum(c.values())), "coordinate")
    assert TuningResult(tuple(trials)).best == {name: min(values) for name, values in knobs.items()}
    assert len(trials) <= 1 + 2 * sum(
        len(values) - 1 for values in knobs.values()
    )  # there, and to see that it is the best
    assert len({tuple(trial.candidate.items()) for trial in trials}) == len(trials)


def test_a_search_goes_from_what_is_invalid_over_what_does_not_fit_to_what_does() -> None:
    """Memory is 12 - 2a - b of 8; a=0 is invalid; candidates that fit take a + b seconds."""

    def evaluate(candidate: Candidate) -> Trial:
        a, b = candidate["a"], candidate["b"]
        used = 12 - 2 * a - b
        status = "invalid" if a == 0 else "fits" if used <= 8 else "does not fit"
        return Trial(
            candidate, status, None if a == 0 else a + b, None if a == 0 else used, reason="no"
        )

    space = SearchSpace({"a": [0, 1, 2], "b": [0, 1, 2]})
    found = TuningResult(tuple(search(space, evaluate, "coordinate")))
    assert found.best == {"a": 2, "b": 0}
    assert [trial.status for trial in found.trials[:4]] == [
        "invalid",
        "invalid",
        "invalid",
        "does not fit",
    ]
    assert list(found.table["status"]) == sorted(
        found.table["status"], key=["fits", "does not fit", "invalid"].index
    )


def test_measured_is_better_than_predicted() -> None:
    trials = Trial({"a": 1}, "fits", 1.0, 8), Trial({"a": 2}, "fits", 2.0, 8, measured_seconds=5.0)
    assert TuningResult(trials).best == {"a": 2}
    row = {
        "a": 2,
        "status": "fits",
        "predicted_seconds": 2.0,
        "predicted_bytes": 8,
        "measured_seconds": 5.0,
    }
    assert TuningResult(trials).table.iloc[0].to_dict() == {**row, "reason": ""}


def test_when_nothing_fits_the_nearest_to_it_is_named() -> None:
    trials = (
        Trial({"a": 1}, "does not fit", 1.0, 9 * 10**9, reason="does not fit"),
        Trial({"a": 2}, "invalid"),
    )
    with pytest.raises(
        ValueError, match=r"none of 2 candidates fits; the nearest to it: a=1: 1000.00 ms, 9.00 GB"
    ):
        _ = TuningResult(trials).best
