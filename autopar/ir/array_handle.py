"""Arrays that are elsewhere, as a trace sees them."""

from typing import Any


class ArrayHandle:
    """An array on other hosts: it has a shape and a dtype, but no data here.

    Attributes:
        shape, dtype, weak_type: as of a `jax.Array`.
        hosts: the hosts that have it.
        array: what and where it is there (`autopar.lowering.job.Array`).
    """

    shape: tuple[int, ...]
    dtype: Any
    weak_type: bool
    hosts: Any
    array: Any

    def check(self) -> None:
        """Raise RuntimeError if there is nothing to read any more."""
