"""Reading batches with a user's function: which examples form a batch, and which of them one process takes."""

import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

type Reads = Callable[[int, int, int], Iterable[Any]]
"""`(start, end, batch_size)` to batches of the examples from `start` to before `end`."""

type Rows = tuple[int, int]
"""The first row of a batch and the one after the last."""

_END = object()


class DataLoaderError(ValueError):
    """A batch could not be had: the function that reads it failed or ended, or it is not what the step takes.

    Nothing else has happened: the workers and what they hold are still there.

    Attributes:
        host: the number of the host where it was read; None: in this process.
    """

    def __init__(self, cause: str, host: int | None = None, address: str = "") -> None:
        super().__init__(cause, host, address)
        self.cause, self.host, self.address = cause, host, address

    def __str__(self) -> str:
        return (
            self.cause if self.host is None else f"host {self.host} ({self.address}): {self.cause}"
        )


@dataclass(frozen=True, slots=True)
class Form:
    """What a batch is.

    Attributes:
        avals: its arrays, in the order of `jax.tree.leaves`.
        paths: where each is in the batch.
    """

    avals: tuple[jax.ShapeDtypeStruct, ...]
    paths: tuple[str, ...]

    def leaves(self, batch: Any, what: str, rows: int | None = None) -> list[Any]:
        """The arrays of a batch, or of some rows of one, which may also be a flat sequence of them; `what` names it in errors.

        Raises:
            DataLoaderError: it has another structure, or an array another shape or dtype.
        """
        found = jax.tree.leaves_with_path(batch)
        paths = tuple(jax.tree_util.keystr(path) for path, _ in found)
        if paths not in (self.paths, tuple(f"[{i}]" for i in range(len(self.paths)))):
            raise DataLoaderError(
                f"{what} has arrays at {', '.join(paths) or 'no place'}, expected them at {', '.join(self.paths)}, as the placement"
                " specs, or a flat tuple of them in this order"
            )
        return [self._leaf(i, leaf, what, rows) for i, (_, leaf) in enumerate(found)]

    def _leaf(self, i: int, leaf: Any, what: str, rows: int | None) -> Any:
        aval = self.avals[i]
        shape = aval.shape if rows is None else (rows, *aval.shape[1:])
        value = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
        fits = value.dtype == aval.dtype or jax.dtypes.canonicalize_dtype(value.dtype) == aval.dtype
        if value.shape != shape or not fits:
            raise DataLoaderError(
                f"{what} has {value.dtype}{list(value.shape)} at {self.paths[i] or 'its only place'}, expected"
                f" {aval.dtype}{list(shape)}"
            )
        return value if value.dtype == aval.dtype else value.astype(aval.dtype)


@dataclass(frozen=True, slots=True)
class Batches:
    """Equal batches of consecutive examples: batch k has the `batch_size` examples from k * `batch_size`.

    Attributes:
        read: the user's function.
        count: how many there are; batch k + `count` is batch k again.
    """

    read: Reads
    batch_size: int
    count: int
    form: Form


class Reader:
    """Reads what one process takes of batches, and no other rows.

    One that takes whole batches has the user's function called once for all that follow, one that takes some rows once for each range
    of rows of each batch.
    """

    def __init__(self, batches: Batches, wanted: Mapping[int, Sharding]) -> None:
        """Nothing is read yet.

        Args:
            wanted: numbers of the arrays of a batch of which this process has devices, and their shardings.
        """
        self._batches, self._wanted = batches, wanted
        self.rows = _ranges(
            _bounds(index[0], batches.batch_size)
            for i, sharding in wanted.items()
            for index in sharding.addressable_devices_indices_map(
                batches.form.avals[i].shape
            ).values()
            if index is not None
        )
        self._open: tuple[int, Iterator[Any]] | None = (
            None  # the number of the batch that comes next
        )

    def read(self, step: int) -> dict[int, jax.Array]:
        """The arrays of batch `step`, on the devices.

        Raises:
            DataLoaderError: the user's function failed, ended, or gave something else.
        """
        number = step % self._batches.count
        parts = {rows: self._part(number, rows) for rows in self.rows}
        return {i: self._placed(i, sharding, parts) for i, sharding in self._wanted.items()}

    def _part(self, number: int, rows: Rows) -> list[np.ndarray]:
        """Some rows of a batch."""
        size, count = self._batches.batch_size, self._batches.count
        num_rows = rows[1] - rows[0]
        end = count * size if num_rows == size else number * size + rows[1]
        if self._open is not None and self._open[0] == number:
            iterator, self._open = self._open[1], None
        else:
            iterator = None
        what = (
            f"batch {number}, examples {number * size + rows[0]} to {number * size + rows[1] - 1},"
        )
        try:
            if iterator is None:
                iterator = iter(self._batches.read(number * size + rows[0], end, num_rows))
            batch = next(iterator, _END)
        except Exception as error:
            failed = DataLoaderError(f"{what} could not be read: {type(error).__name__}: {error}")
            failed.add_note("".join(traceback.format_exception(error)))
            raise failed from error
        if batch is _END:
            raise DataLoaderError(f"{what} is missing: the function that reads it has ended before")
        if num_rows == size and number + 1 < count:
            self._open = number + 1, iterator
        return [np.asarray(leaf) for leaf in self._batches.form.leaves(batch, what, num_rows)]

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
    """The same rows in as few ranges as there can be."""
    found: list[Rows] = []
    for start, stop in sorted(set(rows)):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return tuple(found)


def ahead[T](items: Iterator[T], count: int) -> Iterator[T]:
    """The items, each given when `count` more have been begun."""
    waiting: deque[T] = deque()
    for item in items:
        waiting.append(item)
        if len(waiting) > count:
            yield waiting.popleft()
    while waiting:
        yield waiting.popleft()
