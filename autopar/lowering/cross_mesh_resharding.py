"""Cross-mesh resharding: which device of one mesh sends which part of a value to which device of another.

The shards of a value on either mesh are tiles. Every destination tile is cut along the source tiles that it overlaps, and each piece
comes from one of the devices that hold it (Zhuang et al., "On Optimizing the Communication of Model Parallelism", MLSys'23).
Where the destination keeps copies of a tile, each copy at first receives a part of it only, and the parts are gathered inside the
destination mesh, whose links are usually faster: every byte crosses between the meshes once.
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
"""For each array dim the first index and the one after the last."""


@dataclass(frozen=True, slots=True)
class Piece:
    """`tile` of the value goes from device `source` of one mesh to device `destination` of the other, in row-major numbers."""

    source: int
    destination: int
    tile: Tile

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(stop - start for start, stop in self.tile)


@dataclass(frozen=True, slots=True)
class Resharding:
    """How a value gets from one mesh to another.

    Attributes:
        shape: of the value.
        pieces: what is sent; together they fill each destination device's shard of `landing` exactly once.
        source: the mesh and the spec that it has; mesh: the one where it goes.
        landing: the spec in which the value arrives.
        spec: the spec that it should have. If it is not `landing`, an all_gather inside the destination mesh follows.
    """

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    source: tuple[LogicalMesh, Spec]
    mesh: LogicalMesh
    landing: Spec
    spec: Spec

    @property
    def gathers(self) -> bool:
        return self.landing != self.spec

    @property
    def gather_groups(self) -> Groups:
        """The destination devices that gather from one another."""
        axes = [
            a
            for landed, wanted in zip(self.landing, self.spec, strict=True)
            for a in landed[len(wanted) :]
        ]
        return self.mesh.groups(axes)

    def sent_bytes(self, item_bytes: int) -> int:
        """Bytes that cross between the meshes, for elements of `item_bytes`."""
        return sum(piece.size for piece in self.pieces) * item_bytes

    def gathered_bytes(self, item_bytes: int) -> int:
        """Bytes of one device's shard once it is complete."""
        return prod(local_shape(self.shape, self.spec, self.mesh)) * item_bytes

    def traffic(self, item_bytes: int) -> dict[tuple[int, int], int]:
        """Bytes from each source device to each destination device, for elements of `item_bytes`."""
        links: Counter[tuple[int, int]] = Counter()
        for piece in self.pieces:
            links[piece.source, piece.destination] += piece.size * item_bytes
        return dict(links)


@lru_cache(maxsize=4096)
def reshard(
    shape: tuple[int, ...],
    source: tuple[LogicalMesh, Spec],
    destination: tuple[LogicalMesh, Spec],
    gather: bool = True,
) -> Resharding:
    """Plan the way of a value of that shape from (mesh, spec) to (mesh, spec) of another mesh.

    Args:
        gather: whether copies on the destination may be completed by an all_gather there.

    Raises:
        ValueError: a spec does not divide the shape evenly.
    """
    (source_mesh, source_spec), (mesh, spec) = source, destination
    for each_mesh, each_spec in (source, destination):
        if len(each_spec) != len(shape) or not divides(shape, each_spec, each_mesh):
            raise ValueError(
                f"spec {each_spec} on a mesh of {each_mesh.sizes} does not divide shape {shape} evenly; "
                "every dim must be a multiple of the devices that shard it"
            )
    landing = landing_spec(shape, mesh, spec) if gather else spec
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
    """`spec` with the axes that it leaves unused, as far as they divide a dim, so that no device receives what another has.

    They come last on the leading dim that they divide, where an all_gather needs no copies to put the parts in order.
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
    """For each device of the mesh, in row-major order, the part of the value that it holds."""
    block = local_shape(shape, spec, mesh)
    found = []
    for position in product(*(range(size) for size in mesh.shape)):
        at = dict(zip(mesh.axis_names, position, strict=True))
        tile = []
        for axes, size in zip(spec, block, strict=True):
            index = 0
            for axis in axes:  # major first
                index = index * mesh.sizes[axis] + at[axis]
            tile.append((index * size, (index + 1) * size))
        found.append(tuple(tile))
    return found


def _overlaps(tile: Tile, block: Sequence[int]) -> list[tuple[Tile, Tile]]:
    """`tile` cut along blocks of a regular grid, each part with its block."""
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
