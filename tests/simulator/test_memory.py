"""Memory by role adds up to the bytes that the compiler counted."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.memory import Footprint, MemoryUse, apportion, sum_roles, with_roles

ROLES = st.sampled_from(["parameters", "gradients", "activations", "communication"])
PARTS = st.dictionaries(ROLES, st.floats(0, 1e9), max_size=4)


@given(PARTS, st.integers(0, 10**9))
def test_apportioned_parts_sum_up_to_the_total(parts, total: int) -> None:
    apportioned = apportion(parts, total, "temporaries")
    assert sum(apportioned.values()) == total
    assert all(size > 0 for size in apportioned.values())


@given(PARTS, st.integers(0, 10**6))
def test_parts_that_fit_keep_their_size(parts, remainder: int) -> None:
    parts = {role: int(size) for role, size in parts.items() if int(size)}
    rest = {"temporaries": remainder} if remainder else {}
    assert apportion(parts, sum(parts.values()) + remainder, "temporaries") == parts | rest


def test_parts_that_exceed_the_total_shrink_in_proportion() -> None:
    assert apportion({"gradients": 30, "activations": 10}, 20, "temporaries") == {
        "gradients": 15,
        "activations": 5,
    }


@given(PARTS, PARTS, st.integers(0, 10**9))
def test_before_the_peak_all_parts_change_but_what_the_estimates_lack(peak, before, total: int):
    lacking = apportion(peak, total, "temporaries").get("temporaries", 0)
    apportioned = apportion(before, total, "temporaries", peak)
    shrink = min(1.0, total / (sum(peak.values()) or 1.0))
    assert apportioned == {
        role: size
        for role, size in {
            **{role: int(shrink * size) for role, size in before.items()},
            "temporaries": lacking,
        }.items()
        if size
    }


def test_roles_sum_up_to_the_bytes_of_the_compiler() -> None:
    use = MemoryUse(arguments=10, outputs=7, aliased=6, temporaries=4)
    use_with_roles = with_roles(use, {"parameters": 6, "optimizer": 3}, {"activations": 3})
    assert use_with_roles.roles == {
        "parameters": 6,
        "optimizer": 3,
        "inputs": 1,
        "outputs": 1,
        "activations": 3,
        "temporaries": 1,
    }
    assert use_with_roles.parts() == use_with_roles.roles
    assert use_with_roles.total == use.total == 15


def test_roles_that_do_not_sum_up_are_refused() -> None:
    with pytest.raises(ValueError, match="sum up to 3, expected 4"):
        MemoryUse(arguments=4, roles={"parameters": 3})


def test_without_roles_the_parts_are_those_of_the_compiler() -> None:
    assert MemoryUse(arguments=7, outputs=5, aliased=5, temporaries=2).parts() == {
        "arguments": 7,
        "outputs": 0,
        "temporaries": 2,
    }


def test_levels_are_summed_by_role() -> None:
    assert sum_roles({"inputs": 1}, {"inputs": 2, "outputs": 3}) == {"inputs": 3, "outputs": 3}


def test_the_probability_that_memory_fits_is_half_where_it_is_just_full() -> None:
    full = Footprint({"activations": 70.0}, reserve=5.0, capacity=80.0, fragmentation=5.0)
    assert (full.reserved, full.fits, full.fit_probability) == (80.0, True, 1.0)
    uncertain = replace(full, deviation=2.0)
    assert uncertain.fit_probability == 0.5
    less = replace(uncertain, parts={"activations": 66.0})
    assert less.fit_probability == pytest.approx(0.97725, abs=1e-5)
    assert replace(uncertain, parts={"activations": 74.0}).fit_probability == pytest.approx(
        1 - less.fit_probability
    )
    with pytest.raises(ValueError, match="nothing is known of the memory"):
        _ = replace(uncertain, parts={}).fit_probability
