"""Cut a batch into microbatches by its rows, and put their rows together again.

Microbatch k of n has the examples k, k + n, k + 2n, ... So the shard of the batch on every device
has examples of every microbatch. Where a step combines neighbouring examples, as the pairs of a
preference loss, runs of neighbouring examples take the place of single examples.
"""

from collections.abc import Collection, Sequence
from math import gcd
from typing import Any, cast

import jax
import numpy as np
from jax.extend.core import Jaxpr

from autopar.ir.graph import aval_of


def num_examples(jaxpr: Jaxpr, batch: Collection[int]) -> int:
    """Return the number of examples in the inputs `batch`, which may have several rows for each."""
    return gcd(*(aval_of(jaxpr.invars[i]).shape[0] for i in batch))


def cut_rows[Array: (jax.Array, np.ndarray)](whole: Array, count: int, chunks: int) -> Array:
    """Return the microbatches of `whole`, stacked.

    Args:
        whole: an array of shape `(count * rows, ...)`.
        count: number of microbatches.
        chunks: number of runs of rows in each microbatch; divides `rows`.

    Returns:
        An array of shape `(count, rows, ...)`.
    """
    rows, rest = whole.shape[0] // count, whole.shape[1:]
    if chunks == rows:
        return cast(Any, whole.reshape(rows, count, *rest).swapaxes(0, 1))
    runs = whole.reshape(chunks, count, rows // chunks, *rest)
    return cast(Any, runs.swapaxes(0, 1).reshape(count, rows, *rest))


def take_rows(whole: jax.Array, number: jax.Array, count: int, chunks: int) -> jax.Array:
    """Return the rows of one microbatch, of shape `(rows, ...)`, without a copy of the others.

    Args:
        whole: an array of shape `(count * rows, ...)`.
        number: number of the microbatch.
        count: number of microbatches.
        chunks: number of runs of rows in each microbatch.
    """
    rows, rest = whole.shape[0] // count, whole.shape[1:]
    runs = whole.reshape(chunks, count, rows // chunks, *rest)
    return jax.lax.dynamic_index_in_dim(runs, number, 1, keepdims=False).reshape(rows, *rest)


def rows_dim(whole: Sequence[int], part: Sequence[int]) -> int:
    """Return the dim of the rows: the one that is larger in shape `whole` than in shape `part`."""
    sizes = zip(whole, part, strict=True)
    return next(dim for dim, (all_rows, rows) in enumerate(sizes) if all_rows > rows)


def put_rows(
    whole: jax.Array, part: jax.Array, number: jax.Array, count: int, chunks: int
) -> jax.Array:
    """Return `whole` with the rows of one microbatch where they are before `cut_rows`.

    Args:
        whole: the rows of all microbatches, in any dim.
        part: the rows of one microbatch.
        number: number of the microbatch.
        count: number of microbatches.
        chunks: number of runs of rows in each microbatch.
    """
    dim = rows_dim(whole.shape, part.shape)
    before, rows, rest = part.shape[:dim], part.shape[dim], part.shape[dim + 1 :]
    runs = whole.reshape(*before, chunks, count, rows // chunks, *rest)
    new = part.reshape(*before, chunks, 1, rows // chunks, *rest)
    updated = jax.lax.dynamic_update_slice_in_dim(runs, new, number, dim + 1)
    return updated.reshape(whole.shape)
