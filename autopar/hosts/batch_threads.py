"""Readers of batches in threads of a worker. Only the user's pickled function may depend on Ray."""

import pickle
from collections.abc import Mapping

from autopar.devices import Device
from autopar.lowering.job import Place
from autopar.runtime.batch_reading import Batches, DataLoaderError, Reader


def open_reader(
    batches: bytes, places: Mapping[int, Place], devices: Mapping[int, Device]
) -> Reader:
    """Return the reader of a worker's part of batches.

    Args:
        batches: a pickled `Batches`.
        places: places of the arrays to read.
        devices: devices by number.

    Raises:
        DataLoaderError: `batches` can't be unpickled.
    """
    try:
        loaded = pickle.loads(batches)
    except Exception as error:
        raise DataLoaderError(
            f"input_iter_func can't be loaded here: {type(error).__name__}: {error}"
        ) from error
    assert isinstance(loaded, Batches)
    return Reader(loaded, {i: place.sharding(devices) for i, place in places.items()})
