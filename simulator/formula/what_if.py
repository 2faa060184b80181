"""What if: changes such as "execution.tensor=4" or "cluster.inter_host.bandwidth_gb_per_s=2x" to what files describe."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import yaml

from simulator.cluster import Cluster
from simulator.description import ClusterError, Description, validate
from simulator.formula.machine import Backend, Machine

_READ = (
    "hosts",
    "devices_per_host",
    "nics_per_host",
    "inter_host.bandwidth_gb_per_s",
    "inter_host.latency_us",
    "inter_host.half_size_mb",
    "intra_host.bandwidth_gb_per_s",
    "device",
    "device.cores",
    "device.memory_gb",
    "device.reserve_gb",
    "device.kernel_launch_us",
    "device.memory_bandwidth_gb_per_s",
    "device.peak_tflop_per_s.bf16",
    "device.peak_tflop_per_s.f16",
    "device.kernels.efficiency",
    "device.kernels.memory_efficiency",
)
"""Fields of a cluster that the formulas use; the rest they know from measurements of the device."""


@dataclass(frozen=True, slots=True)
class Change:
    """A field and what it becomes.

    Attributes:
        text: as it was given.
        path: the section and what is in it.
        value: what the field becomes, or by how much it is multiplied.
    """

    text: str
    path: tuple[str, ...]
    value: Any
    multiplies: bool

    @classmethod
    def parse(cls, text: str) -> Self:
        """The change that "section.field=value" asks for; the value is YAML, or a factor: `2x`, `0.5x`."""
        path, equals, value = text.partition("=")
        fields = tuple(path.split("."))
        if not equals or len(fields) < 2 or not all(fields):
            raise ClusterError(f"can't read {text!r}; expected section.field=value, e.g. execution.tensor=4")
        if factor := re.fullmatch(r"(\d*\.?\d+)x", value):
            return cls(text, fields, float(factor[1]), True)
        return cls(text, fields, yaml.safe_load(value), False)

    def apply(self, fields: Mapping[str, Any], at: int = 0) -> dict[str, Any]:
        """`fields`, which `path` leads into from its element `at` on, with the change."""
        name = self.path[at]
        old = fields.get(name)
        if at + 1 < len(self.path):
            if not isinstance(old, Mapping):
                known = ", ".join(key for key, value in fields.items() if isinstance(value, Mapping)) or "none"
                raise ClusterError(f"{self.text!r}: there is no section {name!r}; there are: {known}")
            return {**fields, name: self.apply(old, at + 1)}
        if not self.multiplies:
            return {**fields, name: self.value}
        if isinstance(old, bool) or not isinstance(old, int | float):
            known = ", ".join(key for key, value in fields.items() if type(value) in (int, float))
            raise ClusterError(f"{self.text!r}: {name} is {old!r}, which can't be multiplied; what can: {known}")
        new = old * self.value
        return {**fields, name: int(new) if isinstance(old, int) and new == int(new) else new}


def changed[D: Description](description: D, changes: Iterable[Change], source: str) -> D:
    """The description with changes whose section it is; what then can't be is a `ClusterError`, which says why."""
    fields: Mapping[str, Any] = description.model_dump()
    for change in changes:
        fields = change.apply(fields, 1)
    return validate(type(description), fields, source)


def changed_machine(before: Cluster, changes: Iterable[Change], backend: Backend) -> Machine:
    """The machine that `before` becomes. Collectives that were measured on it change in proportion to the link between its devices."""
    changes = tuple(changes)
    for change in changes:
        if (field := ".".join(change.path[1:])) not in _READ and hasattr(before, change.path[1]):
            raise ClusterError(f"{change.text!r}: the formulas don't use {field!r}; they use {', '.join(_READ)}")
    cluster = changed(before, changes, before.name)
    if cluster.collectives is not None:
        factor = cluster.intra_host.bandwidth_gb_per_s / before.intra_host.bandwidth_gb_per_s
        cluster = cluster.model_copy(update={"collectives": cluster.collectives.faster(factor)})
    return Machine(cluster, backend)
