"""Batches for training, some ahead of the step: made by this process, or read by each worker as far as it needs them."""

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
"""Batches, or a function of k that gives those from batch k on."""


class _Loader:
    """What loaders have in common: where batches go, and how many are on their way."""

    def __init__(self, placement_specs: Any, prefetch_size: int) -> None:
        self._specs, self._tree = _specs(placement_specs), jax.tree.structure(placement_specs)
        paths = tuple(
            jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(placement_specs)
        )
        self._form = Form(tuple(spec.aval for spec in self._specs), paths)
        self._prefetch = _count(prefetch_size)

    @property
    def batch(self) -> Any:
        """A batch as ShapeDtypeStructs."""
        return jax.tree.unflatten(self._tree, self._form.avals)

    def placed(self, placement_specs: Any) -> Self:
        """The same batches, put where another plan wants them.

        Raises:
            TypeError, ValueError: these are no placement specs of such batches.
        """
        other, specs = copy(self), _specs(placement_specs)
        if (
            tuple(spec.aval for spec in specs) != self._form.avals
            or jax.tree.structure(placement_specs) != self._tree
        ):
            raise ValueError(
                f"placement specs of {jax.tree.map(lambda spec: spec.aval, placement_specs)}, expected them of {self.batch}"
            )
        other._specs = specs
        return other

    def __iter__(self) -> Iterator[Any]:
        return self.from_step(0)

    def from_step(self, step: int) -> Iterator[Any]:
        """The batches from number `step` on, where the step wants them."""
        raise NotImplementedError


class DataLoader(_Loader):
    """Batches that this process makes, put where the step wants them while it runs.

    What it gives are JAX arrays; `DistributedArray`s if steps run on other hosts, to which it sends them.
    """

    def __init__(self, input_iter: Source, placement_specs: Any, prefetch_size: int = 1) -> None:
        """Nothing is made yet.

        Args:
            input_iter: batches, in any iterable; they are not to be changed afterwards. An iterator can be gone through only once; give
                a function, which is called with the number of the first batch that is wanted, to begin anywhere without making what
                comes before.
            placement_specs: a pytree like a batch: `executable.get_input_placement_specs()[1]`, if batches are argument 1.
            prefetch_size: how many batches to put there ahead.

        Raises:
            TypeError, ValueError: that is not what was given.
        """
        if not isinstance(input_iter, Iterable) and not callable(input_iter):
            raise TypeError(
                f"input_iter is {input_iter!r}, expected batches, or a function that gives them"
            )
        super().__init__(placement_specs, prefetch_size)
        self._source = _once(input_iter) if isinstance(input_iter, Iterator) else input_iter

    def __len__(self) -> int:
        """How many batches there are, if what gives them knows."""
        return len(self._source)  # pyright: ignore[reportArgumentType]

    def from_step(self, step: int) -> Iterator[Any]:
        """The batches from number `step` on, where the step wants them.

        Each has the structure that it was given. An iterable's first `step` batches are made, but not put anywhere.

        Raises:
            ValueError: an iterator has been gone through before.
            DataLoaderError: when it comes to a batch that is not as the placement specs say.
        """
        batches = enumerate(self._from(step), step)
        return ahead(itertools.starmap(self._placed_by(), batches), self._prefetch)

    def _from(self, step: int) -> Iterable[Any]:
        if not isinstance(self._source, Iterable):
            return self._source(_count(step, "step"))
        return itertools.islice(self._source, _count(step, "step"), None)

    def _placed_by(self) -> Callable[[int, Any], Any]:
        """What puts batch k where the step wants it."""
        put = backend().put(self._specs)

        def placed(number: int, batch: Any) -> Any:
            leaves = self._form.leaves(batch, f"batch {number}")
            return jax.tree.unflatten(
                jax.tree.structure(batch), map(put, range(len(leaves)), leaves)
            )

        return placed


