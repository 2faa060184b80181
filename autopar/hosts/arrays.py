"""Arrays on other hosts, as the driver has them."""

from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from autopar.hosts.errors import HostsError
from autopar.ir.array_handle import ArrayHandle
from autopar.ir.keys import is_key
from autopar.lowering.job import Array

if TYPE_CHECKING:
    from autopar.hosts.driver import RayHosts


class DistributedArray(ArrayHandle):
    """A handle on an array whose parts are in the memory of devices of other hosts.

    `np.array(x)` brings it here; so does any JAX function that is given it. When the handle goes, the workers forget the array with the
    next thing that they are asked; `delete` has them do so at once.

    Attributes:
        shape, dtype: those of the whole. Random keys can't be numpy arrays: `key_data` brings here what they consist of.
        array: what and where it is.
        key: what the workers know it by.
        is_donated: whether a step has used up its memory, so that it can't be read any more.
    """

    def __init__(self, hosts: "RayHosts", key: int, array: Array) -> None:
        self.hosts, self.key, self.array = hosts, key, array
        self.shape, self.dtype, self.weak_type = array.aval.shape, array.aval.dtype, False
        self.is_donated, self._is_deleted = False, False
        self._here: np.ndarray | None = None

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    @property
    def sharding(self) -> NamedSharding:
        """Where it is, on a mesh without devices."""
        return self.array.sharding

    def block_until_ready(self) -> "DistributedArray":
        """Wait for it."""
        self.hosts.wait(self.array.place.mesh.devices)
        return self

    def delete(self) -> None:
        """Free what it takes on the workers, now; steps that were asked for before still have it."""
        self._is_deleted, self._here = True, None
        self.hosts.release(self.key)
        self.hosts.free()

    def is_deleted(self) -> bool:
        """Whether there is nothing to read any more: it was deleted, or donated to a step."""
        return self._is_deleted or self.is_donated

    def prefetch(self) -> None:
        """Bring it here. One that a step has used up, that was deleted, or whose workers have ended: `RuntimeError`."""
        if self._here is None:
            self.check()
            self._here = self.hosts.fetch([self])[0]

    def check(self) -> None:
        """Raise RuntimeError if there is nothing to read any more; HostsError, which is one, if the workers that had it have ended."""
        if self._is_deleted:
            raise RuntimeError(
                f"{self!r} was deleted; keep the handle and don't call its delete while it is needed"
            )
        if self.is_donated:
            raise RuntimeError(
                f"{self!r} was donated to a step, which has used its memory; use what the step returned"
            )
        if not self.hosts.is_live(self.key):
            raise HostsError(
                f"{self!r} was in the memory of workers that have ended, by autopar.shutdown or a failure, and is gone with them; make the"
                " state anew, or restore a checkpoint"
            )

    def numbers(self) -> np.ndarray:
        """What it consists of, here: itself, or the data of random keys."""
        self.prefetch()
        assert self._here is not None
        return self._here

    def key_data(self) -> np.ndarray:
        """What random keys consist of, as `jax.random.key_data` gives it, here; `jax.random.wrap_key_data` makes keys of it."""
        if self.array.impl is None:
            raise TypeError(f"{self!r} has no random keys; use np.array of it")
        return self.numbers()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if self.array.impl is not None:
            raise TypeError(
                f"{self!r} has random keys, which can't be a numpy array; use its method key_data()"
            )
        here = self.numbers()
        return np.array(here, dtype=dtype) if copy or dtype is not None else here

    def __jax_array__(self) -> jax.Array:
        here = jax.numpy.asarray(self.numbers())
        return (
            here
            if self.array.impl is None
            else jax.random.wrap_key_data(here, impl=self.array.impl)
        )

    def __float__(self) -> float:
        return float(np.asarray(self))

    def __int__(self) -> int:
        return int(np.asarray(self))

    def item(self) -> Any:
        """The one number that it is."""
        return np.asarray(self).item()

    def __format__(self, spec: str) -> str:
        return format(np.asarray(self)[()], spec) if spec else str(self)

    def __repr__(self) -> str:
        return f"DistributedArray(shape={self.shape}, dtype={self.dtype}, sharding={self.array.place.spec})"

    def __del__(self) -> None:
        self.hosts.release(self.key)


def plain(leaf: Any) -> np.ndarray:
    """An array as it travels: numpy's, of keys what they consist of."""
    if isinstance(leaf, DistributedArray):
        return leaf.numbers()
    return np.asarray(
        jax.random.key_data(leaf) if isinstance(leaf, jax.Array) and is_key(leaf.dtype) else leaf
    )


def prefetch(tree: Any) -> None:
    """Bring all distributed arrays of a pytree here, in one go; `np.array` of each is there at once afterwards."""
    handles = [
        leaf
        for leaf in jax.tree.leaves(tree)
        if isinstance(leaf, DistributedArray) and leaf._here is None
    ]
    for hosts in dict.fromkeys(handle.hosts for handle in handles):
        mine = [handle for handle in handles if handle.hosts is hosts]
        for handle, value in zip(mine, hosts.fetch(mine), strict=True):
            handle._here = value
