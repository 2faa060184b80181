"""The search for garbage is paused and comes back, and calls keep what they are."""

import gc

import pytest

from autopar.interpreter import builds_graphs, paused_gc


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
