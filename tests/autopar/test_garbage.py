"""The search for garbage is paused and comes back."""

import gc

import pytest

from autopar.garbage import paused_gc


@paused_gc()
def fails():
    assert not gc.isenabled()
    raise ZeroDivisionError


def test_it_comes_back_after_an_error():
    with pytest.raises(ZeroDivisionError):
        fails()
    assert gc.isenabled()


def test_it_stays_away_where_it_was_away():
    with paused_gc():
        with paused_gc():
            pass
        assert not gc.isenabled()
