"""Cut a batch into microbatches by its rows, and join their rows again.

Microbatch k of n has the examples k, k + n, k + 2n, ... So the shard of the batch on every device
has examples of every microbatch. Where a step combines neighbouring examples, as the pairs of a
preference loss, runs of neighbouring examples take the place of single examples.
"""

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np


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


def join_rows(chunks: int, *parts: jax.Array) -> jax.Array:
    """Return the rows of microbatches in the order that they have before `cut_rows`.

    Args:
        chunks: number of runs of rows in each microbatch.
        *parts: the microbatches, of any number of rows that `chunks` divides.
    """
    rows, rest = parts[0].shape[0], parts[0].shape[1:]
    if chunks == rows:
        return jnp.stack(parts, axis=1).reshape(-1, *rest)
    runs = [part.reshape(chunks, rows // chunks, *rest) for part in parts]
    return jnp.stack(runs, axis=1).reshape(-1, *rest)
