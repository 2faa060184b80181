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
def test_exhaustive_search_tries_all_candidates_and_finds_the_best(
    knobs: dict[str, list[int]], random: object
) -> None:
    space = SearchSpace(knobs)
    times = {tuple(c.values()): random.random() for c in space}  # pyright: ignore[reportAttributeAccessIssue]
    result = TuningResult(
        tuple(search(space, fits(lambda c: times[tuple(c.values())]), "exhaustive"))
    )
    assert [trial.candidate for trial in result.trials] == list(space)
    assert times[tuple(result.best.values())] == min(times.values())


@given(costs)
def test_coordinate_search_finds_the_best_candidate_of_independent_knobs(
    knobs: dict[str, list[int]],
) -> None:
    trials = search(SearchSpace(knobs), fits(lambda c: sum(c.values())), "coordinate")
    assert TuningResult(tuple(trials)).best == {name: min(values) for name, values in knobs.items()}
    # one round reaches the best candidate, a second one shows that no knob improves it
    assert len(trials) <= 1 + 2 * sum(len(values) - 1 for values in knobs.values())
    assert len({tuple(trial.candidate.items()) for trial in trials}) == len(trials)


def test_a_search_proceeds_from_invalid_candidates_to_those_that_fit() -> None:
    """A candidate uses 12 - 2a - b bytes of 8 and takes a + b seconds; a=0 is invalid."""

    def evaluate(candidate: Candidate) -> Trial:
        a, b = candidate["a"], candidate["b"]
        used = 12 - 2 * a - b
        status = "invalid" if a == 0 else "fits" if used <= 8 else "does not fit"
        return Trial(
            candidate, status, None if a == 0 else a + b, None if a == 0 else used, reason="no"
        )

    space = SearchSpace({"a": [0, 1, 2], "b": [0, 1, 2]})
    result = TuningResult(tuple(search(space, evaluate, "coordinate")))
    assert result.best == {"a": 2, "b": 0}
    assert [trial.status for trial in result.trials[:4]] == [
        "invalid",
        "invalid",
        "invalid",
        "does not fit",
    ]
    assert list(result.table["status"]) == sorted(
        result.table["status"], key=["fits", "does not fit", "invalid"].index
    )


def test_a_measured_candidate_ranks_above_predicted_ones() -> None:
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


def test_the_error_without_a_fitting_candidate_names_the_nearest() -> None:
    trials = (
        Trial({"a": 1}, "does not fit", 1.0, 9 * 10**9, reason="does not fit"),
        Trial({"a": 2}, "invalid"),
    )
    with pytest.raises(
        ValueError, match=r"none of 2 candidates fits; the nearest to it: a=1: 1000.00 ms, 9.00 GB"
    ):
        _ = TuningResult(trials).best
