"""Clusters: devices, links and how many of each, read from YAML files.

The shipped files are in `simulator/hardware/clusters` and `simulator/hardware/devices`; a user's
own file works the same way. Clusters with several kinds of hosts are in
`simulator.hardware.heterogeneous`.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from simulator.files import brief
from simulator.hardware.collective_profile import PROFILES as COLLECTIVES
from simulator.hardware.collective_profile import CollectiveProfile, MeasuredLink, SizeCurve
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

_CLUSTERS = Path(__file__).parent / "clusters"
_HETEROGENEOUS = _CLUSTERS / "heterogeneous"
_DEVICES = Path(__file__).parent / "devices"

_MEASURED_FIELDS = {
    "collective_launch_us": ("collective_launch_us", "launch_us"),
    "latency_us": ("intra_host.latency_us", "hop_us"),
    "half_size_mb": ("intra_host.half_size_mb", "half_size_mb"),
}
"""Fields that measured collectives determine: by field of `MeasuredLink`, that of a cluster and
that of a curve."""


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


class Link(Description):
    """A link between two devices of a host, or between two NICs of different hosts.

    Attributes:
        bandwidth_gb_per_s: bandwidth from one sender to one receiver, for long messages in one
            direction.
        latency_us: latency of one hop of an empty message.
        half_size_mb: message size at which half of the bandwidth is reached
            (`simulator.costs.collective_model`).
        contention_factor: how many times longer computation and a collective over this link take
            while a device does both: 1 without contention, 2 where overlap gains nothing.
    """

    bandwidth_gb_per_s: PositiveFloat
    latency_us: NonNegativeFloat
    half_size_mb: NonNegativeFloat = 0.0
    contention_factor: float = Field(default=1.0, ge=1, le=2)


class Processes(Description):
    """Costs of hosts that are processes of one machine and share its cores.

    `simulator.engine.shared_cpu` reads them.

    Attributes:
        step_us: overhead of a host per step: messages from and to the driver.
        task_us: overhead of a host per task.
        concurrent_instructions: instructions that the machine executes at full speed in parallel; 1
            where each keeps all cores busy.
    """

    step_us: NonNegativeFloat = 0.0
    task_us: NonNegativeFloat = 0.0
    concurrent_instructions: float = Field(default=1.0, ge=1)


class Provenance(Description):
    """The origin of a measured description: date, hardware, software, and errors of the fit.

    Attributes:
        date: date of the measurements.
        device_kind: kind of the devices, as JAX names it.
        devices: number of devices.
        driver: version of the driver of the devices, where there is one.
        jax: version of JAX.
        jaxlib: version of jaxlib.
        seconds: duration of the measurements.
        rows: number of measurements by what was measured, including those held out of the fit.
        fitted_error: mean absolute relative error on the fitted rows, by what was measured.
        held_out_error: mean absolute relative error on the rows held out of the fit.
    """

    date: str
    device_kind: str
    devices: PositiveInt
    driver: str | None = None
    jax: str
    jaxlib: str
    seconds: NonNegativeFloat
    rows: dict[str, PositiveInt]
    fitted_error: dict[str, NonNegativeFloat] = Field(default_factory=dict)
    held_out_error: dict[str, NonNegativeFloat] = Field(default_factory=dict)


class Cluster(Description):
    """Hosts with the same number of the same devices, and the network between them.

    Devices are numbered host by host: host 0 has devices 0 ... `devices_per_host` - 1.

    Attributes:
        name: name of the cluster; that of its file, if it is shipped.
        description: one line about the cluster.
        source: where the numbers come from.
        device: the kind of all devices; in a file, its fields, the name of a shipped device, or the
            path of a file.
        hosts: number of hosts; a host is what one fast link connects.
        devices_per_host: devices of a host.
        nics_per_host: NICs of a host. Devices share them evenly, or have several each.
        hosts_per_switch: hosts whose NICs are on the same leaf switch; all of them by default.
        oversubscription: factor by which messages between leaf switches get less bandwidth,
            whatever else is sent.
        rails: whether the first NICs of these hosts are on a leaf switch of their own, the second
            ones on another, and so on; by default all NICs of a host are on the same one.
        bridges_per_host: ports, such as PCIe root ports, over which the devices of a host are
            spread evenly: messages to devices at other ports share the one link of each port
            (`intra_host`). By default each device has its own link.
        collective_launch_us: launch of a collective.
        intra_host: the link between two devices of a host.
        collectives: measured collectives within a host; in a file, the curves, the name of a
            profile in `simulator/hardware/profiles/collectives`, or the path of another. They scale
            with the bandwidth of `intra_host`. Its other numbers are those of the link over which
            they were measured, and may be left out. By default `intra_host` implies all curves.
        inter_host: the link between two NICs of different hosts; None for a single host.
        processes: costs of hosts that are processes of one machine; by default each has its own
            machine.
        host_launch_us: time in which a host starts a program on its devices: that of a jitted call.
        provenance: origin of a description that `autopar calibrate` wrote.
    """

    name: str
    description: str
    source: str
    device: Device
    hosts: PositiveInt
    devices_per_host: PositiveInt
    nics_per_host: PositiveInt = 1
    hosts_per_switch: PositiveInt | None = None
    oversubscription: float = Field(default=1.0, ge=1, allow_inf_nan=False)
    rails: bool = False
    bridges_per_host: PositiveInt | None = None
    collective_launch_us: NonNegativeFloat
    intra_host: Link
    collectives: CollectiveProfile | None = None
    inter_host: Link | None = None
    processes: Processes | None = None
    host_launch_us: NonNegativeFloat = 0.0
    provenance: Provenance | None = None

    @model_validator(mode="after")
    def _hosts_are_linked(self) -> Self:
        if self.hosts > 1 and self.inter_host is None:
            raise ValueError(
                f"inter_host: missing, but there are {self.hosts} hosts; describe the link between "
                "them"
            )
        return self

    @model_validator(mode="after")
    def _oversubscription_has_leaf_switches(self) -> Self:
        if self.oversubscription > 1 and self.hosts_per_switch is None and not self.rails:
            raise ValueError(
                f"oversubscription: given {self.oversubscription:g}, but all NICs are on one "
                "switch, which no message leaves; say how many hosts are on each "
                "(hosts_per_switch), or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _bridges_have_devices(self) -> Self:
        if self.bridges_per_host is not None and self.devices_per_host % self.bridges_per_host:
            raise ValueError(
                f"bridges_per_host: given {self.bridges_per_host}, expected a divisor of "
                f"devices_per_host, which is {self.devices_per_host}: devices are spread evenly "
                "over them"
            )
        return self

    @model_validator(mode="after")
    def _link_is_that_of_the_collectives(self) -> Self:
        """Refuse numbers of the link that measured collectives would override."""
        if self.collectives is None:
            return self
        for name, (field, curve_field) in _MEASURED_FIELDS.items():
            given = getattr(self.link, name)
            measured = getattr(self.collectives.link, name)
            if given != measured:
                raise ValueError(
                    f"{field}: given {given:g}, but the collectives that are measured "
                    f"({self.collectives.gpu}) take its place, and are of a link with "
                    f"{measured:g}; expected {measured:g}, or nothing. They follow "
                    "intra_host.bandwidth_gb_per_s alone; change their curves "
                    f"(collectives.all_reduce.{curve_field}, ...), or take what the link implies "
                    "instead of them (collectives: null)"
                )
        return self

    @property
    def num_devices(self) -> int:
        """Devices of all hosts."""
        return self.hosts * self.devices_per_host

    @cached_property
    def link(self) -> MeasuredLink:
        """The link of collectives within a host."""
        link = self.intra_host
        return MeasuredLink(
            collective_launch_us=self.collective_launch_us,
            bandwidth_gb_per_s=link.bandwidth_gb_per_s,
            latency_us=link.latency_us,
            half_size_mb=link.half_size_mb,
        )

    @cached_property
    def curves(self) -> CollectiveProfile:
        """Curves of collectives within a host.

        They are those of `collectives` at the bandwidth of `intra_host`, which implies the curve of
        messages if they lack one, and all curves without `collectives`.
        """
        link = self.link
        measured = None if self.collectives is None else self.collectives.over(link)
        if measured is not None and measured.collective_permute is not None:
            return measured
        implied = SizeCurve(
            launch_us=link.collective_launch_us,
            hop_us=link.latency_us,
            half_size_mb=link.half_size_mb,
            bandwidth_gb_per_s=link.bandwidth_gb_per_s,
        )
        if measured is None:
            return CollectiveProfile(
                gpu=self.device.name, source=self.source, link=link, all_reduce=implied
            )
        return measured.model_copy(update={"collective_permute": implied})

    @property
    def pools(self) -> "tuple[Cluster, ...]":
        """The cluster itself, as the one pool of its hosts.

        `HeterogeneousCluster` has several pools.
        """
        return (self,)

    @property
    def pool_starts(self) -> tuple[int, ...]:
        """The number of the first device of the one pool, 0."""
        return (0,)

    def pool_of(self, devices: Sequence[int]) -> int:
        """Return the number of the one pool, 0.

        Raises:
            ClusterError: a device is not in the cluster.
        """
        for device_id in (min(devices), max(devices)):
            self.host_of(device_id)
        return 0

    def host_of(self, device_id: int) -> int:
        """Return the number of the host of a device.

        Raises:
            ClusterError: the device is not in the cluster.
        """
        if not 0 <= device_id < self.num_devices:
            raise ClusterError(
                f"device {device_id} is not in cluster {self.name!r}: it has {self.num_devices} "
                "devices"
            )
        return device_id // self.devices_per_host

    def nic_of(self, device_id: int) -> int:
        """Return the number of the (first) NIC of a device, counted over the whole cluster."""
        host = self.host_of(device_id)
        local = device_id % self.devices_per_host
        return host * self.nics_per_host + local * self.nics_per_host // self.devices_per_host

    def leaf_of(self, device_id: int) -> tuple[int, int]:
        """Return the leaf switch of the (first) NIC of a device: its pod, and its rail.

        The rail is 0 in a cluster without rails.
        """
        nic = self.nic_of(device_id)
        pod = self.pod_of(self.host_of(device_id))
        return pod, nic % self.nics_per_host if self.rails else 0

    def pod_of(self, host: int) -> int:
        """Return the number of the pod of a host.

        A pod is the hosts on one leaf switch, or on one leaf switch of each rail.
        """
        return 0 if self.hosts_per_switch is None else host // self.hosts_per_switch

    def bridge_of(self, device_id: int) -> int:
        """Return the number of the port of a device, counted over the whole cluster.

        It is the number of the device where each device has its own link.
        """
        if self.bridges_per_host is None:
            return device_id
        host = self.host_of(device_id)
        local = device_id % self.devices_per_host
        return host * self.bridges_per_host + local * self.bridges_per_host // self.devices_per_host

    @property
    def nics_per_device(self) -> float:
        """NICs of each device, which spreads its messages evenly; 1 where devices share NICs."""
        return max(1.0, self.nics_per_host / self.devices_per_host)

    @classmethod
    def load(cls, name_or_path: str | Path) -> Self:
        """Return the cluster of a shipped file (by its name) or of a YAML file (by its path).

        Raises:
            ClusterError: there is no such file, its fields are wrong, or it has pools.
        """
        path = cluster_path(name_or_path)
        data = read(path)
        if "pools" in data:
            raise ClusterError(
                f"{path}: has pools, so its hosts are not all alike, as is needed here; "
                "simulator.load_cluster reads it, and the pipelines of autopar run on it"
            )
        return cls.of_fields(data, path)

    @classmethod
    def of_fields(cls, fields: Mapping[str, Any], path: Path, place: str = "") -> Self:
        """Return the cluster with the fields of a file.

        Args:
            fields: the fields, with names or paths of profiles and devices.
            path: the file; paths in it are relative to its folder.
            place: the section of the file that has the fields, for errors.

        Raises:
            ClusterError: fields are missing, unknown or wrong.
        """
        fields = _with_link(
            {
                **fields,
                "collectives": resolve_reference(
                    fields.get("collectives"), COLLECTIVES, path, "collectives"
                ),
            }
        )
        match fields.get("device"):
            case str(name):
                fields["device"] = load_device(name, path)
            case Mapping() as device:
                fields["device"] = _with_kernels(device, path)
        return validate(cls, fields, f"{path}{place}")

    def with_size(self, hosts: int | None = None, devices_per_host: int | None = None) -> "Cluster":
        """Return the cluster with another number of hosts, or with fewer devices in each.

        Raises:
            ClusterError: hosts have fewer devices, or these would be spread unevenly over bridges.
        """
        hosts = self.hosts if hosts is None else hosts
        local = self.devices_per_host if devices_per_host is None else devices_per_host
        if local > self.devices_per_host:
            raise ClusterError(
                f"{self.name!r} has {self.devices_per_host} devices per host, not {local}"
            )
        nics = max(1, self.nics_per_host * local // self.devices_per_host)
        fields = self.fields() | {"hosts": hosts, "devices_per_host": local, "nics_per_host": nics}
        if self.bridges_per_host is not None:
            # the first devices are at the first ports
            per_bridge = self.devices_per_host // self.bridges_per_host
            if local > per_bridge and local % per_bridge:
                raise ClusterError(
                    f"{self.name!r} has {per_bridge} devices at each of its "
                    f"{self.bridges_per_host} bridges_per_host; {local} devices per host would be "
                    "spread unevenly"
                )
            fields["bridges_per_host"] = max(1, local // per_bridge)
        return validate(Cluster, fields, self.name)

    def first_devices(self, count: int) -> "Cluster":
        """Return the cluster of the first `count` devices: a part of one host, or complete hosts.

        Raises:
            ClusterError: there are fewer devices, or they would be complete hosts and a part of
                one.
        """
        if not 1 <= count <= self.num_devices:
            raise ClusterError(
                f"{count} devices asked of {self.name!r}, which has {self.num_devices}"
            )
        if count <= self.devices_per_host:
            return self.with_size(1, count)
        if count % self.devices_per_host:
            raise ClusterError(
                f"{count} devices are not whole hosts of {self.devices_per_host}, as {self.name!r} "
                "has them"
            )
        return self.with_size(count // self.devices_per_host)


def cluster_names() -> tuple[str, ...]:
    """Return the names of the shipped clusters of equal hosts."""
    return tuple(sorted(path.stem for path in _CLUSTERS.glob("*.yaml")))


def heterogeneous_cluster_names() -> tuple[str, ...]:
    """Return the names of the shipped heterogeneous clusters."""
    return tuple(sorted(path.stem for path in _HETEROGENEOUS.glob("*.yaml")))


def cluster_path(name_or_path: str | Path, beside: Path | None = None) -> Path:
    """Return the file of a cluster.

    Args:
        name_or_path: the name of a shipped cluster, or the path of a YAML file.
        beside: a file to whose folder the path is relative; the working folder by default.

    Raises:
        ClusterError: it is neither a shipped cluster nor a path of a YAML file.
    """
    for names, folder in (
        (cluster_names(), _CLUSTERS),
        (heterogeneous_cluster_names(), _HETEROGENEOUS),
    ):
        if str(name_or_path) in names:
            return folder / f"{name_or_path}.yaml"
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml"):
        raise ClusterError(
            f"unknown cluster {brief(str(name_or_path))}; expected one of "
            f"{', '.join(cluster_names() + heterogeneous_cluster_names())}, or a path to a .yaml "
            "file"
        )
    return path if beside is None else beside.parent / path


def cluster_files(name_or_path: str | Path) -> tuple[Path, ...]:
    """Return the files that describe a cluster of equal hosts: its own, and that of its device.

    Args:
        name_or_path: a shipped cluster or the path of another. A cluster that describes its device
            itself has one file.

    Raises:
        ClusterError: there is no such cluster, or its file can't be read.
    """
    path = cluster_path(name_or_path)
    device = read(path).get("device")
    return (path, _device_path(device, path)) if isinstance(device, str) else (path,)


def device_names() -> tuple[str, ...]:
    """Return the names of the shipped devices."""
    return tuple(sorted(path.stem for path in _DEVICES.glob("*.yaml")))


def shipped_device(name: str) -> Device:
    """Return the shipped device of a name; a `ClusterError` lists them if there is none."""
    return load_device(name, _DEVICES)


def _device_path(name: str, cluster_path: Path) -> Path:
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
    path = _device_path(name, cluster_path)
    if path.suffix not in (".yaml", ".yml"):
        raise ClusterError(
            f"{cluster_path}: device: unknown device {brief(name)}; expected one of "
            f"{', '.join(device_names())}, a path to a .yaml file, or the fields themselves"
        )
    return validate(Device, _with_kernels(read(path), path), path)


def _with_link(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a cluster, with defaults of its link from its measured collectives."""
    collectives = fields["collectives"]
    intra = fields.get("intra_host", {})
    link = collectives.get("link") if isinstance(collectives, Mapping) else None
    if not isinstance(link, Mapping) or not isinstance(intra, Mapping):
        return fields
    launch = {name: value for name, value in link.items() if name == "collective_launch_us"}
    defaults = {name: value for name, value in link.items() if name not in launch}
    return {**launch, **fields, "intra_host": {**defaults, **intra}}


def _with_kernels(fields: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
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
