"""The boundary between sizes that fit and sizes that do not."""

from hypothesis import given
from hypothesis import strategies as st

from autopar.capacity.size_attempts import settled
from autopar.capacity.size_search import boundary

FITS = st.lists(st.booleans(), min_size=1, max_size=40)


@given(FITS, st.integers(0, 39), st.booleans())
def test_the_answer_has_the_property_and_the_next_has_not(fits, start, upwards):
    start = min(start, len(fits) - 1)
    fits[start] = True
    stop = len(fits) - 1 if upwards else 0
    last, after = boundary(fits.__getitem__, start, stop)
    assert fits[last]
    assert min(start, stop) <= last <= max(start, stop)
    if after is None:
        assert last == stop
    else:
        assert not fits[after]
        assert after - last == (1 if upwards else -1)


RUNGS = st.lists(st.integers(0, 50), max_size=10)


@given(FITS, st.integers(0, 39), st.booleans(), RUNGS)
def test_the_search_may_start_at_a_size_that_does_not_fit(fits, start, is_largest, rungs):
    start = min(start, len(fits) - 1)
    towards, back = (len(fits) - 1, 0) if is_largest else (0, len(fits) - 1)
    found = settled(fits.__getitem__, start, towards, back, rungs)
    if found is None:
        between = range(min(start, back), max(start, back) + 1)
        assert not fits[start]
        assert not fits[back]
        assert not any(fits[rung] for rung in rungs if rung in between)
        return
    last, after = found
    assert fits[last]
    assert after is None or (not fits[after] and abs(after - last) == 1)


@given(st.integers(1, 10**6), st.integers(0, 10**6))
def test_monotone_sizes_take_few_evaluations(count, most):
    evaluated = []

    def fits(index):
        evaluated.append(index)
        return index <= most

    last, _ = boundary(fits, 0, count)
    assert last == min(count, most)
    assert len(evaluated) <= 2 * (count.bit_length() + 1)
