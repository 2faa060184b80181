"""Handles of arrays that are distributed over the devices of other hosts."""

from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from autopar.hosts.errors import HostsError
from autopar.ir.array_handle import ArrayHandle
from autopar.ir.graph import constant
from autopar.ir.joined_array import JoinedArray
from autopar.lowering.job import Array

if TYPE_CHECKING:
    from autopar.hosts.driver import RayHosts


class DistributedArray(ArrayHandle):
    """A handle of an array whose shards are in the memory of other hosts' devices.

    `np.array(x)` and JAX functions fetch the array to this process. When the handle is garbage,
    each worker frees the array with its next call; `delete` frees it at once.

    Attributes:
        shape: shape of the whole array.
        dtype: dtype of the array. Random keys can't be numpy arrays: `key_data` fetches their data.
        hosts: the hosts that store the array.
        key: the workers' key of the array.
        array: its type and place.
        is_donated: whether a step has reused its memory, so that it can no longer be read.
    """

    def __init__(self, hosts: "RayHosts", key: int, array: Array) -> None:
        self.hosts = hosts
        self.key = key
        self.array = array
        self.shape = array.aval.shape
        self.dtype = array.aval.dtype
        self.weak_type = False
        self.is_donated = False
        self._is_deleted = False
        self._fetched: np.ndarray | None = None

    @property
    def sharding(self) -> NamedSharding:
        """Sharding of the array, on a mesh without devices."""
        return self.array.sharding

    def block_until_ready(self) -> "DistributedArray":
        """Wait until the array has been computed."""
        self.hosts.wait(self.array.place.mesh.devices)
        return self

    def delete(self) -> None:
        """Free the array's memory now; steps that were called before can still read it."""
        self._is_deleted = True
        self._fetched = None
        self.hosts.release(self.key)
        self.hosts.free()

    def is_deleted(self) -> bool:
        """Whether the array was deleted or donated, so that it can no longer be read."""
        return self._is_deleted or self.is_donated

    def prefetch(self) -> None:
        """Fetch the array to this process, unless it is there already.

        Raises:
            RuntimeError: the array was deleted or donated, or its workers have ended.
        """
        if self._fetched is None:
            self.check()
            self._fetched = self.hosts.fetch([self])[0]

    def check(self) -> None:
        """Raise RuntimeError if the array can no longer be read.

        Raises:
            HostsError: a RuntimeError; the workers that stored the array have ended.
            RuntimeError: the array was deleted or donated.
        """
        if self._is_deleted:
            raise RuntimeError(
                f"{self!r} was deleted; keep the handle and don't call its delete while it is"
                " needed"
            )
        if self.is_donated:
            raise RuntimeError(
                f"{self!r} was donated to a step, which has used its memory; use what the step"
                " returned"
            )
        if not self.hosts.is_live(self.key):
            raise HostsError(
                f"{self!r} was lost: the workers that stored it were ended by autopar.shutdown or"
                " by a failure; initialize the state again, or restore a checkpoint"
            )

    def numbers(self) -> np.ndarray:
        """Return the array, or the data of random keys, in this process."""
        self.prefetch()
        assert self._fetched is not None
        return self._fetched

    def key_data(self) -> np.ndarray:
        """Return the data of random keys in this process, as `jax.random.key_data` does.

        `jax.random.wrap_key_data` turns it into keys.

        Raises:
            TypeError: the array has no random keys.
        """
        if self.array.impl is None:
            raise TypeError(f"{self!r} has no random keys; use np.array of it")
        return self.numbers()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if self.array.impl is not None:
            raise TypeError(
                f"{self!r} has random keys, which can't be a numpy array; use its method key_data()"
            )
        value = self.numbers()
        return np.array(value, dtype=dtype) if copy or dtype is not None else value

    def __jax_array__(self) -> jax.Array:
        value = jax.numpy.asarray(self.numbers())
        if self.array.impl is None:
            return value
        return jax.random.wrap_key_data(value, impl=self.array.impl)

    def item(self) -> Any:
        """Return the only element as a Python number."""
        return np.asarray(self).item()

    def __format__(self, spec: str) -> str:
        return format(np.asarray(self)[()], spec) if spec else str(self)

    def __repr__(self) -> str:
        spec = self.array.place.spec
        return f"DistributedArray(shape={self.shape}, dtype={self.dtype}, sharding={spec})"

    def __del__(self) -> None:
        self.hosts.release(self.key)


def plain(leaf: Any) -> np.ndarray:
    """Return an array, or the data of random keys, as a numpy array to send to workers."""
    return leaf.numbers() if isinstance(leaf, DistributedArray) else constant(leaf)


def prefetch(tree: Any) -> None:
    """Fetch all distributed arrays of a pytree together, so that `np.array` of each is fast."""
    handles = [
        piece
        for leaf in jax.tree.leaves(tree)
        for piece in (leaf.pieces if isinstance(leaf, JoinedArray) else (leaf,))
        if isinstance(piece, DistributedArray) and piece._fetched is None
    ]
    for hosts in dict.fromkeys(handle.hosts for handle in handles):
        group = [handle for handle in handles if handle.hosts is hosts]
        for handle, value in zip(group, hosts.fetch(group), strict=True):
            handle._fetched = value
