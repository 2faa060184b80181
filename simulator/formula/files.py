"""Formula files: a model and how it is run, in YAML, with changes from the command line."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import yaml

from simulator.cluster import Cluster
from simulator.description import ClusterError, Description, read, validate
from simulator.formula.description import Execution, Transformer
from simulator.formula.machine import EAGER, JITTED, ZERO_2021, Backend, Machine

BACKENDS: Mapping[str, Backend] = {backend.name: backend for backend in (EAGER, JITTED, ZERO_2021)}


class Formula(Description):
    """A model and its execution, as a file holds them."""

    model: Transformer
    execution: Execution

    @classmethod
    def load(cls, path: Path, changes: Iterable[str] = ()) -> Self:
        """The formula in a file, with `changes` such as "execution.tensor=4"; wrong fields or values: `ClusterError`, which names them."""
        data = read(path)
        for change in changes:
            section, name, value = parse_change(change)
            if not isinstance(data.get(section), dict):
                raise ClusterError(f"{change!r}: {path} has no section {section!r}; it has {', '.join(map(str, data))}")
            data[section][name] = value
        return validate(cls, data, path)


def load_machine(cluster: str, devices: int, backend: str, changes: Iterable[str] = ()) -> Machine:
    """Whole hosts of a shipped cluster or a cluster file, enough for `devices`, with `changes` such as "cluster.nics_per_host=4"."""
    if backend not in BACKENDS:
        raise ClusterError(f"unknown backend {backend!r}; expected one of {', '.join(BACKENDS)}")
    base = Cluster.load(cluster)
    hosts = max(base.hosts, -(-devices // base.devices_per_host))
    fields = {name: getattr(base, name) for name in Cluster.model_fields} | {"hosts": hosts}
    for change in changes:
        _, name, value = parse_change(change)
        fields[name] = value
    return Machine.of(validate(Cluster, fields, cluster), BACKENDS[backend])


def parse_change(change: str) -> tuple[str, str, Any]:
    """Section, field and value of "section.field=value"; the value is YAML."""
    path, equals, value = change.partition("=")
    section, dot, name = path.partition(".")
    if not (equals and dot and name):
        raise ClusterError(f"can't read {change!r}; expected section.field=value, e.g. execution.tensor=4")
    return section, name, yaml.safe_load(value)
