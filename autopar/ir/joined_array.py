"""Arrays whose pieces are on the meshes of different pipeline stages."""

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.ir.array_handle import ArrayHandle


class JoinedArray(ArrayHandle):
    """One array that consists of pieces along a dim, each on the mesh of its pipeline stage.

    A parallelized step reads and returns the pieces where they are. `numpy.asarray`,
    `jax.numpy.asarray` and the operators of Python join them into an array on one device; so do
    the methods of `jax.Array` that are not listed here. Functions under `jax.jit` take the joined
    array, not this one.

    Attributes:
        pieces: the pieces in order.
        dim: the dim along which they follow one another.
        shape: the shape of the whole array.
        dtype: the dtype of the array.
    """

    def __init__(self, pieces: tuple[Any, ...], dim: int) -> None:
        self.pieces = pieces
        self.dim = dim
        first = pieces[0]
        size = sum(piece.shape[dim] for piece in pieces)
        self.shape = (*first.shape[:dim], size, *first.shape[dim + 1 :])
        self.dtype = first.dtype
        self.weak_type = getattr(first, "weak_type", False)  # random keys have none

    @property
    def sharding(self) -> tuple[Any, ...]:
        """The sharding of each piece."""
        return tuple(piece.sharding for piece in self.pieces)

    @property
    def starts(self) -> tuple[int, ...]:
        """The position of each piece's first element along `dim`."""
        sizes = [piece.shape[self.dim] for piece in self.pieces]
        return tuple(sum(sizes[:k]) for k in range(len(sizes)))

    def block_until_ready(self) -> "JoinedArray":
        """Wait until all pieces have been computed."""
        for piece in self.pieces:
            piece.block_until_ready()
        return self

    def is_deleted(self) -> bool:
        """Whether a piece was deleted or donated, so that the array can no longer be read."""
        return any(piece.is_deleted() for piece in self.pieces)

    def delete(self) -> None:
        """Free the memory of all pieces."""
        for piece in self.pieces:
            piece.delete()

    def __jax_array__(self) -> jax.Array:
        pieces = [
            jax.device_put(piece, jax.local_devices()[0])
            if isinstance(piece, jax.Array)
            else jnp.asarray(piece)
            for piece in self.pieces
        ]
        return jnp.concatenate(pieces, axis=self.dim)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        value = np.concatenate([np.asarray(piece) for piece in self.pieces], axis=self.dim)
        return value if dtype is None else value.astype(dtype)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(jax.Array, name):
            raise AttributeError(f"JoinedArray has no attribute {name!r}")
        return getattr(self.__jax_array__(), name)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> jax.Array:
        return self.__jax_array__()[index]

    def __iter__(self) -> Any:
        return iter(self.__jax_array__())

    def __bool__(self) -> bool:
        return bool(self.__jax_array__())

    def __repr__(self) -> str:
        sizes = [piece.shape[self.dim] for piece in self.pieces]
        return f"JoinedArray(shape={self.shape}, dtype={self.dtype}, pieces={sizes})"


def _binary(apply: Callable[[Any, Any], Any]) -> Callable[[JoinedArray, Any], Any]:
    return lambda self, other: apply(self.__jax_array__(), other)


def _reflected(apply: Callable[[Any, Any], Any]) -> Callable[[JoinedArray, Any], Any]:
    return lambda self, other: apply(other, self.__jax_array__())


def _unary(apply: Callable[[Any], Any]) -> Callable[[JoinedArray], Any]:
    return lambda self: apply(self.__jax_array__())


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or"):
    _apply = getattr(operator, f"__{_name}__")
    setattr(JoinedArray, f"__{_name}__", _binary(_apply))
    setattr(JoinedArray, f"__r{_name}__", _reflected(_apply))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(JoinedArray, f"__{_name}__", _binary(getattr(operator, _name)))
for _name in ("neg", "abs", "invert"):
    setattr(JoinedArray, f"__{_name}__", _unary(getattr(operator, _name)))
