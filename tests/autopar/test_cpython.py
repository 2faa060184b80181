"""The garbage collector pauses only while a step is planned, and functions keep their behaviour."""

import gc

import jax.numpy as jnp
import pytest

import autopar
from autopar import _cpython
from autopar._cpython import builds_graphs, paused_gc


@builds_graphs
def depth(count: int, *, bottom: int = 0) -> int:
    """Count the calls down to `bottom`."""
    assert not gc.isenabled()
    return 0 if count == bottom else 1 + depth(count - 1, bottom=bottom)


def test_a_decorated_function_keeps_its_name_and_results():
    assert depth(20, bottom=5) == 15
    assert depth.__name__ == "depth"
    assert gc.isenabled()


def test_the_code_object_of_the_function_stays_as_it_is():
    def fun():
        return 1

    code = fun.__code__
    assert builds_graphs(fun)() == 1
    assert fun.__code__ is code


def test_the_collector_is_enabled_again_after_an_error():
    @builds_graphs
    def fails():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert gc.isenabled()


def test_a_collector_that_was_disabled_stays_disabled():
    with paused_gc():
        with paused_gc():
            pass
        assert not gc.isenabled()


def test_the_collector_pauses_while_a_step_is_traced_and_runs_again_afterwards():
    enabled = []

    def step(x):
        enabled.append(gc.isenabled())
        return x * 2

    parallelized = autopar.parallelize(step, method=autopar.DataParallel(devices=1))
    parallelized(jnp.ones((4, 2)))
    assert enabled
    assert not any(enabled)
    assert gc.isenabled()


def test_the_collector_is_enabled_again_when_tracing_a_step_fails():
    def step(x):
        assert not gc.isenabled()
        raise ZeroDivisionError

    parallelized = autopar.parallelize(step, method=autopar.DataParallel(devices=1))
    with pytest.raises(ZeroDivisionError):
        parallelized(jnp.ones((4, 2)))
    assert gc.isenabled()


def test_objects_that_the_user_froze_stay_frozen(monkeypatch):
    monkeypatch.setattr(_cpython, "_MIN_YOUNG_OBJECTS", 1_000)
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        assert frozen > _cpython._MAX_FROZEN_AT_START
        built = _build(20_000)
        assert gc.get_freeze_count() > 0.9 * frozen  # other threads drop a few of theirs
    finally:
        gc.unfreeze()
    assert len(built) == 20_000


def test_new_objects_skip_the_first_collection_until_many_have_been_made(monkeypatch):
    monkeypatch.setattr(_cpython, "_MIN_YOUNG_OBJECTS", 1_000)
    monkeypatch.setattr(_cpython, "_MAX_DEFERRED_OBJECTS", 50_000)
    monkeypatch.setattr(_cpython, "_deferred_objects", 0)
    collections = []

    def watch(phase, info):
        if phase == "start":
            collections.append((info["generation"], gc.get_count()[0]))

    gc.callbacks.append(watch)
    try:
        graphs = [_build(20_000) for _ in range(2)]
        # a collection may be due to the list itself
        assert all(young < 5_000 for _, young in collections)
        assert 2 not in {generation for generation, _ in collections}
        graphs.append(_build(20_000))
        assert 2 in {generation for generation, _ in collections}
    finally:
        gc.callbacks.remove(watch)
    assert len(graphs) == 3


@builds_graphs
def _build(count):
    return [[i] for i in range(count)]
