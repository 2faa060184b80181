"""What if: changes such as "execution.tensor=4" or "cluster.inter_host.bandwidth_gb_per_s=2x" to what files describe."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self, get_args

import yaml

from simulator.cluster import Cluster
from simulator.collectives import CollectiveProfile, Network
from simulator.description import ClusterError, Description, validate
from simulator.formula.machine import Backend, Machine
from simulator.work import CollectiveKind

_READ = (
    "hosts",
    "devices_per_host",
    "nics_per_host",
    "inter_host.bandwidth_gb_per_s",
    "inter_host.latency_us",
    "inter_host.half_size_mb",
    "intra_host.bandwidth_gb_per_s",
    "device",
    "device.memory_gb",
    "device.reserve_gb",
    "device.kernel_launch_us",
    "device.memory_bandwidth_gb_per_s",
    "device.peak_tflop_per_s.bf16",
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
    """The machine that `before` becomes. What was measured on its devices changes in proportion to what their description says."""
    changes = tuple(changes)
    for change in changes:
        if (field := ".".join(change.path[1:])) not in _READ and hasattr(before, change.path[1]):
            raise ClusterError(f"{change.text!r}: the formulas don't use {field!r}; they use {', '.join(_READ)}")
    cluster = changed(before, changes, before.name)
    machine = Machine.of(before, backend)
    profile, network = machine.gemms.profile, machine.network.profile
    was, now = before.device, cluster.device
    peaks = [device.peak_tflop_per_s.get("bf16", device.vector_tflop_per_s) for device in (was, now)]
    faster = profile.model_copy(
        update={
            "peak_tflop_per_s": profile.peak_tflop_per_s * peaks[1] / peaks[0],
            "memory_bandwidth_gb_per_s": profile.memory_bandwidth_gb_per_s
            * (now.memory_bandwidth_gb_per_s / was.memory_bandwidth_gb_per_s),
        }
    )
    links = _scaled(network, cluster.intra_host.bandwidth_gb_per_s / before.intra_host.bandwidth_gb_per_s)
    gemms = replace(machine.gemms, profile=faster)
    return Machine(cluster, gemms, Network(cluster, links), backend)


def _scaled(profile: CollectiveProfile, factor: float) -> CollectiveProfile:
    """The same links with another bandwidth."""
    curves = {}
    for kind in get_args(CollectiveKind):
        if (curve := getattr(profile, kind)) is not None:
            groups = {size: factor * each for size, each in curve.group_bandwidth_gb_per_s.items()}
            update = {"bandwidth_gb_per_s": factor * curve.bandwidth_gb_per_s, "group_bandwidth_gb_per_s": groups}
            curves[kind] = curve.model_copy(update=update)
    return profile.model_copy(update=curves)
