"""Rows computed alone are those of the whole array."""

from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.extend.core import Var

from autopar.ir.evaluate import bind
from autopar.microbatch.batch_rows import cut_rows
from autopar.microbatch.created_rows import element_numbers, row_numbers, rows_of, whole_of

KEYS = {"one key": jax.random.key(7), "keys": jax.random.split(jax.random.key(8), 3)}


def for_each_key(draw):
    return lambda keys, shape: (
        jax.vmap(lambda key: draw(key, shape))(keys) if keys.ndim else draw(keys, shape)
    )


CREATED = {
    "8 bits": for_each_key(lambda key, shape: jax.random.bits(key, shape, jnp.uint8)),
    "16 bits": for_each_key(lambda key, shape: jax.random.bits(key, shape, jnp.uint16)),
    "32 bits": for_each_key(lambda key, shape: jax.random.bits(key, shape)),
    "keys": for_each_key(lambda key, shape: jax.random.split(key, shape)),
}


def data(array):
    return jax.random.key_data(array) if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else array


def assert_rows_are_those_of_the_whole(
    create, keys, count, chunks, run, rows, before, after, blocks=1
):
    """Compare the rows of every microbatch with those of the whole array.

    Args:
        create: creates an array from keys and a shape.
        keys: the keys.
        count: number of microbatches.
        chunks: runs of examples per microbatch.
        run: examples per run.
        rows: rows per run, in each block.
        before: dims before the rows.
        after: dims after the rows.
        blocks: blocks of rows.
    """
    dim, own_rows = len(before), blocks * chunks * rows
    size = count * own_rows
    (eqn,) = jax.make_jaxpr(lambda keys: create(keys, (*before, own_rows, *after)))(keys).eqns
    whole = data(create(keys, (*before, size, *after)))
    at = keys.ndim + dim
    of_blocks = np.split(np.moveaxis(np.asarray(whole), at, 0), blocks)
    parts = np.concatenate([cut_rows(block, count, chunks) for block in of_blocks], 1)
    positions = cut_rows(np.arange(count * chunks * run, dtype=np.int32), count, chunks)
    for own, expected in zip(positions, parts, strict=True):
        rows_eqn = rows_of(eqn, Var(jax.typeof(own)), dim, size, False, blocks)
        (found,) = bind(rows_eqn, [keys, own])
        np.testing.assert_array_equal(np.moveaxis(np.asarray(data(found)), at, 0), expected)
        original = whole_of(rows_eqn)
        assert (original.primitive, original.params) == (eqn.primitive, eqn.params)


dims = st.lists(st.integers(1, 3), max_size=2).map(tuple)
per_run = st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 2), (4, 2), (3, 2)])
cases = given(
    create=st.sampled_from(sorted(CREATED)),
    keys=st.sampled_from(sorted(KEYS)),
    count=st.integers(1, 4),
    chunks=st.integers(1, 3),
    per_run=per_run,
    before=dims,
    after=dims,
    blocks=st.integers(1, 3),
)


def check(create, keys, count, chunks, per_run, before, after, blocks):
    assert_rows_are_those_of_the_whole(
        CREATED[create], KEYS[keys], count, chunks, *per_run, before, after, blocks
    )


@settings(max_examples=4)
@cases
def test_random_rows_are_those_of_the_whole_array(**case):
    check(**case)


@pytest.mark.slow
@settings(max_examples=60)
@cases
def test_many_random_rows_are_those_of_the_whole_array(**case):
    check(**case)


def test_bits_of_64_are_those_of_the_whole_array():
    with jax.enable_x64(True):
        create = for_each_key(lambda key, shape: jax.random.bits(key, shape, jnp.uint64))
        assert_rows_are_those_of_the_whole(create, KEYS["keys"], 2, 3, 1, 1, (2,), (5,))


@given(st.integers(1, 4), st.integers(1, 3), per_run)
@settings(max_examples=10)
def test_counters_are_cut_like_the_batch(count, chunks, per_run):
    run, rows = per_run
    positions = cut_rows(np.arange(count * chunks * run, dtype=np.int32), count, chunks)
    expected = cut_rows(np.arange(count * chunks * rows), count, chunks)
    found = [row_numbers(jnp.asarray(own), chunks * rows) for own in positions]
    np.testing.assert_array_equal(found, expected)


@given(
    st.lists(st.integers(1, 2**31 - 1), min_size=3, max_size=3),
    st.integers(0, 2),
    st.lists(st.integers(0, 2**31 - 1), min_size=2, max_size=2),
)
@settings(max_examples=10)
def test_numbers_of_elements_are_exact_beyond_32_bits(whole, dim, rows):
    """Dims are too large to create, so only some of their elements are compared."""
    strides = [prod(whole[at + 1 :]) for at in range(3)]
    rows = [row % whole[dim] for row in rows]
    shape = [2 if whole[at] > 1 else 1 for at in range(3)]
    shape[dim] = len(rows)
    counted = [np.array(rows, np.int64) if at == dim else np.arange(shape[at]) for at in range(3)]
    if prod(whole) > 2**64:
        return
    grid = np.meshgrid(*counted, indexing="ij")
    expected = sum(axis.astype(object) * stride for axis, stride in zip(grid, strides, strict=True))
    positions = jnp.array(rows, jnp.int32)
    high, low = element_numbers(positions, shape, dim, whole)
    assert np.array_equal(np.asarray(high).astype(object) * 2**32 + np.asarray(low), expected)


def test_a_counter_keeps_its_dtype():
    positions = jnp.array([1, 5], jnp.int32)
    (eqn,) = jax.make_jaxpr(lambda: lax.broadcasted_iota(jnp.uint8, (2, 2, 3), 1))().eqns
    (found,) = bind(rows_of(eqn, Var(jax.typeof(positions)), 1, 8, folds=False), [positions])
    assert found.dtype == jnp.uint8
    np.testing.assert_array_equal(found[0, :, 0], positions)
