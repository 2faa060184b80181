"""What if: changes such as "execution.tensor=4" or "cluster.inter_host.bandwidth_gb_per_s=2x" to what files describe."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from simulator.files import parse_yaml
from simulator.hardware.cluster import Cluster
from simulator.hardware.description import ClusterError

_READ = (
    "hosts",
    "devices_per_host",
    "nics_per_host",
    "hosts_per_switch",
    "oversubscription",
    "rails",
    "bridges_per_host",
    "collective_launch_us",
    "intra_host",
    "collectives",
    "inter_host",
    "device",
    "device.cores",
    "device.memory_gb",
    "device.reserve_gb",
    "device.kernel_launch_us",
    "device.memory_bandwidth_gb_per_s",
    "device.kernels.launch_us",
    "device.kernels.efficiency",
    "device.kernels.tile_us",
    "device.kernels.step_ns",
    "device.kernels.cache_gb_per_s_per_core",
    "device.kernels.memory_efficiency",
    "device.kernels.half_size_mb",
    "device.kernels.overlap",
    "device.kernels.wave_quantization",
    "device.kernels.throttling",
    "device.kernels.split_k_us",
)

READ_BY_SCENARIOS = (
    *_READ,
    "device.kernels.throttles_in_training",
    *(
        f"device.{field}.{dtype}"
        for field in ("peak_tflop_per_s", "kernels.efficiency_by_dtype")
        for dtype in ("bf16", "f16", "f8e4m3fn")
    ),
)
"""Fields of a cluster that change what a scenario takes, or sections of them; the rest is refused, as it would do nothing."""

READ_BY_PROGRAMS = (
    *_READ,
    "device.peak_tflop_per_s",
    "device.kernels.efficiency_by_dtype",
    "device.vector_tflop_per_s",
)
"""The same for programs."""

_NOTES = ("name", "source", "gpu", "held_out_error")
"""Fields of these sections that say where numbers come from."""


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
            raise ClusterError(
                f"can't read {text!r}; expected section.field=value, e.g. execution.tensor=4"
            )
        if factor := re.fullmatch(r"(\d*\.?\d+)x", value):
            return cls(text, fields, float(factor[1]), True)
        return cls(text, fields, parse_yaml(value, repr(text), ClusterError), False)

    def apply(self, fields: Mapping[str, Any], at: int = 0) -> dict[str, Any]:
        """`fields`, which `path` leads into from its element `at` on, with the change."""
        name: Any = self.path[at]
        if name.isdecimal() and int(name) in fields:  # the size of a group
            name = int(name)
        old = fields.get(name)
        if at + 1 < len(self.path):
            if not isinstance(old, Mapping):
                known = (
                    ", ".join(key for key, value in fields.items() if isinstance(value, Mapping))
                    or "none"
                )
                raise ClusterError(
                    f"{self.text!r}: there is no section {name!r}; there are: {known}"
                )
            return {**fields, name: self.apply(old, at + 1)}
        if not self.multiplies:
            return {**fields, name: self.value}
        if isinstance(old, bool) or not isinstance(old, int | float):
            known = ", ".join(key for key, value in fields.items() if type(value) in (int, float))
            raise ClusterError(
                f"{self.text!r}: {name} is {old!r}, which can't be multiplied; what can: {known}"
            )
        new = old * self.value
        return {**fields, name: int(new) if isinstance(old, int) and new == int(new) else new}


def changed(
    before: Cluster, changes: Iterable[Change], source: str, read: Iterable[str]
) -> Cluster:
    """The cluster with changes: what its file would describe with the same fields.

    Args:
        source: what errors call the cluster.
        read: fields that something reads, `READ_BY_SCENARIOS` or `READ_BY_PROGRAMS`.

    Raises:
        ClusterError: a change of what isn't there, of what nobody reads, or to what can't be.
    """
    changes = tuple(changes)
    fields: dict[str, Any] = before.model_dump()
    for change in changes:
        fields = change.apply(fields, 1)
    after = Cluster.of_fields(fields, Path(source))
    for change in changes:
        _check_counts(change, after, source, tuple(read))
    return after


def _check_counts(change: Change, after: Cluster, source: str, read: tuple[str, ...]) -> None:
    """Refuse a change that does nothing, or next to nothing."""
    field = ".".join(change.path[1:])
    inside = any(_is_part(field, known) for known in read if known != "device")
    around = field != "device" and any(_is_part(known, field) for known in read)
    if change.path[-1] in _NOTES or not (inside or around):
        raise ClusterError(
            f"{change.text!r}: nothing here depends on {field!r}, but on {', '.join(read)}"
        )
    if field in ("rails", "hosts_per_switch") and after.oversubscription == 1:
        raise ClusterError(
            f"{change.text!r}: between the leaf switches of {source} there is as much bandwidth as within, so {field} would change nothing; "
            "also say how much less there is, e.g. cluster.oversubscription=2"
        )


def _is_part(field: str, of: str) -> bool:
    return field == of or field.startswith(f"{of}.")
