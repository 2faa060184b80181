"""Batches on other hosts, seen from the driver: sent there, or read there by threads of the workers."""

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
    """A function of a number and a value that sends the value to where that spec says."""
    arrays = _arrays(hosts, specs)
    return lambda i, value: hosts.put(value, arrays[i])


def read_by_workers(
    hosts: RayHosts,
    batches: Batches,
    specs: Sequence[PlacementSpec],
    steps: Iterator[int],
    prefetch: int,
) -> Iterator[list[DistributedArray]]:
    """The arrays of each batch, when all workers have read what they take of it; `prefetch` more are being read."""
    stream = _Stream(hosts, _arrays(hosts, specs))
    try:
        stream.open(batches)
        for reading in ahead(map(stream.ask, steps), prefetch):
            yield stream.take(reading)
    finally:
        stream.close()


@dataclass(frozen=True, slots=True)
class _Reading:
    """A batch that workers were asked for: the keys of its arrays, and for each worker its answer."""

    keys: list[int]
    answers: list[tuple[int, Any]]


class _Stream:
    """Readers on the workers, under one number.

    A key becomes a handle only when its array is there: one that nobody takes is forgotten by the thread that reads, which has made
    it by then, and not by the one that runs steps, which may be told before.
    """

    def __init__(self, hosts: RayHosts, arrays: Sequence[Array]) -> None:
        self._hosts, self._arrays = hosts, arrays
        (self._number,) = hosts.new_keys(1)
        self._asked: set[int] = set()
        self._takes = {
            host: [
                i
                for i, array in enumerate(arrays)
                if not set(devices).isdisjoint(array.place.mesh.devices)
            ]
            for host, devices in enumerate(hosts.numbers)
        }
        self._takes = {host: numbers for host, numbers in self._takes.items() if numbers}

    def open(self, batches: Batches) -> None:
        """Have the workers get ready."""
        hosts, sent = self._hosts, ray.put(_pickled(batches))
        answers = []
        for host, numbers in self._takes.items():
            places = {i: self._arrays[i].place for i in numbers}
            answers.append(
                (host, hosts.ask_reader(host, "open_reader", self._number, sent, places))
            )
        for host, answer in answers:
            hosts.answer(answer, host)

    def ask(self, step: int) -> _Reading:
        """Have a batch read."""
        if not self._hosts.is_live(self._number):
            raise HostsError(
                "the workers that read these batches have ended; start again with from_step"
            )
        keys = self._hosts.new_keys(len(self._arrays))
        self._asked.update(keys)
        answers = [
            (
                host,
                self._hosts.ask_reader(
                    host, "read", self._number, step, {i: keys[i] for i in numbers}
                ),
            )
            for host, numbers in self._takes.items()
        ]
        return _Reading(keys, answers)

    def take(self, reading: _Reading) -> list[DistributedArray]:
        """Wait for a batch."""
        for host, answer in reading.answers:
            self._hosts.answer(answer, host)
        self._asked.difference_update(reading.keys)
        return [
            DistributedArray(self._hosts, *each)
            for each in zip(reading.keys, self._arrays, strict=True)
        ]

    def close(self) -> None:
        """Have the workers read no more, unless they have ended."""
        if not self._hosts.is_live(self._number):
            return
        for host in self._takes:
            self._hosts.ask_reader(host, "close_reader", self._number, list(self._asked))
        for key in (self._number, *self._asked):
            self._hosts.release(key)


def _pickled(batches: Batches) -> bytes:
    try:
        return cloudpickle.dumps(batches)  # pyright: ignore[reportPrivateImportUsage]
    except (TypeError, pickle.PicklingError) as error:
        raise TypeError(
            f"input_iter_func can't be sent to the workers: {error}; open what it reads inside of it, instead of closing over it"
        ) from error


def _arrays(hosts: RayHosts, specs: Sequence[PlacementSpec]) -> list[Array]:
    """The arrays of a batch. Places that the hosts don't have: ValueError."""
    found = []
    for i, spec in enumerate(specs):
        place = Place.of(spec)
        hosts.check_place(place)
        found.append(Array.of(f"batch{i}", spec.aval, place.mesh, place.spec))
    return found
