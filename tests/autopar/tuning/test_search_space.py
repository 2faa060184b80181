"""Search spaces are products of knobs, whose values may depend on earlier knobs."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.tuning.search_space import SearchSpace

DEGREES = SearchSpace({
    "tensor": [1, 2, 4, 8],
    "stages": lambda chosen: [s for s in (1, 2) if chosen["tensor"] * s <= 8],
    "data": lambda chosen: [8 // chosen["tensor"] // chosen["stages"]],
})  # fmt: skip


@given(
    st.dictionaries(
        st.sampled_from("abcd"), st.lists(st.integers(), max_size=3, unique=True), min_size=1
    )
)
def test_a_space_of_lists_is_the_product_of_its_domains(
    domains: dict[str, list[int]],
) -> None:
    expected = [dict(zip(domains, values, strict=True)) for values in product(*domains.values())]
    assert list(SearchSpace(domains)) == expected


def test_values_of_a_knob_depend_on_earlier_knobs() -> None:
    candidates = [tuple(candidate.values()) for candidate in DEGREES]
    assert candidates == [
        (1, 1, 8),
        (1, 2, 4),
        (2, 1, 4),
        (2, 2, 2),
        (4, 1, 2),
        (4, 2, 1),
        (8, 1, 1),
    ]


def test_a_line_changes_one_knob_and_the_knobs_that_depend_on_it() -> None:
    start = {"tensor": 2, "stages": 2, "data": 2}
    tensor_line = [tuple(candidate.values()) for candidate in DEGREES.line(start, "tensor")]
    assert tensor_line == [(1, 2, 4), (2, 2, 2), (4, 2, 1), (8, 1, 1)]
    assert [tuple(candidate.values()) for candidate in DEGREES.line(start, "stages")] == [
        (2, 1, 4),
        (2, 2, 2),
    ]
    assert DEGREES.line(start, "data") == [start]


def test_a_value_without_values_for_a_later_knob_is_in_no_candidate() -> None:
    space = SearchSpace({"a": [1, 2], "b": lambda chosen: [5] if chosen["a"] == 2 else []})
    assert list(space) == [{"a": 2, "b": 5}]
    assert space.line({"a": 2, "b": 5}, "a") == [{"a": 2, "b": 5}]


@pytest.mark.parametrize(
    ("domains", "error", "message"),
    [
        ({}, ValueError, r"the space has no knobs"),
        ({"tensor": 4}, TypeError, r"knob 'tensor' is 4, expected a list of values, or a function"),
        ({"kernel": "flash"}, TypeError, r"knob 'kernel' is 'flash', expected a list"),
        (
            {"a": [1], "b": lambda chosen: 8},
            TypeError,
            r"knob 'b' may be 8 after \{'a': 1\}, expected a list",
        ),
        (
            {"mesh": [[1, 2]]},
            TypeError,
            r"knob 'mesh' has the value \[1, 2\], expected values that can be hashed",
        ),
    ],
)
def test_an_invalid_space_is_refused(domains: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        list(SearchSpace(domains))
