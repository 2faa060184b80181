"""Devices: memory, peaks and measured kernels of a kind of accelerator, read from YAML files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from simulator.files import brief
from simulator.hardware.description import (
    ClusterError,
    Description,
    read,
    resolve_reference,
    validate,
)
from simulator.hardware.dtypes import check_dtypes
from simulator.hardware.kernel_profile import PROFILES as KERNELS
from simulator.hardware.kernel_profile import KernelProfile

_DEVICES = Path(__file__).parent / "devices"


_STATIC_POWER = 0.2
"""Part of a board's power that does not depend on the clock: leakage, memory, links."""


class Device(Description):
    """A kind of accelerator: its memory and its peaks.

    Attributes:
        name: name of the device; that of its file, if it is shipped.
        kind: `gpu` or `cpu`.
        source: where the numbers come from.
        memory_gb: size of the memory, in units of 10^9 bytes.
        reserve_gb: memory that no step may use: driver context, library workspaces, communication
            buffers.
        cores: streaming multiprocessors of a GPU, cores of a CPU.
        peak_tflop_per_s: peak of matrix products by HLO dtype ("f32", "bf16", ...). Products of
            other types run at `vector_tflop_per_s`.
        vector_tflop_per_s: peak of elementwise arithmetic in f32.
        memory_bandwidth_gb_per_s: bandwidth of the memory.
        host_bandwidth_gb_per_s: bandwidth between the memories of a device and of its host, in one
            direction; by default that of PCIe 3.0.
        kernel_launch_us: gap between a kernel and the next one of the same executable.
        power_limit_w: limit of the board's power; by default that of its kernel profile. Products
            on a GPU that throttles run at a clock that falls with it.
        kernels: how close to these peaks kernels come; in a file, a few numbers, the name of a
            measured profile in `simulator/hardware/profiles/kernels`, or the path of another.
        xla_target: XLA's GpuTargetConfig, with which programs compile for the device where there is
            none; None for a CPU.
    """

    name: str
    kind: Literal["gpu", "cpu"]
    source: str
    memory_gb: PositiveFloat
    reserve_gb: NonNegativeFloat = 0.0
    cores: PositiveInt
    peak_tflop_per_s: dict[str, PositiveFloat]
    vector_tflop_per_s: PositiveFloat
    memory_bandwidth_gb_per_s: PositiveFloat
    host_bandwidth_gb_per_s: PositiveFloat = 12.0
    kernel_launch_us: NonNegativeFloat
    power_limit_w: PositiveFloat | None = None
    kernels: KernelProfile
    xla_target: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _dtypes_are_names_of_hlo(self) -> Self:
        check_dtypes(self.peak_tflop_per_s, "peak_tflop_per_s")
        return self

    @model_validator(mode="after")
    def _reserve_is_less_than_memory(self) -> Self:
        if self.reserve_gb >= self.memory_gb:
            raise ValueError(
                f"reserve_gb: given {self.reserve_gb}, expected less than memory_gb, which is "
                f"{self.memory_gb}"
            )
        return self

    @model_validator(mode="after")
    def _power_limit_is_comparable(self) -> Self:
        if self.power_limit_w is None:
            return self
        full = self.kernels.power_limit_w
        if full is None:
            raise ValueError(
                f"power_limit_w: given {self.power_limit_w:g}, but the kernel profile has none to "
                "compare it with; expected kernels.power_limit_w, or no limit"
            )
        if not _STATIC_POWER * full < self.power_limit_w <= full:
            raise ValueError(
                f"power_limit_w: given {self.power_limit_w:g}, expected more than "
                f"{_STATIC_POWER * full:g} and at most {full:g}, the limit of the kernel profile"
            )
        return self

    @property
    def throttling(self) -> float:
        """Relative slowdown of a product once the device is hot, at its power limit.

        A board draws static power, which does not depend on the clock, and dynamic power, which
        grows with its third power, as the voltage grows with the clock.
        """
        full, limit = self.kernels.power_limit_w, self.power_limit_w
        if full is None or limit is None or limit == full:
            return self.kernels.throttling
        static = _STATIC_POWER * full
        clock = ((limit - static) / (full - static)) ** (1 / 3)
        return (1 + self.kernels.throttling) / clock - 1

    @property
    def memory_bytes(self) -> int:
        """Size of the memory in bytes."""
        return round(self.memory_gb * 1e9)

    @property
    def usable_bytes(self) -> int:
        """Bytes that a step may use."""
        return round((self.memory_gb - self.reserve_gb) * 1e9)

    @property
    def compute_capability(self) -> tuple[int, int] | None:
        """Major and minor number of a GPU's compute capability; None if `xla_target` lacks it."""
        info = (self.xla_target or {}).get("gpu_device_info", {})
        numbers = info.get("cuda_compute_capability")
        return numbers and (numbers.get("major", 0), numbers.get("minor", 0))

    def xla_target_config(self) -> str:
        """Return `xla_target` as the text proto that XLA's deviceless compilation takes.

        Raises:
            ClusterError: the device has no `xla_target`.
        """
        if self.xla_target is None:
            raise ClusterError(
                f"device {self.name!r} has no xla_target: XLA can't compile for it without the "
                "device"
            )
        return _text_proto(self.xla_target)


def device_names() -> tuple[str, ...]:
    """Return the names of the shipped devices."""
    return tuple(sorted(path.stem for path in _DEVICES.glob("*.yaml")))


def shipped_device(name: str) -> Device:
    """Return the shipped device of a name; a `ClusterError` lists them if there is none."""
    return load_device(name, _DEVICES)


def device_path(name: str, cluster_path: Path) -> Path:
    """Return the file of a shipped device, or of one in a file beside its cluster's."""
    return _DEVICES / f"{name}.yaml" if name in device_names() else cluster_path.parent / name


def load_device(name: str, cluster_path: Path) -> Device:
    """Return a device.

    Args:
        name: the name of a shipped device, or the path of a YAML file.
        cluster_path: the file that refers to the device; the path is relative to its folder.

    Raises:
        ClusterError: there is no such device, or its fields are wrong.
    """
    path = device_path(name, cluster_path)
    if path.suffix not in (".yaml", ".yml"):
        raise ClusterError(
            f"{cluster_path}: device: unknown device {brief(name)}; expected one of "
            f"{', '.join(device_names())}, a path to a .yaml file, or the fields themselves"
        )
    return validate(Device, with_kernels(read(path), path), path)


def with_kernels(fields: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """Return the fields of a device, with the fields of the kernel profile that they refer to."""
    if "kernels" not in fields:
        return fields
    return {**fields, "kernels": resolve_reference(fields["kernels"], KERNELS, path, "kernels")}


_ENUM_FIELDS = {"feature_extension"}
"""Fields whose values are names of an enumeration, which have no quotes."""


def _text_proto(message: Mapping[str, Any], indent: str = "") -> str:
    """Return a message as a text proto; a list is a repeated field."""
    lines = []
    for key, values in message.items():
        for value in values if isinstance(values, list) else [values]:
            match value:
                case dict():
                    lines.append(f"{indent}{key} {{\n{_text_proto(value, indent + '  ')}{indent}}}")
                case bool():
                    lines.append(f"{indent}{key}: {str(value).lower()}")
                case str() if key not in _ENUM_FIELDS:
                    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
                    lines.append(f'{indent}{key}: "{escaped}"')
                case float() if value.is_integer():
                    lines.append(f"{indent}{key}: {int(value)}")
                case _:
                    lines.append(f"{indent}{key}: {value}")
    return "\n".join(lines) + "\n" if lines else ""
