"""Cross-mesh resharding: the transfers that move a sharded value from one mesh to another.

The shards of a value on either mesh are tiles. Every destination tile is split along the source
tiles that it overlaps, and each piece is sent by one of the devices that store it (Zhuang et al.,
"On Optimizing the Communication of Model Parallelism", MLSys'23). Where several destination devices
store the same tile, each of them at first receives only a part of it, and an all_gather within the
destination mesh, whose links are usually faster, completes the copies. So every byte crosses
between the meshes once.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

from autopar.ir.spec import LogicalMesh, Spec, axes_of, divides, local_shape
from simulator.work import Groups

type Tile = tuple[tuple[int, int], ...]
"""First index and the index after the last one, for each array dim."""


def tile_shape(tile: Tile) -> tuple[int, ...]:
    """Return the shape of a tile."""
    return tuple(stop - start for start, stop in tile)


def slices_within(inner: Tile, outer: Tile) -> tuple[slice, ...]:
    """Return the slices that cut tile `inner` out of the array that is tile `outer`."""
    return tuple(
        slice(start - first, stop - first)
        for (start, stop), (first, _) in zip(inner, outer, strict=True)
    )


@dataclass(frozen=True, slots=True)
class Piece:
    """A tile that one device sends to another.

    Attributes:
        source: device of the source mesh, in row-major order.
        destination: device of the destination mesh, in row-major order.
        tile: the part of the value.
    """

    source: int
    destination: int
    tile: Tile

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(tile_shape(self.tile))


@dataclass(frozen=True, slots=True)
class Resharding:
    """The transfers of a value from one mesh to another.

    Attributes:
        shape: shape of the value.
        pieces: pieces that are sent. Together they fill each destination device's shard of
            `landing` exactly once.
        source: mesh and spec that the value has.
        mesh: the destination mesh.
        landing: spec in which the value arrives.
        spec: spec that the value should have. If it is not `landing`, an all_gather within the
            destination mesh follows.
    """

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    source: tuple[LogicalMesh, Spec]
    mesh: LogicalMesh
    landing: Spec
    spec: Spec

    @property
    def gathers(self) -> bool:
        """Whether an all_gather completes the value."""
        return self.landing != self.spec

    @property
    def gather_groups(self) -> Groups:
        """Groups of destination devices that gather from one another."""
        added = [
            landing_axes[len(axes) :]
            for landing_axes, axes in zip(self.landing, self.spec, strict=True)
        ]
        return self.mesh.groups([axis for axes in added for axis in axes])

    def sent_bytes(self, item_bytes: int) -> int:
        """Return the bytes that cross between the meshes, for elements of `item_bytes`."""
        return sum(piece.size for piece in self.pieces) * item_bytes

    def gathered_bytes(self, item_bytes: int) -> int:
        """Return the bytes of one device's complete shard, for elements of `item_bytes`."""
        return prod(local_shape(self.shape, self.spec, self.mesh)) * item_bytes

    def traffic(self, item_bytes: int) -> dict[tuple[int, int], int]:
        """Return the bytes from each source device to each destination device.

        Args:
            item_bytes: bytes of one element.
        """
        links: Counter[tuple[int, int]] = Counter()
        for piece in self.pieces:
            links[piece.source, piece.destination] += piece.size * item_bytes
        return dict(links)


@lru_cache(maxsize=4096)
def reshard(
    shape: tuple[int, ...],
    source: tuple[LogicalMesh, Spec],
    destination: tuple[LogicalMesh, Spec],
) -> Resharding:
    """Return the transfers of a value from one mesh to another.

    Args:
        shape: shape of the value.
        source: mesh and spec that it has.
        destination: mesh and spec that it should have.

    Raises:
        ValueError: a spec does not divide the shape evenly.
    """
    (source_mesh, source_spec), (mesh, spec) = source, destination
    for end_mesh, end_spec in (source, destination):
        if len(end_spec) != len(shape) or not divides(shape, end_spec, end_mesh):
            raise ValueError(
                f"spec {end_spec} on a mesh of {end_mesh.sizes} does not divide shape {shape}"
                " evenly; every dim must be a multiple of the devices that shard it"
            )
    landing = landing_spec(shape, mesh, spec)
    # Each piece is sent by the device that has sent least so far, of those that store its tile.
    holders: dict[Tile, list[int]] = {}
    for device, tile in enumerate(tiles(shape, source_mesh, source_spec)):
        holders.setdefault(tile, []).append(device)
    sent = [0] * source_mesh.num_devices
    pieces = []
    source_block = local_shape(shape, source_spec, source_mesh)
    for device, tile in enumerate(tiles(shape, mesh, landing)):
        for part, whole in _overlaps(tile, source_block):
            sender = min(
                holders[whole], key=lambda holder: (sent[holder], (holder - device) % len(sent))
            )
            piece = Piece(sender, device, part)
            sent[sender] += piece.size
            pieces.append(piece)
    return Resharding(shape, tuple(pieces), source, mesh, landing, spec)


def landing_spec(shape: Sequence[int], mesh: LogicalMesh, spec: Spec) -> Spec:
    """Return `spec` with its unused axes added where they divide a dim.

    No device then receives what another one receives as well. Each axis is added as the last one of
    the first dim that it divides, where an all_gather needs no copies to put the parts in order.

    Args:
        shape: shape of the value.
        mesh: the destination mesh.
        spec: spec that the value should have.
    """
    landing = list(spec)
    for axis in mesh.axis_names:
        if mesh.sizes[axis] > 1 and axis not in axes_of(spec):
            for dim, size in enumerate(shape):
                if size % mesh.ways((*landing[dim], axis)) == 0:
                    landing[dim] = (*landing[dim], axis)
                    break
    return tuple(landing)


def tiles(shape: Sequence[int], mesh: LogicalMesh, spec: Spec) -> list[Tile]:
    """Return the part of a value that each device of a mesh stores, in row-major order.

    Args:
        shape: shape of the value.
        mesh: the mesh.
        spec: spec of the value.
    """
    block = local_shape(shape, spec, mesh)
    parts = []
    for position in product(*(range(size) for size in mesh.shape)):
        coordinates = dict(zip(mesh.axis_names, position, strict=True))
        tile = []
        for axes, size in zip(spec, block, strict=True):
            index = 0
            for axis in axes:  # major first
                index = index * mesh.sizes[axis] + coordinates[axis]
            tile.append((index * size, (index + 1) * size))
        parts.append(tuple(tile))
    return parts


def _overlaps(tile: Tile, block: Sequence[int]) -> list[tuple[Tile, Tile]]:
    """Split `tile` along blocks of a regular grid, and return each part with its block."""
    dims = []
    for (start, stop), size in zip(tile, block, strict=True):
        cuts = []
        for index in range(start // size, -(-stop // size)) if size else ():
            whole = index * size, (index + 1) * size
            cuts.append(((max(start, whole[0]), min(stop, whole[1])), whole))
        dims.append(cuts)
    return [
        (tuple(part for part, _ in partition), tuple(whole for _, whole in partition))
        for partition in product(*dims)
    ]
