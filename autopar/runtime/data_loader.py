"""Data loaders: batches placed for a step while earlier steps run.

`DataLoader` places batches of this process; `MeshDriverDataLoader` lets each worker read its rows.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from typing import Any, Self

import jax

from autopar.checks import FLAG, checked, integer
from autopar.ir.keys import is_key
from autopar.lowering.placement_specs import PlacementSpec
from autopar.runtime.batch_reading import Batches, Form, Reads, ahead
from autopar.runtime.local_backend import backend

type Source = Iterable[Any] | Callable[[int], Iterable[Any]]
"""Batches, or a function from k to the batches from batch k on."""


class _Loader:
    """The places of batches, and the number of batches that are placed ahead."""

    def __init__(self, placement_specs: Any, prefetch_size: int) -> None:
        self._specs = _specs(placement_specs)
        self._tree = jax.tree.structure(placement_specs)
        paths = tuple(
            jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(placement_specs)
        )
        self._form = Form(tuple(spec.aval for spec in self._specs), paths)
        self._prefetch = _count(prefetch_size)

    @property
    def batch(self) -> Any:
        """A pytree like a batch, of ShapeDtypeStructs."""
        return jax.tree.unflatten(self._tree, self._form.avals)

    def placed(self, placement_specs: Any) -> Self:
        """Return a loader of the same batches for another plan.

        Args:
            placement_specs: a pytree like a batch, from an executable of the other plan.

        Raises:
            TypeError: a leaf is not a PlacementSpec.
            ValueError: the specs have another structure, shape or dtype.
        """
        other = copy(self)
        specs = _specs(placement_specs)
        is_same = tuple(spec.aval for spec in specs) == self._form.avals
        if not is_same or jax.tree.structure(placement_specs) != self._tree:
            avals = jax.tree.map(lambda spec: spec.aval, placement_specs)
            raise ValueError(f"placement specs of {avals}, expected them of {self.batch}")
        other._specs = specs
        return other

    def __iter__(self) -> Iterator[Any]:
        return self.from_step(0)

    def from_step(self, step: int) -> Iterator[Any]:
        """Yield the batches from number `step` on, placed for the step."""
        raise NotImplementedError


class DataLoader(_Loader):
    """Places batches of this process for a step, while earlier steps run.

    It yields JAX arrays. If steps run on other hosts, it sends the batches there and yields
    `DistributedArray`s.
    """

    def __init__(self, input_iter: Source, placement_specs: Any, prefetch_size: int = 1) -> None:
        """Create a loader without reading any batch.

        Args:
            input_iter: an iterable of batches, which must not be modified afterwards. An iterator
                can be used only once. A function from k to the batches from batch k on can start
                anywhere without producing the batches before.
            placement_specs: a pytree like a batch: `executable.get_input_placement_specs()[1]`, if
                the batch is argument 1 of the step.
            prefetch_size: number of batches to place ahead.

        Raises:
            TypeError: `input_iter` is neither an iterable nor a function, or a leaf of
                `placement_specs` is not a PlacementSpec.
            ValueError: `placement_specs` is empty, or `prefetch_size` is negative.
        """
        if not isinstance(input_iter, Iterable) and not callable(input_iter):
            raise TypeError(
                f"input_iter is {input_iter!r}, expected batches, or a function that gives them"
            )
        super().__init__(placement_specs, prefetch_size)
        self._source = _once(input_iter) if isinstance(input_iter, Iterator) else input_iter

    def __len__(self) -> int:
        """Return the number of batches, if `input_iter` has a length."""
        return len(self._source)  # pyright: ignore[reportArgumentType]

    def from_step(self, step: int) -> Iterator[Any]:
        """Yield the batches from number `step` on, placed for the step, in their own structure.

        If `input_iter` is not a function, its first `step` batches are produced but not placed.

        Raises:
            ValueError: an iterator has been used before.
            DataLoaderError: while iterating, if a batch does not match the placement specs.
        """
        batches = enumerate(self._batches_from(step), step)
        return ahead(itertools.starmap(self._placed_by(), batches), self._prefetch)

    def _batches_from(self, step: int) -> Iterable[Any]:
        if not isinstance(self._source, Iterable):
            return self._source(_count(step, "step"))
        return itertools.islice(self._source, _count(step, "step"), None)

    def _placed_by(self) -> Callable[[int, Any], Any]:
        """Return a function that places the batch of a number."""
        put = backend().put(self._specs)

        def placed(number: int, batch: Any) -> Any:
            leaves = self._form.leaves(batch, f"batch {number}")
            return jax.tree.unflatten(
                jax.tree.structure(batch), map(put, range(len(leaves)), leaves)
            )

        return placed


class MeshDriverDataLoader(_Loader):
    """Lets each worker read the rows of batches that its devices store, while earlier steps run.

    Batch k has the `batch_size` examples from example k * `batch_size` on, for every plan and every
    number of hosts. Examples at the end that do not fill a batch are skipped. If steps run in this
    process, a thread of this process reads.

    A function written for Alpa works, but is called with other ranges. In Alpa each worker reads
    one range of all examples, so the examples of a batch depend on the number of hosts. Here each
    worker reads its rows of each batch, range after range. So cache slow work that all calls share,
    such as opening a file, in an attribute of a callable object or with `functools.cache` in an
    imported module.
    """

    def __init__(
        self,
        batch_size: int,
        num_samples: int,
        input_iter_func: Reads,
        placement_specs: Any,
        prefetch_size: int = 1,
        repeat: bool = False,
    ) -> None:
        """Create a loader without reading any batch.

        Args:
            batch_size: number of examples of a batch.
            num_samples: number of examples.
            input_iter_func: a function of `(start, end, batch_size)`. It returns an iterable of
                batches of `batch_size` examples each, from the examples in [start, end) in order:
                pytrees like `placement_specs`, or flat tuples of their arrays, which must not be
                modified afterwards. A worker that needs whole batches calls it once for all
                batches; other workers call it once for each range of rows that they need, with the
                number of rows as `batch_size`, and read one batch of that. The function is
                pickled with everything that it closes over, and called in a thread of the worker.
            placement_specs: a pytree like a batch: `executable.get_input_placement_specs()[1]`, if
                the batch is argument 1 of the step.
            prefetch_size: number of batches to read and place ahead.
            repeat: whether the first batch follows the last.

        Raises:
            TypeError: `input_iter_func` can't be called, or a leaf of `placement_specs` is not a
                PlacementSpec.
            ValueError: there is no whole batch, or a placement spec has no batch of this size.
        """
        if not callable(input_iter_func):
            raise TypeError(
                f"input_iter_func is {input_iter_func!r}, expected a function of start, end,"
                " batch_size"
            )
        batch_size = checked("batch_size", batch_size, integer())
        num_samples = checked("num_samples", num_samples, integer())
        if batch_size > num_samples:
            raise ValueError(f"batch_size={batch_size}, expected 1 to num_samples={num_samples}")
        super().__init__(placement_specs, prefetch_size)
        for aval, path in zip(self._form.avals, self._form.paths, strict=True):
            if is_key(aval.dtype):
                raise ValueError(
                    f"the step takes random keys at {path}, which {type(self).__name__} can't make;"
                    " use DataLoader, with batches that contain the keys"
                )
            if aval.shape[:1] != (batch_size,):
                raise ValueError(
                    f"the step takes an array of shape {aval.shape} at {path}, expected"
                    f" batch_size={batch_size} rows"
                )
        self._batches = Batches(input_iter_func, batch_size, num_samples // batch_size, self._form)
        self._repeat = checked("repeat", repeat, FLAG)

    def __len__(self) -> int:
        """Return the number of batches, without repetition."""
        return self._batches.count

    def from_step(self, step: int) -> Iterator[Any]:
        """Yield the batches from number `step` on, placed for the step, like the placement specs.

        Earlier batches are not read. With `repeat`, numbers continue beyond `len` without end. An
        iterator that is closed or garbage reads no further batches.

        Raises:
            ValueError: there is no such batch.
            DataLoaderError: while iterating, if a batch can't be read; call `from_step` again to
                continue at any batch.
        """
        if not self._repeat and _count(step, "step") > len(self):
            raise ValueError(
                f"step={step}, but there are {len(self)} batches; repeat=True begins with the first"
                " again"
            )
        steps = (
            itertools.count(_count(step, "step")) if self._repeat else iter(range(step, len(self)))
        )
        batches = backend().read(self._batches, self._specs, steps, self._prefetch)
        return (jax.tree.unflatten(self._tree, arrays) for arrays in batches)


def _once(batches: Iterator[Any]) -> Callable[[int], Iterator[Any]]:
    """Return a function from k to the batches of an iterator from batch k on, to be called once."""
    unused = [batches]

    def batches_from(step: int) -> Iterator[Any]:
        if not unused:
            raise ValueError(
                "the batches of an iterator can't be read again: give DataLoader an iterable that"
                " is not an iterator, a list for instance, or a function from k to the batches from"
                " number k on"
            )
        return itertools.islice(unused.pop(), step, None)

    return batches_from


def _specs(placement_specs: Any) -> list[PlacementSpec]:
    leaves = jax.tree.leaves(placement_specs)
    for leaf in leaves:
        if not isinstance(leaf, PlacementSpec):
            raise TypeError(
                f"placement_specs has {leaf!r} in it, expected PlacementSpecs:"
                " executable.get_input_placement_specs()[1] is a pytree of them"
            )
    if not leaves:
        raise ValueError(
            "placement_specs is empty, expected a PlacementSpec for each array of a batch"
        )
    return leaves


def _count(value: int, name: str = "prefetch_size") -> int:
    return checked(name, value, integer(0))
