"""Handles of arrays on other hosts, as a trace sees them."""

from typing import Any


class ArrayHandle:
    """An array whose data is on other hosts.

    Attributes:
        shape: As of a `jax.Array`.
        dtype: As of a `jax.Array`.
        weak_type: As of a `jax.Array`.
        hosts: The hosts that store it.
        array: Its name and sharding on these hosts (`autopar.lowering.job.Array`).
    """

    shape: tuple[int, ...]
    dtype: Any
    weak_type: bool
    hosts: Any
    array: Any

    def check(self) -> None:
        """Raise RuntimeError if the hosts no longer store the array."""
