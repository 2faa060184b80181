"""The numbers of hosts' devices, the cluster of the cost model, and plans that suit the hosts."""

import warnings

import pytest

import autopar
from autopar.hosts.layout import HostLayout, check_plan, cluster_of_hosts, mesh_shape
from simulator.hardware.cluster import Cluster
from simulator.hardware.heterogeneous import HeterogeneousCluster
from tests.autopar.hosts.workers import pipeline
from tests.autopar.pipeline.stack_steps import stack_batch, stack_params, stack_step


def layout(*counts: int, platform: str = "cpu", kinds: tuple[str, ...] | None = None) -> HostLayout:
    """Return hosts with these numbers of devices."""
    addresses = tuple(f"10.0.0.{host}" for host in range(len(counts)))
    return HostLayout(counts, addresses, kinds or ("",) * len(counts), platform)


def test_devices_are_numbered_in_the_order_of_hosts():
    hosts = layout(2, 1, 3)
    assert hosts.numbers == ((0, 1), (2,), (3, 4, 5))
    assert [hosts.owner[device] for device in range(hosts.num_devices)] == [0, 0, 1, 2, 2, 2]
    assert hosts.hosts_of([5, 0]) == [0, 2]
    assert mesh_shape(hosts, None) == (6,)
    hosts.check_devices([(0, 5)])
    with pytest.raises(ValueError, match="the plan needs 7 devices, the 3 hosts have 6"):
        hosts.check_devices([(0, 6)])


def test_hosts_with_different_devices_are_separate_pools():
    cluster = cluster_of_hosts(layout(8, 8, 4, platform="cuda", kinds=("V100", "A100", "A100")))
    assert isinstance(cluster, HeterogeneousCluster)
    assert [(pool.device.name, pool.hosts, pool.devices_per_host) for pool in cluster.pools] == [
        (device_name("p3.16xlarge"), 1, 8),
        (device_name("dgx_a100_80"), 1, 8),
        (device_name("dgx_a100_80"), 1, 4),
    ]
    assert [pool.num_devices for pool in cluster_of_hosts(layout(4, 2)).pools] == [4, 2]
    assert cluster_of_hosts(layout(4, 4)).num_devices == 8


def device_name(cluster: str) -> str:
    return Cluster.load(cluster).device.name


def test_a_stage_that_spans_more_hosts_than_necessary_is_a_warning():
    args = stack_params(), stack_batch()
    plan = autopar.plan_step(
        stack_step, args, method=pipeline(2), cluster="cpu-virtual", mesh_shape=(8,)
    )
    assert [stage.devices for stage in plan.stages] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    with pytest.warns(
        UserWarning,
        match="made for other hosts: stage 0 spans several of these hosts, although one has",
    ):
        check_plan(layout(3, 5), plan, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # a stage has more devices than any host of the second layout
        for hosts in (layout(4, 4), layout(2, 2, 2, 2), layout(8)):
            check_plan(hosts, plan, None)
        check_plan(layout(4, 4, 4), plan, (2, 4))
    with pytest.raises(
        ValueError,
        match="devices=4, but the plan has 8; leave `devices` out to run the plan on the first 8",
    ):
        check_plan(layout(4, 4), plan, 4)
