"""The devices that hosts contribute, the cluster of the cost model, and plans that suit the hosts."""

import warnings
from typing import Any

import jax
import pytest

import autopar
from autopar.hosts import environment, reservation
from autopar.hosts.environment import leave_gpus
from autopar.hosts.errors import HostsError
from autopar.hosts.layout import HostLayout, check_plan, cluster_of_hosts
from autopar.hosts.reservation import choose_devices, reserve
from simulator.hardware.heterogeneous import HeterogeneousCluster
from tests.autopar.hosts.workers import pipeline
from tests.autopar.pipeline.stack_steps import stack_batch, stack_params, stack_step


def layout(*counts: int, platform: str = "cpu", kinds: tuple[str, ...] | None = None) -> HostLayout:
    """Return hosts with these numbers of devices."""
    addresses = tuple(f"10.0.0.{host}" for host in range(len(counts)))
    return HostLayout(counts, addresses, kinds or ("",) * len(counts), platform)


def test_hosts_may_give_different_numbers_of_devices():
    assert choose_devices([0, 0, 0], None, (4, 2)) == [4, 2]
    assert choose_devices([8, 0, 4], 2, [2, 8]) == [2, 8]


@pytest.mark.parametrize(
    ("gpus", "num_nodes", "per_node", "error", "said"),
    [
        ([0, 0, 0], 3, (4, 2), ValueError, r"\(4, 2\) is for 2 hosts, but num_nodes=3"),
        (
            [0, 0, 0],
            None,
            (),
            ValueError,
            r"\(\), expected a number of devices, or one for each host",
        ),
        ([0, 0, 0], None, (4, 0), ValueError, r"\(4, 0\), expected a number"),
        (
            [0, 0, 0],
            None,
            (1, 1, 1, 1),
            HostsError,
            r"\[1, 1, 1, 1\] devices asked for, but .* are 3 \(none with GPUs\)",
        ),
        (
            [8, 4, 0],
            None,
            (5, 8),
            HostsError,
            r"\[5, 8\] devices asked for, but .* have \[8, 4, 0\] GPUs",
        ),
    ],
)
def test_numbers_of_devices_that_hosts_do_not_have_are_refused(
    gpus, num_nodes, per_node, error, said
):
    with pytest.raises(error, match=said):
        choose_devices(gpus, num_nodes, per_node)


def test_hosts_that_differ_are_pools_each_of_its_own_kind():
    found = cluster_of_hosts(layout(8, 8, 4, platform="cuda", kinds=("V100", "A100", "A100")))
    assert isinstance(found, HeterogeneousCluster)
    assert [(pool.device.name, pool.hosts, pool.devices_per_host) for pool in found.pools] == [
        (autopar_device("p3.16xlarge"), 1, 8),
        (autopar_device("dgx_a100_80"), 1, 8),
        (autopar_device("dgx_a100_80"), 1, 4),
    ]
    assert [pool.num_devices for pool in cluster_of_hosts(layout(4, 2)).pools] == [4, 2]
    assert cluster_of_hosts(layout(4, 4)).num_devices == 8


def autopar_device(name: str) -> str:
    from simulator.hardware.cluster import Cluster

    return Cluster.load(name).device.name


def test_the_driver_leaves_gpus_to_the_workers(monkeypatch):
    told: list[Any] = []
    monkeypatch.setattr(jax.config, "update", lambda *given: told.append(given))
    monkeypatch.setattr(environment, "backends_started", lambda: False)
    leave_gpus()
    assert told == [("jax_platforms", "cpu")]
    monkeypatch.setattr(environment, "backends_started", lambda: True)
    leave_gpus()  # the driver is on the CPU
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.warns(
        UserWarning,
        match=r"has JAX on a GPU, .* set JAX_PLATFORMS=cpu for it, or call autopar\.init",
    ):
        leave_gpus()
    assert len(told) == 1


@pytest.mark.parametrize("gpus", [0, 4])
def test_a_cluster_with_gpus_has_the_driver_leave_them(gpus, monkeypatch):
    left: list[bool] = []
    nodes = [{"Resources": {"CPU": 2.0, "GPU": float(gpus), "accelerator_type:A100": 1.0}}]
    monkeypatch.setattr(reservation, "alive_nodes", lambda: nodes)
    monkeypatch.setattr(reservation, "leave_gpus", lambda: left.append(True))

    def stop(bundles: Any, strategy: str) -> None:
        raise HostsError(f"would take {bundles}")

    monkeypatch.setattr(reservation, "placement_group", stop)
    with pytest.raises(HostsError, match=r"would take \[\{'CPU': 1.0"):
        reserve(None, 2, 60.0)
    assert left == [True] * bool(gpus)


def test_a_stage_that_the_hosts_split_is_a_warning():
    args = stack_params(), stack_batch()
    plan = autopar.plan_step(
        stack_step, args, method=pipeline(2), cluster="cpu-virtual", mesh_shape=(8,)
    )
    assert [stage.devices for stage in plan.stages] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    with pytest.warns(
        UserWarning,
        match="made for other hosts: on these, stage 0 spans several although one would",
    ):
        check_plan(layout(3, 5), plan, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for hosts in (
            layout(4, 4),
            layout(2, 2, 2, 2),
            layout(8),
        ):  # no host of the second layout could hold a stage
            check_plan(hosts, plan, None)
        check_plan(layout(4, 4, 4), plan, (2, 4))
    with pytest.raises(
        ValueError,
        match=r"devices=4, but the plan has 8; leave them out, it runs on the first of the hosts'",
    ):
        check_plan(layout(4, 4), plan, 4)
