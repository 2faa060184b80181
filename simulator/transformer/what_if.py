"""Changes of fields in scenarios and clusters, such as "execution.tensor=4".

A value may be a factor: "cluster.inter_host.bandwidth_gb_per_s=2x".
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from simulator.files import parse_yaml
from simulator.hardware.cluster import Cluster
from simulator.hardware.description import ClusterError

_READ_BY_BOTH = (
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
    "device.power_limit_w",
    "device.vector_tflop_per_s",
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
    "device.kernels.power_limit_w",
    "device.kernels.split_k_us",
)

READ_BY_SCENARIOS = (
    *_READ_BY_BOTH,
    "device.kernels.throttles_in_training",
    "device.kernels.attention",
    *(
        f"device.{field}.{dtype}"
        for field in ("peak_tflop_per_s", "kernels.efficiency_by_dtype")
        for dtype in ("bf16", "f16", "f8e4m3fn")
    ),
)
"""Fields or sections of a cluster on which predictions of scenarios depend.

Changes of other fields are refused, as they would have no effect.
"""

READ_BY_PROGRAMS = (
    *_READ_BY_BOTH,
    "host_launch_us",
    "device.peak_tflop_per_s",
    "device.host_bandwidth_gb_per_s",
    "device.kernels.efficiency_by_dtype",
    "device.kernels.conv_efficiency_by_dtype",
    "device.kernels.attention.flash2",
)
"""Fields or sections of a cluster on which predictions of programs depend."""

_TEXTS = ("name", "source", "gpu", "held_out_error")
"""Fields of these sections on which no prediction depends: names and origins of numbers."""


@dataclass(frozen=True, slots=True)
class Change:
    """A field and its new value.

    Attributes:
        text: the change as it was given.
        path: names of the section, of sections in it, and of the field.
        value: the new value, or a factor.
        multiplies: whether the value is a factor.
    """

    text: str
    path: tuple[str, ...]
    value: Any
    multiplies: bool

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the change that a text such as "section.field=value" describes.

        The value is YAML, or a factor: `2x`, `0.5x`.

        Raises:
            ClusterError: the text has another form.
        """
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
        """Return fields with the change.

        Args:
            fields: the fields of the section that contains element `at` of the path.
            at: position in the path.

        Raises:
            ClusterError: there is no such section, or the field can't be multiplied.
        """
        name: Any = self.path[at]
        if name.isdecimal() and int(name) in fields:  # a group size
            name = int(name)
        old = fields.get(name)
        if at + 1 < len(self.path):
            if not isinstance(old, Mapping):
                sections = [key for key, value in fields.items() if isinstance(value, Mapping)]
                raise ClusterError(
                    f"{self.text!r}: there is no section {name!r}; "
                    f"there are: {', '.join(sections) or 'none'}"
                )
            return {**fields, name: self.apply(old, at + 1)}
        if not self.multiplies:
            return {**fields, name: self.value}
        if isinstance(old, bool) or not isinstance(old, int | float):
            numbers = [key for key, value in fields.items() if type(value) in (int, float)]
            raise ClusterError(
                f"{self.text!r}: {name} is {old!r}, which can't be multiplied; "
                f"what can: {', '.join(numbers)}"
            )
        new = old * self.value
        return {**fields, name: int(new) if isinstance(old, int) and new == int(new) else new}


def changed(
    before: Cluster, changes: Iterable[Change], source: str, read: Iterable[str]
) -> Cluster:
    """Return a cluster with changes, as if its file had the changed fields.

    Args:
        before: the cluster.
        changes: the changes; each path begins with the section `cluster`.
        source: what errors call the cluster.
        read: fields on which predictions depend, `READ_BY_SCENARIOS` or `READ_BY_PROGRAMS`.

    Raises:
        ClusterError: a change names a missing section or a field without effect, or has a wrong
            value.
    """
    changes = tuple(changes)
    fields: dict[str, Any] = before.model_dump()
    for change in changes:
        fields = change.apply(fields, 1)
    after = Cluster.of_fields(fields, Path(source))
    for change in changes:
        _check_effect(change, after, source, tuple(read))
    return after


def _check_effect(change: Change, after: Cluster, source: str, read: tuple[str, ...]) -> None:
    """Refuse a change that has no effect on predictions."""
    field = ".".join(change.path[1:])
    inside = any(_is_part(field, name) for name in read if name != "device")
    around = field != "device" and any(_is_part(name, field) for name in read)
    if change.path[-1] in _TEXTS or not (inside or around):
        raise ClusterError(
            f"{change.text!r}: nothing here depends on {field!r}, but on {', '.join(read)}"
        )
    if field in ("rails", "hosts_per_switch") and after.oversubscription == 1:
        raise ClusterError(
            f"{change.text!r}: between the leaf switches of {source} there is as much bandwidth as "
            f"within, so {field} would change nothing; also say how much less there is, e.g. "
            "cluster.oversubscription=2"
        )


def _is_part(field: str, section: str) -> bool:
    """Return whether a field is a section, or in it."""
    return field == section or field.startswith(f"{section}.")
