"""Formula files: a model and how it is run, in YAML, with changes from the command line."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Self

from simulator.cluster import Cluster, load_device
from simulator.description import ClusterError, Description, read, validate
from simulator.formula.description import Execution, Transformer
from simulator.formula.machine import EAGER, JITTED, ZERO_2021, Backend, Machine
from simulator.formula.what_if import Change, changed, changed_machine

BACKENDS: Mapping[str, Backend] = {backend.name: backend for backend in (EAGER, JITTED, ZERO_2021)}


class Formula(Description):
    """A model and its execution, as a file holds them."""

    model: Transformer
    execution: Execution

    @classmethod
    def load(cls, path: Path, changes: Iterable[Change] = ()) -> Self:
        """The formula in a file, with changes; wrong fields or values: `ClusterError`, which names them."""
        data = read(path)
        for change in changes:
            data = change.apply(data)
        return validate(cls, data, path)


def load_machine(cluster: str, devices: int, backend: str, changes: Iterable[Change] = ()) -> Machine:
    """Whole hosts of a shipped cluster or a cluster file, enough for `devices`, with changes; another device comes first."""
    if backend not in BACKENDS:
        raise ClusterError(f"unknown backend {backend!r}; expected one of {', '.join(BACKENDS)}")
    base, others = _devices_first(cluster, changes)
    base = base.with_size(max(base.hosts, -(-devices // base.devices_per_host)))
    return changed_machine(base, others, BACKENDS[backend])


def load_changed(cluster: str, changes: Iterable[Change]) -> Cluster:
    """A shipped cluster or a cluster file with changes; another device comes first."""
    base, others = _devices_first(cluster, changes)
    return changed(base, others, cluster)


def _devices_first(cluster: str, changes: Iterable[Change]) -> tuple[Cluster, list[Change]]:
    """The cluster with the device that the changes give it, and the other changes."""
    base, others = Cluster.load(cluster), []
    for change in changes:
        if change.path == ("cluster", "device"):
            base = _with_device(base, change, Path(cluster))
        else:
            others.append(change)
    return base, others


def _with_device(cluster: Cluster, change: Change, path: Path) -> Cluster:
    """The cluster with another device, by the name of a shipped one or by its file beside the cluster's."""
    fields = change.apply(cluster.model_dump(), 1)
    return validate(Cluster, fields | {"device": load_device(str(fields["device"]), path)}, path)
