"""The fast tier covers each value, and both tiers together each pair of values."""

from itertools import combinations, product

from tests.tiers import covering, fast, pairs, tiers


def test_the_fast_tier_covers_values_and_both_tiers_cover_pairs():
    axes = ["abcd", (2, 4), (True, False), range(5)]
    parameters = pairs(*axes)
    rows = [param.values for param in parameters]
    for one, two in combinations(range(4), 2):
        assert {(row[one], row[two]) for row in rows} == set(product(axes[one], axes[two]))
    unmarked = [param.values for param in parameters if not param.marks]
    assert [set(column) for column in zip(*unmarked, strict=True)] == [set(axis) for axis in axes]
    assert 20 <= len(rows) <= 30
    assert 5 <= len(unmarked) <= 8


def test_a_covering_is_a_subset_of_the_rows_in_their_order():
    rows = [("a", 1), ("a", 2), ("b", 2), ("c", 2)]
    assert covering(rows, 2) == rows
    assert covering(rows, 1) == [("a", 1), ("b", 2), ("c", 2)]


def test_chosen_values_are_fast():
    assert [bool(param.marks) for param in fast("xyz", "zx")] == [False, True, False]


def test_the_first_value_of_a_single_parameter_is_fast():
    assert [bool(param.marks) for param in tiers(["x", "y", "z"])] == [False, True, True]
