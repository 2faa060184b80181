"""Reservation of hosts of a Ray cluster: which hosts take part, and a worker process on each."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from autopar.hosts.environment import leave_gpus, variables_of_worker, virtual_devices
from autopar.hosts.errors import HostsError
from autopar.hosts.layout import HostLayout
from autopar.hosts.ray_private import runtime_env_of_workers
from autopar.hosts.worker import Worker

_POLL_SECONDS = 1.0
"""Seconds between two looks at whether the cluster still has enough hosts."""


class Reservation:
    """Hosts of a Ray cluster that are reserved for this driver.

    Attributes:
        layout: the hosts and their devices.
        group: Ray's placement group.
    """

    def __init__(self, layout: HostLayout, group: PlacementGroup) -> None:
        self.layout = layout
        self.group = group

    def start_workers(self) -> list[Any]:
        """Start a worker process on each host and return the handles of their actors."""
        layout = self.layout
        groups = {"control": 1, "reading": 1, "writing": 1}
        actor: Any = ray.remote(concurrency_groups=groups)(Worker)  # pyright: ignore[reportCallIssue]
        job = ray.get_runtime_context().runtime_env
        actors = []
        for host, count in enumerate(layout.counts):
            variables = variables_of_worker(layout.platform, count)
            configured = actor.options(
                num_cpus=1,
                num_gpus=count if layout.platform == "cuda" else 0,
                max_restarts=0,
                runtime_env=runtime_env_of_workers(job, variables),
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self.group, placement_group_bundle_index=host
                ),
            )
            actors.append(configured.remote(host, layout.numbers, layout.addresses[host]))
        return actors

    def release(self) -> None:
        """Return the hosts to the cluster."""
        if ray.is_initialized():
            remove_placement_group(self.group)


def reserve(
    num_nodes: int | None, num_devices_per_node: int | Sequence[int] | None, timeout: float
) -> Reservation:
    """Reserve hosts of the Ray cluster that this process has joined.

    Args:
        num_nodes: number of hosts; None for all.
        num_devices_per_node: devices of each host, or one number for all; None for all GPUs.
        timeout: seconds to wait for hosts that are in use.

    Raises:
        HostsError: the cluster has fewer hosts or devices.
        ValueError: the arguments contradict each other.
    """
    nodes = alive_nodes()
    gpus = [int(node["Resources"].get("GPU", 0)) for node in nodes]
    platform = "cuda" if any(gpus) else "cpu"
    counts = choose_devices(gpus, num_nodes, num_devices_per_node)
    if platform != "cpu":
        leave_gpus()
    group = placement_group(
        [{"CPU": 1.0, **({"GPU": float(count)} if platform == "cuda" else {})} for count in counts],
        strategy="STRICT_SPREAD",
    )
    try:
        _await(group, counts, timeout)
        by_id = {node["NodeID"]: node for node in ray.nodes()}
        placed: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
        reserved = [by_id[placed[host]] for host in range(len(counts))]
        addresses = tuple(node["NodeManagerAddress"] for node in reserved)
        layout = HostLayout(tuple(counts), addresses, tuple(map(_kind, reserved)), platform)
    except BaseException:
        remove_placement_group(group)
        raise
    return Reservation(layout, group)


def _await(group: PlacementGroup, counts: Sequence[int], timeout: float) -> None:
    """Wait until the hosts are reserved."""
    end = time.monotonic() + timeout
    while not group.wait(_POLL_SECONDS):
        if time.monotonic() >= end or len(alive_nodes()) < len(counts):
            raise HostsError(
                f"{len(counts)} hosts with {list(counts)} devices and a free CPU each were not"
                f" available within {timeout:.0f} s; end what else runs on the cluster, or ask for"
                " fewer (num_nodes, num_devices_per_node)"
            )


def alive_nodes() -> list[dict[str, Any]]:
    """Return the hosts that Ray considers alive; it notices a lost host only after seconds."""
    return [node for node in ray.nodes() if node["Alive"]]


def _kind(node: Mapping[str, Any]) -> str:
    """Return Ray's name of the accelerators of a host, or ""."""
    prefix = "accelerator_type:"
    names = (name for name in node["Resources"] if name.startswith(prefix))
    return next(names, prefix).removeprefix(prefix)


def choose_devices(
    gpus: Sequence[int], num_nodes: int | None, per_node: int | Sequence[int] | None
) -> list[int]:
    """Return the number of devices to take from each chosen host.

    Args:
        gpus: for each host of the cluster its number of GPUs.
        num_nodes: number of hosts; None for all.
        per_node: devices of each host, or one number for all; None for all GPUs, or for the number
            of virtual CPU devices that XLA_FLAGS asks for.

    Raises:
        HostsError: the cluster has fewer hosts or devices.
        ValueError: the arguments contradict each other.
    """
    if isinstance(per_node, Sequence):
        return _choose_unequal(gpus, num_nodes, per_node)
    if any(gpus):
        counts = sorted((count for count in gpus if count >= (per_node or 1)), reverse=True)
        counts = [per_node or count for count in counts]
        described = f"with {per_node or 1} GPUs or more"
    else:
        counts = [per_node or virtual_devices() or 1] * len(gpus)
        described = "(none with GPUs)"
    wanted = len(counts) if num_nodes is None else num_nodes
    if not 1 <= wanted <= len(counts):
        raise HostsError(
            f"{wanted} hosts asked for, but the Ray cluster has {len(counts)} {described}"
        )
    return counts[:wanted]


def _choose_unequal(gpus: Sequence[int], num_nodes: int | None, counts: Sequence[int]) -> list[int]:
    """Return `counts` if the cluster has such hosts."""
    if not counts or any(not isinstance(count, int) or count < 1 for count in counts):
        raise ValueError(
            f"num_devices_per_node={counts!r}, expected a number of devices, or one for each host"
        )
    if num_nodes not in (None, len(counts)):
        raise ValueError(
            f"num_devices_per_node={counts!r} is for {len(counts)} hosts, but num_nodes={num_nodes}"
        )
    available = sorted(gpus if any(gpus) else [max(counts)] * len(gpus), reverse=True)
    wanted = sorted(counts, reverse=True)
    fits = all(count <= most for count, most in zip(wanted, available, strict=False))
    if len(wanted) > len(available) or not fits:
        described = (
            f"have {available} GPUs" if any(gpus) else f"are {len(available)} (none with GPUs)"
        )
        raise HostsError(
            f"hosts with {list(counts)} devices asked for, but the hosts of the Ray cluster"
            f" {described}"
        )
    return list(counts)
