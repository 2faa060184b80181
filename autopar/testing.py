"""Helpers for tests and tutorials."""

from typing import Any

import jax
import numpy as np

__all__ = ["assert_allclose"]


def assert_allclose(x: Any, y: Any, rtol: float = 1e-4, atol: float = 1e-4) -> None:
    """Assert that two pytrees have the same structure and close values.

    The arrays may be on any devices; they are copied to this process.

    Args:
        x: a pytree of arrays.
        y: the pytree that is expected; `rtol` is relative to its values.
        rtol: relative tolerance.
        atol: absolute tolerance.

    Raises:
        AssertionError: structures or values differ; the message names the leaf.
    """
    left, left_tree = jax.tree.flatten_with_path(x)
    right, right_tree = jax.tree.flatten_with_path(y)
    names = [[jax.tree_util.keystr(path) for path, _ in leaves] for leaves in (left, right)]
    if names[0] != names[1]:
        raise AssertionError(f"structures differ: {left_tree} and {right_tree}")
    for (_, a), (_, b), name in zip(left, right, names[0], strict=True):
        np.testing.assert_allclose(
            np.asarray(a), np.asarray(b), rtol, atol, err_msg=f"at {name or 'the value'}"
        )
