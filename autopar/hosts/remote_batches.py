"""Batches on other hosts: sent by the driver, or read by threads of the workers."""

import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray import cloudpickle

from autopar.hosts.arrays import DistributedArray
from autopar.hosts.driver import RayHosts
from autopar.hosts.errors import HostsError
from autopar.lowering.job import Array, Place
from autopar.lowering.placement_specs import PlacementSpec
from autopar.runtime.batch_reading import Batches, ahead


def put_on_workers(
    hosts: RayHosts, specs: Sequence[PlacementSpec]
) -> Callable[[int, Any], DistributedArray]:
    """Return a function of (number, value) that sends a value to the place of that spec."""
    arrays = _arrays(hosts, specs)
    return lambda i, value: hosts.put(value, arrays[i])


def read_by_workers(
    hosts: RayHosts,
    batches: Batches,
    specs: Sequence[PlacementSpec],
    steps: Iterator[int],
    prefetch: int,
) -> Iterator[list[DistributedArray]]:
    """Yield the arrays of each batch, when all workers have read their part of it.

    Args:
        hosts: the hosts.
        batches: the batches and the user's function that reads them.
        specs: the place of each array.
        steps: numbers of the batches.
        prefetch: number of further batches that are read meanwhile.

    Raises:
        DataLoaderError: a worker can't read its part.
        HostsError: the workers have ended.
    """
    stream = _BatchStream(hosts, _arrays(hosts, specs))
    try:
        stream.open(batches)
        for request in ahead(map(stream.request, steps), prefetch):
            yield stream.take(request)
    finally:
        stream.close()


@dataclass(frozen=True, slots=True)
class _BatchRequest:
    """A batch that workers are reading.

    Attributes:
        keys: the keys that its arrays will have.
        answers: for each worker its host and the reference of the call.
    """

    keys: list[int]
    answers: list[tuple[int, Any]]


class _BatchStream:
    """A reader on each worker that has shards of the batches.

    A key becomes a handle only after the workers have stored the array. Unclaimed keys are freed
    by the reading thread, because the thread that runs steps could free a key before the reading
    thread has stored its array.
    """

    def __init__(self, hosts: RayHosts, arrays: Sequence[Array]) -> None:
        self._hosts = hosts
        self._arrays = arrays
        (self._number,) = hosts.new_keys(1)
        self._unclaimed: set[int] = set()
        # For each host with shards of a batch the numbers of their arrays.
        reads: dict[int, list[int]] = {}
        for i, array in enumerate(arrays):
            for host in hosts.hosts_of(array.place.mesh.devices):
                reads.setdefault(host, []).append(i)
        self._reads = dict(sorted(reads.items()))

    def open(self, batches: Batches) -> None:
        """Create the readers."""
        sent = ray.put(_pickled(batches))
        answers = []
        for host, numbers in self._reads.items():
            places = {i: self._arrays[i].place for i in numbers}
            ref = self._hosts.call_reader(host, "open_reader", self._number, sent, places)
            answers.append((host, ref))
        for host, ref in answers:
            self._hosts.answer(ref, host)

    def request(self, step: int) -> _BatchRequest:
        """Make the workers read the batch of a step."""
        if not self._hosts.is_live(self._number):
            raise HostsError(
                "the workers that read these batches have ended; start again with from_step"
            )
        keys = self._hosts.new_keys(len(self._arrays))
        self._unclaimed.update(keys)
        answers = []
        for host, numbers in self._reads.items():
            own = {i: keys[i] for i in numbers}
            ref = self._hosts.call_reader(host, "read", self._number, step, own)
            answers.append((host, ref))
        return _BatchRequest(keys, answers)

    def take(self, request: _BatchRequest) -> list[DistributedArray]:
        """Wait for a batch and return handles of its arrays."""
        for host, ref in request.answers:
            self._hosts.answer(ref, host)
        self._unclaimed.difference_update(request.keys)
        return [
            DistributedArray(self._hosts, key, array)
            for key, array in zip(request.keys, self._arrays, strict=True)
        ]

    def close(self) -> None:
        """Delete the readers, unless the workers have ended."""
        if not self._hosts.is_live(self._number):
            return
        for host in self._reads:
            self._hosts.call_reader(host, "close_reader", self._number, list(self._unclaimed))
        for key in (self._number, *self._unclaimed):
            self._hosts.release(key)


def _pickled(batches: Batches) -> bytes:
    try:
        return cloudpickle.dumps(batches)  # pyright: ignore[reportPrivateImportUsage]
    except (TypeError, pickle.PicklingError) as error:
        raise TypeError(
            f"input_iter_func can't be sent to the workers: {error}; open what it reads inside of"
            " it, instead of closing over it"
        ) from error


def _arrays(hosts: RayHosts, specs: Sequence[PlacementSpec]) -> list[Array]:
    """Return the types and places of the arrays of a batch.

    Raises:
        ValueError: the hosts do not have a place.
    """
    arrays = []
    for i, spec in enumerate(specs):
        place = Place.of(spec)
        hosts.check_place(place)
        arrays.append(Array.of(f"batch{i}", spec.aval, place.mesh, place.spec))
    return arrays
