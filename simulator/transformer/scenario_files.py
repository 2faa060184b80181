"""Scenarios in YAML files, and clusters for them, with changes from the command line."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Self

from simulator.backend import backend_named
from simulator.hardware.cluster import Cluster
from simulator.hardware.description import ClusterError, Description, read, validate
from simulator.hardware.device import load_device
from simulator.hardware.heterogeneous import AnyCluster, HeterogeneousCluster, load_cluster
from simulator.transformer.machine import Machine
from simulator.transformer.scenario import Execution
from simulator.transformer.transformer_sizes import Transformer
from simulator.transformer.what_if import READ_BY_PROGRAMS, READ_BY_SCENARIOS, Change, changed

EXAMPLES = Path(__file__).parent / "examples"
"""Folder of the shipped scenarios."""


class Scenario(Description):
    """A model and its execution.

    Attributes:
        model: the section `model`.
        execution: the section `execution`.
    """

    model: Transformer
    execution: Execution

    @classmethod
    def load(
        cls, path: Path, changes: Iterable[Change] = (), searched: Collection[str] = ()
    ) -> Self:
        """Return the scenario in a file, with changes.

        Args:
            path: the file.
            changes: changes of its fields.
            searched: fields of the execution whose values in the file don't count.

        Raises:
            ClusterError: a field is missing, unknown or wrong, or a change is of no field.
        """
        data = read(path)
        execution = data.get("execution")
        if isinstance(execution, Mapping):
            others = {name: execution[name] for name in execution if name not in searched}
            data = {**data, "execution": others}
        for change in changes:
            data = change.apply(data)
        return validate(cls, data, path)


def load_machine(
    cluster: str, devices: int, backend: str, changes: Iterable[Change] = ()
) -> Machine:
    """Return the machine of a scenario: a cluster with changes, and with hosts for all devices.

    Args:
        cluster: the name of a shipped cluster, or the path of a file.
        devices: number of devices that the scenario needs.
        backend: the name of a backend.
        changes: changes of the cluster; those of the device and of collectives are made first.

    Raises:
        ClusterError: the cluster or a change is wrong, or the cluster can't have as many hosts.
        ValueError: the backend is unknown.
    """
    driver = backend_named(backend)
    changes = tuple(changes)
    base = _changed(Cluster.load(cluster), changes, cluster, READ_BY_SCENARIOS)
    return Machine(_grown(base, devices, changes), driver)


def load_for_program(cluster: str, devices: int, changes: Iterable[Change] = ()) -> AnyCluster:
    """Return the cluster of a program: with changes, and with hosts for all devices.

    A change of a heterogeneous cluster is of one of its pools; no hosts are added to it.

    Args:
        cluster: the name of a shipped cluster, or the path of a file.
        devices: number of devices that the program needs.
        changes: changes of the cluster; those of the device and of collectives are made first.

    Raises:
        ClusterError: the cluster or a change is wrong, or the cluster can't have as many hosts.
    """
    changes = tuple(changes)
    base = load_cluster(cluster)
    if isinstance(base, Cluster):
        return _grown(_changed(base, changes, cluster, READ_BY_PROGRAMS), devices, changes)
    changes_by_pool: defaultdict[int, list[Change]] = defaultdict(list)
    for change in changes:
        number, pool_change = _pool_change(change, base)
        changes_by_pool[number].append(pool_change)
    pools = [
        _changed(pool, changes_by_pool[number], cluster, READ_BY_PROGRAMS, f", pool {number}")
        for number, pool in enumerate(base.pools)
    ]
    return validate(HeterogeneousCluster, base.fields() | {"pools": tuple(pools)}, cluster)


def _pool_change(change: Change, cluster: HeterogeneousCluster) -> tuple[int, Change]:
    """Return the number of the pool that a change is of, and the change of that pool."""
    numbers = range(len(cluster.pools))
    match change.path:
        case (section, "pools", number, field, *inner) if (
            number.isdecimal() and int(number) in numbers
        ):
            return int(number), replace(change, path=(section, field, *inner))
    raise ClusterError(
        f"{change.text!r}: {cluster.name!r} has pools of unlike hosts, numbered 0 to "
        f"{numbers[-1]}; expected a field of one of them, e.g. cluster.pools.0.hosts=2"
    )


def _grown(cluster: Cluster, devices: int, changes: Iterable[Change]) -> Cluster:
    """Return the cluster with hosts for all devices, unless the changes set the number of hosts."""
    sets_hosts = any(change.path == ("cluster", "hosts") for change in changes)
    if devices <= cluster.num_devices or sets_hosts:
        return cluster
    if cluster.inter_host is None:
        raise ClusterError(
            f"{devices} devices are needed, {cluster.name!r} has {cluster.num_devices} and no "
            "inter_host, the link to further hosts; take another cluster, or describe the link in "
            "its file"
        )
    return cluster.with_size(-(-devices // cluster.devices_per_host))


def _changed(
    base: Cluster, changes: Iterable[Change], cluster: str, read: tuple[str, ...], place: str = ""
) -> Cluster:
    """Return a cluster with changes; those of the device and of collectives are made first."""
    others = []
    for change in changes:
        if change.path == ("cluster", "device"):
            base = _with_device(base, change, Path(cluster))
        elif change.path == ("cluster", "collectives") and change.value is not None:
            base = _with_collectives(base, change, Path(cluster))
        else:
            others.append(change)
    return changed(base, others, f"{cluster}{place}", read)


def _with_device(cluster: Cluster, change: Change, path: Path) -> Cluster:
    """Return the cluster with another device, a shipped one or a file beside the cluster's."""
    fields = change.apply(cluster.model_dump(), 1)
    return validate(Cluster, fields | {"device": load_device(str(fields["device"]), path)}, path)


def _with_collectives(cluster: Cluster, change: Change, path: Path) -> Cluster:
    """Return the cluster with another profile of collectives, and the link of that profile."""
    fields = change.apply(cluster.model_dump(), 1)
    del fields["collective_launch_us"]
    fields["intra_host"] = {"contention_factor": cluster.intra_host.contention_factor}
    return Cluster.of_fields(fields, path)
