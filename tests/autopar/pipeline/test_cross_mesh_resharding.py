"""Cross-mesh resharding sends every element that the destination needs once, then gathers."""

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.ir.spec import LogicalMesh, all_specs
from autopar.lowering.cross_mesh_resharding import Resharding, landing_spec, reshard, tiles

SHAPES = [(4, 8, 16), (3, 8, 2), (6, 8, 16), (2, 64, 64)]
MESHES = [((1, 2), (1, 2)), ((1, 4), (1, 4)), ((1, 2), (1, 4)), ((2, 2), (1, 2))]


def mesh_of(shape) -> LogicalMesh:
    return LogicalMesh(shape, tuple("xyz"[: len(shape)]))


def slices_in(tile, origin=()) -> tuple[slice, ...]:
    origin = origin or (0,) * len(tile)
    return tuple(slice(start - o, stop - o) for (start, stop), o in zip(tile, origin, strict=True))


def simulate_transfer(value, source, destination, resharding: Resharding):
    """Return the destination's shards after all pieces have arrived, and after the gather."""
    (source_mesh, source_spec), (mesh, spec) = source, destination
    source_shards = [
        (tile, value[slices_in(tile)]) for tile in tiles(value.shape, source_mesh, source_spec)
    ]
    landing = tiles(value.shape, mesh, resharding.landing)
    received = [np.full([stop - start for start, stop in tile], -1) for tile in landing]
    write_counts = [np.zeros(shard.shape, int) for shard in received]
    for piece in resharding.pieces:
        tile, shard = source_shards[piece.source]
        region = slices_in(piece.tile, [start for start, _ in landing[piece.destination]])
        received[piece.destination][region] = shard[
            slices_in(piece.tile, [start for start, _ in tile])
        ]
        write_counts[piece.destination][region] += 1
    assert all((counts == 1).all() for counts in write_counts)  # each element exactly once
    gather_axes = [
        axis
        for axes, final in zip(resharding.landing, spec, strict=True)
        for axis in axes[len(final) :]
    ]
    groups = {device: group for group in mesh.groups(gather_axes) for device in group}
    gathered = []
    for device, tile in enumerate(tiles(value.shape, mesh, spec)):
        shard = np.full([stop - start for start, stop in tile], -1)
        for peer in groups[device]:
            shard[slices_in(landing[peer], [start for start, _ in tile])] = received[peer]
        gathered.append(shard)
    return gathered


def assert_transfers_exactly(shape, source, destination) -> Resharding:
    value = np.arange(prod(shape)).reshape(shape)
    resharding = reshard(shape, source, destination)
    for tile, shard in zip(
        tiles(shape, *destination),
        simulate_transfer(value, source, destination, resharding),
        strict=True,
    ):
        np.testing.assert_array_equal(shard, value[slices_in(tile)])
    return resharding


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("shapes", MESHES, ids=str)
def test_every_pair_of_specs_transfers_exactly(shape, shapes):
    source_mesh, mesh = map(mesh_of, shapes)
    for source_spec in all_specs(shape, source_mesh):
        for spec in all_specs(shape, mesh):
            assert_transfers_exactly(shape, (source_mesh, source_spec), (mesh, spec))


@st.composite
def transfers(draw):
    meshes = [
        mesh_of(tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))) for _ in range(2)
    ]
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 4, 6, 9, 12]), min_size=1, max_size=3)))
    return shape, *((mesh, draw(st.sampled_from(all_specs(shape, mesh)))) for mesh in meshes)


@given(transfers())
def test_random_meshes_and_specs_transfer_exactly(transfer):
    shape, source, destination = transfer
    resharding = assert_transfers_exactly(shape, source, destination)
    copies = (
        prod(shape)
        * destination[0].num_devices
        // destination[0].ways(a for axes in resharding.landing for a in axes)
    )
    assert sum(resharding.traffic(1).values()) == copies  # every piece that is sent is needed


def test_the_first_axis_of_a_dim_is_the_major_one():
    mesh = mesh_of((2, 3))
    assert tiles((6,), mesh, (("x", "y"),)) == [((i, i + 1),) for i in range(6)]
    assert tiles((6,), mesh, (("y", "x"),)) == [((i, i + 1),) for i in (0, 2, 4, 1, 3, 5)]


def test_replicas_of_the_source_share_the_sends():
    source, destination = mesh_of((4,)), mesh_of((4,))
    resharding = reshard((8, 8), (source, ((), ())), (destination, (("x",), ())))
    assert resharding.traffic(4) == {(device, device): 2 * 8 * 4 for device in range(4)}


def test_a_replicated_destination_receives_every_byte_once_and_gathers():
    source, destination = mesh_of((2,)), mesh_of((2, 2))
    resharding = reshard((8, 8), (source, (("x",), ())), (destination, ((), ())))
    assert resharding.landing == (("x", "y"), ())
    assert resharding.gathers
    assert resharding.traffic(4) == {(0, 0): 64, (0, 1): 64, (1, 2): 64, (1, 3): 64}
    assert resharding.sent_bytes(4) == 8 * 8 * 4


def test_an_axis_that_divides_no_dim_stays_replicated():
    assert landing_spec((3, 5), mesh_of((2, 5)), ((), ())) == ((), ("y",))


def test_a_scalar_is_sent_to_every_device():
    resharding = reshard((), (mesh_of((2,)), ()), (mesh_of((3,)), ()))
    assert [(piece.destination, piece.size) for piece in resharding.pieces] == [
        (0, 1),
        (1, 1),
        (2, 1),
    ]


def test_a_spec_that_does_not_divide_the_shape_is_refused():
    with pytest.raises(ValueError, match=r"does not divide shape \(3,\) evenly"):
        reshard((3,), (mesh_of((2,)), (("x",),)), (mesh_of((2,)), ((),)))
