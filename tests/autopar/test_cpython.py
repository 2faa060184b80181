"""The search for garbage is paused and comes back, and calls keep what they are."""

import gc

import pytest

from autopar import _cpython
from autopar._cpython import builds_graphs, paused_gc


@builds_graphs
def depth(count: int, *, bottom: int = 0) -> int:
    """How many calls it takes to `bottom`."""
    assert not gc.isenabled()
    return 0 if count == bottom else 1 + depth(count - 1, bottom=bottom)


def test_a_function_stays_what_it_is():
    assert depth(20, bottom=5) == 15
    assert depth.__name__ == "depth"
    assert gc.isenabled()


def test_garbage_is_looked_for_again_after_an_error():
    @builds_graphs
    def fails():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert gc.isenabled()


def test_it_is_not_looked_for_where_it_was_not():
    with paused_gc():
        with paused_gc():
            pass
        assert not gc.isenabled()


def test_many_new_objects_are_spared_the_first_search_until_it_adds_up(monkeypatch):
    monkeypatch.setattr(_cpython, "_FEW", 1_000)
    monkeypatch.setattr(_cpython, "_MANY", 50_000)
    monkeypatch.setattr(_cpython, "_unsearched", 0)
    searched = []

    def watch(phase, info):
        if phase == "start":
            searched.append((info["generation"], gc.get_count()[0]))

    gc.callbacks.append(watch)
    try:
        kept = [_build(20_000) for _ in range(2)]
        assert all(
            count < 5_000 for _, count in searched
        )  # of what the list itself took, if at all
        assert 2 not in {generation for generation, _ in searched}
        kept.append(_build(20_000))
        assert 2 in {generation for generation, _ in searched}
    finally:
        gc.callbacks.remove(watch)
    assert len(kept) == 3


@builds_graphs
def _build(count):
    return [[i] for i in range(count)]
