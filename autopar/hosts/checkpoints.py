"""Who writes what of the arrays that are on other hosts."""

from collections import Counter
from collections.abc import Mapping
from math import prod

from autopar.checkpoint.manifest import SavedPiece
from autopar.hosts.arrays import DistributedArray
from autopar.lowering.cross_mesh_resharding import tiles


def part_of(host: int) -> str:
    """The part of a checkpoint that a host writes."""
    return f"host-{host}"


def saved_pieces(
    handles: Mapping[str, DistributedArray], owner: Mapping[int, int]
) -> dict[str, tuple[SavedPiece, ...]]:
    """For each array its tiles, each written by the one of the hosts that have it that writes least so far."""
    load: Counter[int] = Counter()
    found = {}
    for number, (name, handle) in enumerate(handles.items()):
        array, place = handle.array, handle.array.place
        holders: dict[tuple[tuple[int, int], ...], list[int]] = {}
        for device, tile in zip(
            place.mesh.devices, tiles(array.shape, place.mesh.logical, place.spec), strict=True
        ):
            if all(start < stop for start, stop in tile):
                holders.setdefault(tile, []).append(owner[device])
        pieces = []
        for tile, hosts in holders.items():
            host = min(hosts, key=lambda each: (load[each], each))
            load[host] += prod(stop - start for start, stop in tile) * array.dtype.itemsize
            pieces.append(SavedPiece(tile=tile, part=part_of(host), name=f"{number}.{len(pieces)}"))
        found[name] = tuple(pieces)
    return found
