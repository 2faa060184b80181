"""Scenarios: YAML files with a model and how it runs, and clusters for them, with changes from the command line."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Self

from simulator.backend import backend_named
from simulator.hardware.cluster import Cluster, load_device
from simulator.hardware.description import ClusterError, Description, read, validate
from simulator.hardware.heterogeneous import AnyCluster, HeterogeneousCluster, load_cluster
from simulator.transformer.machine import Machine
from simulator.transformer.scenario import Execution, Transformer
from simulator.transformer.what_if import READ_BY_PROGRAMS, READ_BY_SCENARIOS, Change, changed


class Scenario(Description):
    """A model and its execution."""

    model: Transformer
    execution: Execution

    @classmethod
    def load(cls, path: Path, changes: Iterable[Change] = ()) -> Self:
        """Return the scenario in a file, with changes; a wrong field or value raises a `ClusterError` that names it."""
        data = read(path)
        for change in changes:
            data = change.apply(data)
        return validate(cls, data, path)


def load_machine(
    cluster: str, devices: int, backend: str, changes: Iterable[Change] = ()
) -> Machine:
    """A shipped cluster or a cluster file with changes, and with as many hosts as `devices` need; another device comes first."""
    driver, changes = backend_named(backend), tuple(changes)
    where = _changed(Cluster.load(cluster), changes, cluster, READ_BY_SCENARIOS)
    return Machine(_grown(where, devices, changes), driver)


def load_for_program(cluster: str, devices: int, changes: Iterable[Change] = ()) -> AnyCluster:
    """The same for a program on so many devices. Pools of unlike hosts are changed one by one, and stay as many as they are."""
    changes = tuple(changes)
    where = load_cluster(cluster)
    if isinstance(where, Cluster):
        return _grown(_changed(where, changes, cluster, READ_BY_PROGRAMS), devices, changes)
    of_pool: defaultdict[int, list[Change]] = defaultdict(list)
    for change in changes:
        number, inside = _pool_change(change, where)
        of_pool[number].append(inside)
    pools = [
        _changed(pool, of_pool[number], cluster, READ_BY_PROGRAMS, f", pool {number}")
        for number, pool in enumerate(where.pools)
    ]
    return validate(
        HeterogeneousCluster,
        {name: getattr(where, name) for name in ("name", "description")} | {"pools": tuple(pools)},
        cluster,
    )


def _pool_change(change: Change, where: HeterogeneousCluster) -> tuple[int, Change]:
    """The pool that a change is of, and the change as it is seen from there."""
    numbers = range(len(where.pools))
    match change.path:
        case (section, "pools", number, field, *inner) if (
            number.isdecimal() and int(number) in numbers
        ):
            return int(number), replace(change, path=(section, field, *inner))
    raise ClusterError(
        f"{change.text!r}: {where.name!r} has pools of unlike hosts, numbered 0 to {numbers[-1]}; "
        "expected a field of one of them, e.g. cluster.pools.0.hosts=2"
    )


def _grown(where: Cluster, devices: int, changes: Iterable[Change]) -> Cluster:
    """The cluster with as many hosts as `devices` need, unless the changes say how many there are."""
    if devices <= where.num_devices or any(
        change.path == ("cluster", "hosts") for change in changes
    ):
        return where
    if where.inter_host is None:
        raise ClusterError(
            f"{devices} devices are needed, {where.name!r} has {where.num_devices} and no inter_host, the link to further hosts; "
            "take another cluster, or describe the link in its file"
        )
    return where.with_size(-(-devices // where.devices_per_host))


def _changed(
    base: Cluster, changes: Iterable[Change], cluster: str, read: tuple[str, ...], place: str = ""
) -> Cluster:
    """The cluster of a file with changes, of which another device and other collectives come first."""
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
    """The cluster with another device, by the name of a shipped one or by its file beside the cluster's."""
    fields = change.apply(cluster.model_dump(), 1)
    return validate(Cluster, fields | {"device": load_device(str(fields["device"]), path)}, path)


def _with_collectives(cluster: Cluster, change: Change, path: Path) -> Cluster:
    """The cluster with another profile of collectives, by its name or its file, and with the link that they were measured over."""
    fields = change.apply(cluster.model_dump(), 1)
    del fields["collective_launch_us"]
    fields["intra_host"] = {"contention_factor": cluster.intra_host.contention_factor}
    return Cluster.of_fields(fields, path)
