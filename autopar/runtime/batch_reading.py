"""Reading of batches with a user's function: the rows of each batch that one process reads."""

import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

type Reads = Callable[[int, int, int], Iterable[Any]]
"""The user's function: `(start, end, batch_size)` to batches of the examples in [start, end)."""

type Rows = tuple[int, int]
"""A range of rows of a batch: its first row, and the row after its last."""

_END = object()


class DataLoaderError(ValueError):
    """The user's function failed or ended too early, or a batch is not what the step expects.

    Workers and their arrays are not affected.

    Attributes:
        cause: the message without the host.
        host: number of the host that read the batch; None for this process.
        address: address of the host.
    """

    def __init__(self, cause: str, host: int | None = None, address: str = "") -> None:
        super().__init__(cause, host, address)
        self.cause = cause
        self.host = host
        self.address = address

    def __str__(self) -> str:
        return (
            self.cause if self.host is None else f"host {self.host} ({self.address}): {self.cause}"
        )


@dataclass(frozen=True, slots=True)
class Form:
    """The structure and types of a batch.

    Attributes:
        avals: types of its arrays, in the order of `jax.tree.leaves`.
        paths: path of each array in the batch.
    """

    avals: tuple[jax.ShapeDtypeStruct, ...]
    paths: tuple[str, ...]

    def leaves(self, batch: Any, name: str, rows: int | None = None) -> list[Any]:
        """Return the arrays of a batch.

        Args:
            batch: a batch, or some rows of one; or a flat sequence of its arrays.
            name: a description of the batch for errors.
            rows: number of rows, if there are not as many as in a batch.

        Raises:
            DataLoaderError: the structure, a shape or a dtype differs.
        """
        leaves = jax.tree.leaves_with_path(batch)
        paths = tuple(jax.tree_util.keystr(path) for path, _ in leaves)
        if paths not in (self.paths, tuple(f"[{i}]" for i in range(len(self.paths)))):
            raise DataLoaderError(
                f"{name} has arrays at {', '.join(paths) or 'no place'}, expected them at"
                f" {', '.join(self.paths)}, as the placement specs, or a flat tuple of them in this"
                " order"
            )
        return [self._leaf(i, leaf, name, rows) for i, (_, leaf) in enumerate(leaves)]

    def _leaf(self, i: int, leaf: Any, name: str, rows: int | None) -> Any:
        aval = self.avals[i]
        shape = aval.shape if rows is None else (rows, *aval.shape[1:])
        value = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
        fits = value.dtype == aval.dtype or jax.dtypes.canonicalize_dtype(value.dtype) == aval.dtype
        if value.shape != shape or not fits:
            raise DataLoaderError(
                f"{name} has {value.dtype}{list(value.shape)} at"
                f" {self.paths[i] or 'its only place'}, expected {aval.dtype}{list(shape)}"
            )
        return value if value.dtype == aval.dtype else value.astype(aval.dtype)


@dataclass(frozen=True, slots=True)
class Batches:
    """Equal batches of consecutive examples. Batch k starts at example k * `batch_size`.

    Attributes:
        read: the user's function.
        batch_size: number of examples of a batch.
        count: number of batches; batch k + `count` is batch k again.
        form: structure and types of a batch.
    """

    read: Reads
    batch_size: int
    count: int
    form: Form


class Reader:
    """Reads the rows of batches that one process needs.

    A process that needs whole batches calls the user's function once for all batches. A process
    that needs some rows calls it once for each range of rows of each batch.

    Attributes:
        rows: the ranges of rows.
    """

    def __init__(self, batches: Batches, shardings: Mapping[int, Sharding]) -> None:
        """Find out which rows to read.

        Args:
            batches: the batches.
            shardings: by number, the shardings of the arrays of a batch that have shards in this
                process.
        """
        self._batches = batches
        self._shardings = shardings
        indices = (
            index
            for i, sharding in shardings.items()
            for index in sharding.addressable_devices_indices_map(
                batches.form.avals[i].shape
            ).values()
        )
        self.rows = _ranges(
            _bounds(index[0], batches.batch_size) for index in indices if index is not None
        )
        # An iterator of whole batches, and the number of the batch that it yields next.
        self._open: tuple[int, Iterator[Any]] | None = None

    def read(self, step: int) -> dict[int, jax.Array]:
        """Return the arrays of the batch of a step by number, on the devices.

        Raises:
            DataLoaderError: the user's function failed, ended or returned something else.
        """
        number = step % self._batches.count
        parts = {rows: self._part(number, rows) for rows in self.rows}
        return {i: self._placed(i, sharding, parts) for i, sharding in self._shardings.items()}

    def _part(self, number: int, rows: Rows) -> list[np.ndarray]:
        """Return a range of rows of a batch."""
        size = self._batches.batch_size
        count = self._batches.count
        num_rows = rows[1] - rows[0]
        first = number * size + rows[0]
        is_whole = num_rows == size
        name = f"batch {number}, examples {first} to {first + num_rows - 1},"
        iterator = None
        if self._open is not None and self._open[0] == number:
            iterator = self._open[1]
            self._open = None
        try:
            if iterator is None:
                end = count * size if is_whole else first + num_rows
                iterator = iter(self._batches.read(first, end, num_rows))
            batch = next(iterator, _END)
        except Exception as error:
            failure = DataLoaderError(f"{name} could not be read: {type(error).__name__}: {error}")
            failure.add_note("".join(traceback.format_exception(error)))
            raise failure from error
        if batch is _END:
            raise DataLoaderError(f"{name} is missing: the function that reads it has ended before")
        if is_whole and number + 1 < count:
            self._open = number + 1, iterator
        return [np.asarray(leaf) for leaf in self._batches.form.leaves(batch, name, num_rows)]

    def _placed(
        self, i: int, sharding: Sharding, parts: Mapping[Rows, Sequence[np.ndarray]]
    ) -> jax.Array:
        aval = self._batches.form.avals[i]

        def shard(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            start, stop = _bounds(index[0], aval.shape[0])
            first, leaves = next(
                (rows[0], leaves) for rows, leaves in parts.items() if rows[0] <= start < rows[1]
            )
            return leaves[i][start - first : stop - first, *index[1:]]

        return jax.make_array_from_callback(aval.shape, sharding, shard)


def _bounds(index: slice, size: int) -> Rows:
    start, stop, _ = index.indices(size)
    return start, stop


def _ranges(rows: Iterable[Rows]) -> tuple[Rows, ...]:
    """Return the same rows in as few ranges as possible."""
    ranges: list[Rows] = []
    for start, stop in sorted(set(rows)):
        if ranges and start <= ranges[-1][1]:
            ranges[-1] = ranges[-1][0], max(ranges[-1][1], stop)
        else:
            ranges.append((start, stop))
    return tuple(ranges)


def ahead[T](items: Iterator[T], count: int) -> Iterator[T]:
    """Yield the items of an iterator, which is advanced `count` items further.

    An error of the iterator is raised after the items before it.
    """
    waiting: deque[T] = deque()
    while True:
        try:
            waiting.append(next(items))
        except StopIteration:
            yield from waiting
            return
        except Exception:
            yield from waiting
            raise
        if len(waiting) > count:
            yield waiting.popleft()