class MeshDriverDataLoader(_Loader):
    """Batches that the workers read, each only the rows that its devices take, while the steps before run.

    Batch k has the `batch_size` examples from number k * `batch_size`, whatever the plan and however many hosts; what is left at
    the end and makes no whole batch is left out. If steps run in this process, it reads, in a thread.

    A function written for Alpa runs here, but it is asked for other examples. There each worker reads one range of all examples, so
    that which of them meet in a batch depends on the number of hosts; here it is asked for its rows of each batch, one range after the
    other. So what takes long and is the same every time, opening a file for instance, is best kept: in an attribute of a callable
    object or a `functools.cache` of an imported module.
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
        """Nothing is read yet.

        Args:
            batch_size: examples of a batch.
            num_samples: how many examples there are.
            input_iter_func: `(start, end, batch_size)` to an iterable of batches of `batch_size` of the examples from `start` to
                before `end`, in order: pytrees like `placement_specs`, or flat tuples of their arrays. A worker that takes whole
                batches calls it once, for all that follow, and any other for the rows that it takes of each batch: with their
                number for `batch_size`, of which it takes one. Batches are not to be changed afterwards. The function is sent to the
                workers with everything that it closes over, and called in a thread of theirs.
            placement_specs: a pytree like a batch: `executable.get_input_placement_specs()[1]`, if batches are argument 1.
            prefetch_size: how many batches to read and put there ahead.
            repeat: whether the first batch follows the last.

        Raises:
            TypeError, ValueError: that is not what was given.
        """
        if not callable(input_iter_func):
            raise TypeError(
                f"input_iter_func is {input_iter_func!r}, expected a function of start, end, batch_size"
            )
        batch_size, num_samples = (
            checked("batch_size", batch_size, integer()),
            checked("num_samples", num_samples, integer()),
        )
        if batch_size > num_samples:
            raise ValueError(f"batch_size={batch_size}, expected 1 to num_samples={num_samples}")
        super().__init__(placement_specs, prefetch_size)
        for aval, path in zip(self._form.avals, self._form.paths, strict=True):
            if is_key(aval.dtype):
                raise ValueError(
                    f"the step takes random keys at {path}, which DataLoader can bring, but not this loader"
                )
            if aval.shape[:1] != (batch_size,):
                raise ValueError(
                    f"the step takes an array of shape {aval.shape} at {path}, expected batch_size={batch_size} rows"
                )
        self._batches = Batches(input_iter_func, batch_size, num_samples // batch_size, self._form)
        self._repeat = checked("repeat", repeat, FLAG)

    def __len__(self) -> int:
        """How many batches the examples make up, once."""
        return self._batches.count

    def from_step(self, step: int) -> Iterator[Any]:
        """The batches from number `step` on, where the step wants them, in the structure of the placement specs.

        Nothing before is read. With `repeat` batches are numbered on beyond `len`, without end. An iterator that is dropped, or
        closed, reads no more.

        Raises:
            ValueError: there is no such batch.
            DataLoaderError: when it comes to a batch that can't be read; from the next on, `from_step` gives them again.
        """
        if not self._repeat and _count(step, "step") > len(self):
            raise ValueError(
                f"step={step}, but there are {len(self)} batches; repeat=True begins with the first again"
            )
        steps = (
            itertools.count(_count(step, "step")) if self._repeat else iter(range(step, len(self)))
        )
        found = backend().read(self._batches, self._specs, steps, self._prefetch)
        return (jax.tree.unflatten(self._tree, arrays) for arrays in found)


def _once(batches: Iterator[Any]) -> Callable[[int], Iterator[Any]]:
    """The batches of an iterator from number k on, which can be had once."""
    left = [batches]

    def given(step: int) -> Iterator[Any]:
        if not left:
            raise ValueError(
                "the batches of an iterator can't be had again: give DataLoader an iterable that is none, a list for instance,"
                " or a function that gives the batches from number k on"
            )
        return itertools.islice(left.pop(), step, None)

    return given


def _specs(placement_specs: Any) -> list[PlacementSpec]:
    leaves = jax.tree.leaves(placement_specs)
    for leaf in leaves:
        if not isinstance(leaf, PlacementSpec):
            raise TypeError(
                f"placement_specs has {leaf!r} in it, expected PlacementSpecs: executable.get_input_placement_specs()[1] is a pytree"
                " of them"
            )
    if not leaves:
        raise ValueError(
            "placement_specs is empty, expected a PlacementSpec for each array of a batch"
        )
    return leaves


def _count(value: int, name: str = "prefetch_size") -> int:
    return checked(name, value, integer(0))
