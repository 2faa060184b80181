"""Submeshes are parts of a host or whole hosts, and their logical shapes use all devices."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from autopar.pipeline.submeshes import (
    HostPool,
    Submesh,
    counting_suffices,
    enumerate_submeshes,
    fits,
    place,
)


def names(pools, sizes):
    return [str(mesh) for mesh in enumerate_submeshes(pools, sizes)]


def test_submeshes_are_parts_of_a_host_and_whole_hosts():
    pool = HostPool(5, 8)
    assert names([pool], "whole_hosts") == ["1x1", "1x2", "1x4", "1x8", "2x8", "3x8", "4x8", "5x8"]
    assert names([pool], "powers_of_two") == ["1x1", "1x2", "1x4", "1x8", "2x8", "4x8", "5x8"]


def test_hosts_may_have_any_number_of_devices():
    assert names([HostPool(2, 6)], "powers_of_two") == ["1x1", "1x2", "1x4", "1x6", "2x6"]
    assert names([HostPool(1, 6)], "all") == ["1x1", "1x2", "1x3", "1x4", "1x5", "1x6"]


def test_unequal_hosts_are_separate_pools():
    assert names([HostPool(2, 2), HostPool(1, 4)], "powers_of_two") == [
        "1x1",
        "1x2",
        "2x2",
        "1:1x1",
        "1:1x2",
        "1:1x4",
    ]


@st.composite
def pools_with_submeshes(draw):
    """Draw a pool and submeshes with as many devices in all."""
    pool = HostPool(draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 4, 6, 8, 12])))
    submeshes, num_left = [], pool.num_devices
    offered = enumerate_submeshes(
        [pool], draw(st.sampled_from(["powers_of_two", "whole_hosts", "all"]))
    )
    while num_left:
        mesh = draw(st.sampled_from([mesh for mesh in offered if mesh.num_devices <= num_left]))
        submeshes.append(mesh)
        num_left -= mesh.num_devices
    return pool, submeshes


@given(pools_with_submeshes())
def test_sizes_that_divide_one_another_always_fit(filling):
    pool, submeshes = filling
    assume(counting_suffices(pool, submeshes))
    assert fits(pool, submeshes)


@given(pools_with_submeshes())
def test_placed_submeshes_are_disjoint_and_fill_whole_hosts_or_parts_of_one(filling):
    pool, submeshes = filling
    if not fits(pool, submeshes):
        with pytest.raises(ValueError, match="don't fit"):
            place([pool], submeshes)
        return
    devices = place([pool], submeshes)
    assert sorted(d for mesh_devices in devices for d in mesh_devices) == list(
        range(pool.num_devices)
    )
    for mesh, mesh_devices in zip(submeshes, devices, strict=True):
        hosts = [d // pool.devices_per_host for d in mesh_devices]
        assert [hosts.count(host) for host in sorted(set(hosts))] == [
            mesh.devices_per_host
        ] * mesh.hosts


def test_neighboring_stages_are_placed_side_by_side():
    pool = HostPool(2, 4)
    stages = [Submesh(0, 1, 2), Submesh(0, 1, 2), Submesh(0, 1, 4)]
    assert place([pool], stages) == ((0, 1), (2, 3), (4, 5, 6, 7))


def test_devices_are_numbered_in_the_order_of_pools():
    assert place([HostPool(1, 2), HostPool(1, 4)], [Submesh(1, 1, 4), Submesh(0, 1, 2)]) == (
        (2, 3, 4, 5),
        (0, 1),
    )


def test_submeshes_are_reordered_if_their_order_leaves_gaps():
    pool = HostPool(2, 6)
    # in order, 2 + 3 are on either host, and no host has room for the last 2
    stages = [Submesh(0, 1, size) for size in (2, 3, 2, 3, 2)]
    assert fits(pool, stages)
    assert sorted(d for mesh_devices in place([pool], stages) for d in mesh_devices) == list(
        range(12)
    )


def test_sizes_that_leave_gaps_in_every_order_do_not_fit():
    assert not fits(HostPool(2, 6), [Submesh(0, 1, 4)] * 3)


def test_a_pool_without_devices_is_refused():
    with pytest.raises(ValueError, match="0 hosts of 8 devices"):
        HostPool(0, 8)
