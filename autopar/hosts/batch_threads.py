"""Threads of a worker that read batches from a user's loader. Independent of Ray; only the pickled function may use it."""

import pickle
from collections.abc import Mapping

from autopar.devices import Device
from autopar.lowering.job import Place
from autopar.runtime.batch_reading import Batches, DataLoaderError, Reader


def open_reader(
    batches: bytes, places: Mapping[int, Place], devices: Mapping[int, Device]
) -> Reader:
    """What reads the arrays of batches that have these places; `devices` by number. What can't be unpickled: DataLoaderError."""
    try:
        found = pickle.loads(batches)
    except Exception as error:
        raise DataLoaderError(
            f"input_iter_func can't be loaded here: {type(error).__name__}: {error}"
        ) from error
    assert isinstance(found, Batches)
    return Reader(found, {i: place.sharding(devices) for i, place in places.items()})
