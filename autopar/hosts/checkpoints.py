"""Distribution of a checkpoint's tiles over the hosts that write them."""

from collections import Counter
from collections.abc import Mapping
from math import prod

from autopar.checkpoint.manifest import SavedPiece
from autopar.hosts.arrays import DistributedArray
from autopar.lowering.cross_mesh_resharding import Tile, tile_shape, tiles


def part_of(host: int) -> str:
    """Return the name of the part of a checkpoint that a host writes."""
    return f"host-{host}"


def saved_pieces(
    handles: Mapping[str, DistributedArray], owner: Mapping[int, int]
) -> dict[str, tuple[SavedPiece, ...]]:
    """Return for each array its non-empty tiles, with the host that writes each.

    A tile with several copies is written by the host that has the fewest bytes to write so far.

    Args:
        handles: the arrays by path.
        owner: for each device its host.
    """
    load: Counter[int] = Counter()
    pieces_of: dict[str, tuple[SavedPiece, ...]] = {}
    for number, (path, handle) in enumerate(handles.items()):
        array = handle.array
        pieces: list[SavedPiece] = []
        for tile, hosts in _copies(handle, owner).items():
            host = min(hosts, key=lambda candidate: (load[candidate], candidate))
            load[host] += prod(tile_shape(tile)) * array.dtype.itemsize
            pieces.append(SavedPiece(tile=tile, part=part_of(host), name=f"{number}.{len(pieces)}"))
        pieces_of[path] = tuple(pieces)
    return pieces_of


def _copies(handle: DistributedArray, owner: Mapping[int, int]) -> dict[Tile, list[int]]:
    """Return for each non-empty tile of an array the hosts that have a copy."""
    place = handle.array.place
    copies: dict[Tile, list[int]] = {}
    layout = tiles(handle.array.shape, place.mesh.logical, place.spec)
    for device, tile in zip(place.mesh.devices, layout, strict=True):
        if all(start < stop for start, stop in tile):
            copies.setdefault(tile, []).append(owner[device])
    return copies
