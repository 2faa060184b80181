"""Cuts: arrays of the user that a step reads and returns in pieces.

A pipeline of a model whose layers run in a `scan` has one array for the weights of all layers. Each
stage stores only the piece with its own layers. A `CutTree` maps the user's arrays to the pieces,
and pieces to the user's arrays.
"""

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import jax

from autopar.ir.joined_array import JoinedArray


@dataclass(frozen=True, slots=True)
class Cut:
    """A division of an array into consecutive pieces.

    Attributes:
        dim: the dim that is divided.
        sizes: the size of each piece along that dim.
        layers: the layer that reads each piece, where layers are being constructed.
    """

    dim: int
    sizes: tuple[int, ...]
    layers: tuple[int, ...] = ()

    def shapes(self, shape: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the shapes of the pieces of an array of shape `shape`."""
        return [(*shape[: self.dim], size, *shape[self.dim + 1 :]) for size in self.sizes]

    @property
    def slices(self) -> list[str]:
        """The text of the index of each piece, such as `[0:3]` or `[:,0:3]`."""
        return [
            f"[{':,' * self.dim}{stop - size}:{stop}]"
            for size, stop in zip(self.sizes, accumulate(self.sizes), strict=True)
        ]

    def split(self, array: Any) -> list[Any]:
        """Return the pieces of an array, or of a ShapeDtypeStruct."""
        if isinstance(array, JoinedArray):
            sizes = tuple(piece.shape[array.dim] for piece in array.pieces)
            if (array.dim, sizes) == (self.dim, self.sizes):
                return list(array.pieces)
            array = array.__jax_array__()
        if isinstance(array, jax.ShapeDtypeStruct):
            return [
                jax.ShapeDtypeStruct(shape, array.dtype, weak_type=array.weak_type)
                for shape in self.shapes(array.shape)
            ]
        stops = list(accumulate(self.sizes))
        whole = (slice(None),) * self.dim
        return [
            array[(*whole, slice(stop - size, stop))]
            for size, stop in zip(self.sizes, stops, strict=True)
        ]


@dataclass(frozen=True)
class CutTree:
    """A pytree, some of whose arrays are cut into pieces.

    Attributes:
        tree: the structure of the pytree, with one leaf for each array of the user.
        paths: the user's name of each array.
        cuts: the cut of each array; None for an array in one piece.
    """

    tree: Any
    paths: tuple[str, ...]
    cuts: tuple[Cut | None, ...]

    @cached_property
    def piece_tree(self) -> Any:
        """The structure with a tuple of pieces in place of each array that is cut."""
        leaves = [0 if cut is None else (0,) * len(cut.sizes) for cut in self.cuts]
        return jax.tree.structure(jax.tree.unflatten(self.tree, leaves))

    @cached_property
    def _piece_numbers(self) -> list[tuple[int, ...]]:
        """The numbers of the pieces of each array among all pieces."""
        counts = [1 if cut is None else len(cut.sizes) for cut in self.cuts]
        return [
            tuple(range(stop - count, stop))
            for count, stop in zip(counts, accumulate(counts), strict=True)
        ]

    @cached_property
    def _has_cuts(self) -> bool:
        return any(cut is not None for cut in self.cuts)

    @cached_property
    def piece_paths(self) -> tuple[str, ...]:
        """The name of each piece: the array's name, with a slice if the array is cut."""
        return tuple(
            f"{path}{piece}"
            for path, cut in zip(self.paths, self.cuts, strict=True)
            for piece in ([""] if cut is None else cut.slices)
        )

    def numbers_of_pieces(self, arrays: Collection[int]) -> frozenset[int]:
        """Return the numbers of the pieces of the arrays with these numbers."""
        return frozenset(number for i in arrays for number in self._piece_numbers[i])

    def pieces(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the pieces of the user's arrays, in order."""
        if not self._has_cuts:
            return [_as_array(leaf) for leaf in leaves]
        pieces: list[Any] = []
        for leaf, cut in zip(leaves, self.cuts, strict=True):
            if cut is not None:
                pieces += cut.split(leaf)
            else:
                pieces.append(_as_array(leaf))
        return pieces

    def joined(
        self,
        pieces: Sequence[Any],
        join: Callable[[tuple[Any, ...], int], Any] = JoinedArray,
    ) -> Any:
        """Return the user's pytree, whose arrays consist of pieces.

        Args:
            pieces: the pieces of all arrays in order, or something of each of them.
            join: returns what the pieces of one array are together, given its dim that is cut.
        """
        if not self._has_cuts:
            return jax.tree.unflatten(self.tree, pieces)
        leaves = [
            pieces[numbers[0]]
            if cut is None
            else join(tuple(pieces[number] for number in numbers), cut.dim)
            for numbers, cut in zip(self._piece_numbers, self.cuts, strict=True)
        ]
        return jax.tree.unflatten(self.tree, leaves)


def _as_array(leaf: Any) -> Any:
    return leaf.__jax_array__() if isinstance(leaf, JoinedArray) else leaf


_SLICE = re.compile(r"\[[:,]*\d+:\d+\]$")


def path_of_array(path: str) -> str:
    """Return the name of the user's array that the path of an input or output belongs to."""
    return _SLICE.sub("", path)


NO_ARRAYS = CutTree(jax.tree.structure(()), (), ())
"""An empty pytree."""
