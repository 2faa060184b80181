"""Clusters: devices, links and how many of each, read from YAML files.

The shipped files are in `simulator/hardware/clusters` and `simulator/hardware/devices`; a user's own file works the same way. Clusters whose hosts
are not all alike are in `simulator.hardware.heterogeneous`.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from simulator.files import brief
from simulator.hardware.collective_profile import PROFILES as COLLECTIVES
from simulator.hardware.collective_profile import CollectiveProfile, MeasuredLink, SizeCurve
from simulator.hardware.description import ClusterError, Description, named, read, validate
from simulator.hardware.dtypes import check_dtypes
from simulator.hardware.kernel_profile import PROFILES as KERNELS
from simulator.hardware.kernel_profile import KernelProfile

_CLUSTERS = Path(__file__).parent / "clusters"
_HETEROGENEOUS = _CLUSTERS / "heterogeneous"
_DEVICES = Path(__file__).parent / "devices"

_MEASURED = {
    "collective_launch_us": ("collective_launch_us", "launch_us"),
    "latency_us": ("intra_host.latency_us", "hop_us"),
    "half_size_mb": ("intra_host.half_size_mb", "half_size_mb"),
}
"""What measured collectives take the place of: by the name in `MeasuredLink`, the field of a cluster and that of a curve."""


class Device(Description):
    """One accelerator: how much it holds and how fast it is.

    Attributes:
        memory_gb: size of its memory, 10^9 bytes.
        reserve_gb: the part of it that no step gets: driver context, library workspaces, communication buffers.
        cores: streaming multiprocessors of a GPU, cores of a CPU.
        peak_tflop_per_s: peak of matrix products by HLO dtype ("f32", "bf16", ...).
        vector_tflop_per_s: peak of elementwise arithmetic in f32.
        kernel_launch_us: from the end of a kernel to the start of the next one of the same executable.
        kernels: how close to these peaks kernels come; in a file, a few numbers the name of a measured profile in
            `simulator/hardware/profiles/kernels`, or the path of another.
        xla_target: XLA's GpuTargetConfig, to compile for this device where there is none; None for a CPU.
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
    kernel_launch_us: NonNegativeFloat
    kernels: KernelProfile
    xla_target: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _types_are_known(self) -> Self:
        check_dtypes(self.peak_tflop_per_s, "peak_tflop_per_s")
        return self

    @model_validator(mode="after")
    def _something_is_left(self) -> Self:
        if self.reserve_gb >= self.memory_gb:
            raise ValueError(
                f"reserve_gb: given {self.reserve_gb}, expected less than memory_gb, which is {self.memory_gb}"
            )
        return self

    @property
    def memory_bytes(self) -> int:
        """Size of the memory in bytes."""
        return round(self.memory_gb * 1e9)

    @property
    def usable_bytes(self) -> int:
        """Bytes that a step may use."""
        return round((self.memory_gb - self.reserve_gb) * 1e9)

    def xla_target_config(self) -> str:
        """`xla_target` as the text proto that XLA's deviceless compilation takes. A device without one: `ClusterError`."""
        if self.xla_target is None:
            raise ClusterError(
                f"device {self.name!r} has no xla_target: XLA can't compile for it without the device"
            )
        return _text_proto(self.xla_target)


class Link(Description):
    """What connects devices (within a host) or network cards (between hosts).

    Attributes:
        bandwidth_gb_per_s: bytes that one sender gets to one receiver per second, large messages, one direction.
        latency_us: time of one hop of an empty message.
        half_size_mb: message at which half of the bandwidth is reached (`simulator.costs.collective_model`).
        contention_factor: how many times longer computation and a collective over this link take while a device does both: 1 where they don't
            disturb each other, 2 where one after the other is as fast.
    """

    bandwidth_gb_per_s: PositiveFloat
    latency_us: NonNegativeFloat
    half_size_mb: NonNegativeFloat = 0.0
    contention_factor: float = Field(default=1.0, ge=1, le=2)


class Processes(Description):
    """Hosts that are processes of one machine and share its cores (`simulator.engine.shared_cpu`).

    Attributes:
        step_us: what a step costs a host beside its instructions: being told of it, and telling that it is done.
        task_us: what a task costs a host beside what it takes by itself.
        concurrent_instructions: how many instructions the machine carries out at full speed at the same time; 1 where each keeps all cores busy.
    """

    step_us: NonNegativeFloat = 0.0
    task_us: NonNegativeFloat = 0.0
    concurrent_instructions: float = Field(default=1.0, ge=1)


class Provenance(Description):
    """How a description was measured: when, on what, and how well it fits. Rows and errors are by what was measured.

    Attributes:
        driver: version of the driver of the devices, where there is one.
        seconds: that measuring took.
        rows: how many measurements there are, those held out of the fit included.
        fitted_error, held_out_error: mean absolute relative error on the rows that were fitted to, and on the others.
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
        source: where the numbers come from.
        nics_per_host: network cards of a host; its devices are spread evenly over them, or they over the devices.
        collective_launch_us: what a collective costs beside its hops and bytes.
        hosts_per_switch: hosts whose network cards are on the same leaf switch; None: all of them.
        oversubscription: how many times less bandwidth what leaves a leaf switch gets, whoever else sends.
        rails: whether the first network cards of these hosts are on a leaf switch of their own, the second ones on another, and so on; else
            all cards of a host are on the same one.
        bridges_per_host: ports, such as PCIe root ports, over which the devices of a host are spread evenly: devices at different ports
            share the one link of each port (`intra_host`). None: each device has its own.
        intra_host: the link between two devices of a host.
        collectives: collectives within a host as measured; in a file, the curves, the name of a profile in
            `simulator/hardware/profiles/collectives`, or the path of another. They follow the bandwidth of `intra_host`, whose other numbers are
            those of the link that they were measured over, and may be left out. What `intra_host` implies if there are none.
        inter_host: the link between two network cards of different hosts; None for a single host.
        processes: what hosts cost that are processes of one machine; None: each has a machine of its own.
        host_launch_us: of a host, to start a program on its devices: what a jitted call takes.
        provenance: of a description that was measured as a whole, by `autopar calibrate`.
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
                f"inter_host: missing, but there are {self.hosts} hosts; describe the link between them"
            )
        return self

    @model_validator(mode="after")
    def _something_leaves_a_switch(self) -> Self:
        if self.oversubscription > 1 and self.hosts_per_switch is None and not self.rails:
            raise ValueError(
                f"oversubscription: given {self.oversubscription:g}, but all network cards are on one switch, which nothing leaves; "
                "say how many hosts are on each (hosts_per_switch), or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _bridges_have_devices(self) -> Self:
        if self.bridges_per_host is not None and self.devices_per_host % self.bridges_per_host:
            raise ValueError(
                f"bridges_per_host: given {self.bridges_per_host}, expected a divisor of devices_per_host, which is "
                f"{self.devices_per_host}: devices are spread evenly over them"
            )
        return self

    @model_validator(mode="after")
    def _collectives_are_of_this_link(self) -> Self:
        """Refuse numbers of the link that would do nothing, as those of `collectives` take their place."""
        if self.collectives is None:
            return self
        for name, (field, curve_field) in _MEASURED.items():
            given, measured = getattr(self.link, name), getattr(self.collectives.link, name)
            if given != measured:
                raise ValueError(
                    f"{field}: given {given:g}, but the collectives that are measured ({self.collectives.gpu}) take its place, and are of a "
                    f"link with {measured:g}; expected {measured:g}, or nothing. They follow intra_host.bandwidth_gb_per_s alone; change "
                    f"their curves (collectives.all_reduce.{curve_field}, ...), or take what the link implies instead of them "
                    "(collectives: null)"
                )
        return self

    @property
    def num_devices(self) -> int:
        return self.hosts * self.devices_per_host

    @cached_property
    def link(self) -> MeasuredLink:
        """What collectives within a host go over."""
        link = self.intra_host
        return MeasuredLink(
            collective_launch_us=self.collective_launch_us,
            bandwidth_gb_per_s=link.bandwidth_gb_per_s,
            latency_us=link.latency_us,
            half_size_mb=link.half_size_mb,
        )

    @cached_property
    def curves(self) -> CollectiveProfile:
        """Collectives within a host: `collectives` at the bandwidth of `intra_host`, with what wasn't measured as that implies."""
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
        """The cluster itself: its hosts are one pool (`HeterogeneousCluster` has several)."""
        return (self,)

    @property
    def pool_starts(self) -> tuple[int, ...]:
        """The number of the first device of each pool, which is 0."""
        return (0,)

    def pool_of(self, devices: Sequence[int]) -> int:
        """The number of the pool that devices are in, which is 0."""
        for device_id in (min(devices), max(devices)):
            self.host_of(device_id)
        return 0

    def host_of(self, device_id: int) -> int:
        """The host that device `device_id` sits in."""
        if not 0 <= device_id < self.num_devices:
            raise ClusterError(
                f"device {device_id} is not in cluster {self.name!r}: it has {self.num_devices} devices"
            )
        return device_id // self.devices_per_host

    def nic_of(self, device_id: int) -> int:
        """The (first) network card that device `device_id` talks to other hosts through, counted over the whole cluster."""
        host, local = self.host_of(device_id), device_id % self.devices_per_host
        return host * self.nics_per_host + local * self.nics_per_host // self.devices_per_host

    def leaf_of(self, device_id: int) -> tuple[int, int]:
        """The leaf switch that the (first) network card of a device is on: which hosts, and which rail; rail 0 if there are none."""
        nic, pod = self.nic_of(device_id), self.pod_of(self.host_of(device_id))
        return pod, nic % self.nics_per_host if self.rails else 0

    def pod_of(self, host: int) -> int:
        """The hosts of a leaf switch (of one per rail) that a host is among."""
        return 0 if self.hosts_per_switch is None else host // self.hosts_per_switch

    def bridge_of(self, device_id: int) -> int:
        """The port of its host that a device is at, counted over the whole cluster; its own number where each has a link of its own."""
        if self.bridges_per_host is None:
            return device_id
        host, local = self.host_of(device_id), device_id % self.devices_per_host
        return host * self.bridges_per_host + local * self.bridges_per_host // self.devices_per_host

    @property
    def nics_per_device(self) -> float:
        """Network cards that a device has for itself, each message in equal parts over them; 1 where devices share cards."""
        return max(1.0, self.nics_per_host / self.devices_per_host)

    @classmethod
    def load(cls, name_or_path: str | Path) -> Self:
        """The cluster of a shipped file (by its name) or of a YAML file (by its path)."""
        path = cluster_path(name_or_path)
        data = read(path)
        if "pools" in data:
            raise ClusterError(
                f"{path}: has pools, so its hosts are not all alike, as is needed here; simulator.load_cluster reads it, and the "
                "pipelines of autopar run on it"
            )
        return cls.of_fields(data, path)

    @classmethod
    def of_fields(cls, fields: Mapping[str, Any], path: Path, place: str = "") -> Self:
        """The cluster with the fields of a file; `place` says where in the file they are, for errors."""
        fields = _with_link(
            {
                **fields,
                "collectives": named(fields.get("collectives"), COLLECTIVES, path, "collectives"),
            }
        )
        match fields.get("device"):
            case str(name):
                fields["device"] = load_device(name, path)
            case Mapping() as device:
                fields["device"] = _with_kernels(device, path)
        return validate(cls, fields, f"{path}{place}")

    def with_size(self, hosts: int | None = None, devices_per_host: int | None = None) -> "Cluster":
        """The same cluster with another number of hosts, or with fewer devices in each."""
        hosts = self.hosts if hosts is None else hosts
        local = self.devices_per_host if devices_per_host is None else devices_per_host
        if local > self.devices_per_host:
            raise ClusterError(
                f"{self.name!r} has {self.devices_per_host} devices per host, not {local}"
            )
        nics = max(1, self.nics_per_host * local // self.devices_per_host)
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        fields |= {"hosts": hosts, "devices_per_host": local, "nics_per_host": nics}
        if self.bridges_per_host is not None:  # the first devices are at the first ports
            at_each = self.devices_per_host // self.bridges_per_host
            if local > at_each and local % at_each:
                raise ClusterError(
                    f"{self.name!r} has {at_each} devices at each of its {self.bridges_per_host} bridges_per_host; {local} devices per host "
                    "would be spread unevenly"
                )
            fields["bridges_per_host"] = max(1, local // at_each)
        return validate(Cluster, fields, self.name)

    def first_devices(self, count: int) -> "Cluster":
        """The cluster of the first `count` devices: part of one host, or whole hosts."""
        if not 1 <= count <= self.num_devices:
            raise ClusterError(
                f"{count} devices asked of {self.name!r}, which has {self.num_devices}"
            )
        if count <= self.devices_per_host:
            return self.with_size(1, count)
        if count % self.devices_per_host:
            raise ClusterError(
                f"{count} devices are not whole hosts of {self.devices_per_host}, as {self.name!r} has them"
            )
        return self.with_size(count // self.devices_per_host)


def cluster_names() -> tuple[str, ...]:
    """Names of the clusters of equal hosts that come with the package."""
    return tuple(sorted(path.stem for path in _CLUSTERS.glob("*.yaml")))


def heterogeneous_cluster_names() -> tuple[str, ...]:
    """Names of the clusters of unequal hosts that come with the package."""
    return tuple(sorted(path.stem for path in _HETEROGENEOUS.glob("*.yaml")))


def cluster_path(name_or_path: str | Path, beside: Path | None = None) -> Path:
    """The file of a shipped cluster, or a path to another; relative to the folder of the file `beside` where one is given."""
    for names, folder in (
        (cluster_names(), _CLUSTERS),
        (heterogeneous_cluster_names(), _HETEROGENEOUS),
    ):
        if str(name_or_path) in names:
            return folder / f"{name_or_path}.yaml"
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml"):
        raise ClusterError(
            f"unknown cluster {brief(str(name_or_path))}; expected one of {', '.join(cluster_names() + heterogeneous_cluster_names())}, "
            "or a path to a .yaml file"
        )
    return path if beside is None else beside.parent / path


def cluster_files(name_or_path: str | Path) -> tuple[Path, ...]:
    """Return the files that describe a cluster of equal hosts: its own, and that of its device.

    Args:
        name_or_path: a shipped cluster or the path of another. A cluster that describes its device itself has one file.

    Raises:
        ClusterError: there is no such cluster, or its file can't be read.
    """
    path = cluster_path(name_or_path)
    device = read(path).get("device")
    return (path, _device_path(device, path)) if isinstance(device, str) else (path,)


def device_names() -> tuple[str, ...]:
    """Names of the devices that come with the package."""
    return tuple(sorted(path.stem for path in _DEVICES.glob("*.yaml")))


def shipped_device(name: str) -> Device:
    """The device of a shipped file, by its name."""
    return load_device(name, _DEVICES)


def _device_path(name: str, cluster_path: Path) -> Path:
    """Return the file of a shipped device, or of one in a file beside its cluster's."""
    return _DEVICES / f"{name}.yaml" if name in device_names() else cluster_path.parent / name


def load_device(name: str, cluster_path: Path) -> Device:
    """The shipped device of that name, or that of a file beside the cluster's."""
    path = _device_path(name, cluster_path)
    if path.suffix not in (".yaml", ".yml"):
        raise ClusterError(
            f"{cluster_path}: device: unknown device {brief(name)}; expected one of {', '.join(device_names())}, "
            "a path to a .yaml file, or the fields themselves"
        )
    return validate(Device, _with_kernels(read(path), path), path)


def _with_link(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a cluster, whose link within hosts is that of its measured collectives where the file does not say."""
    collectives, intra = fields["collectives"], fields.get("intra_host", {})
    link = collectives.get("link") if isinstance(collectives, Mapping) else None
    if not isinstance(link, Mapping) or not isinstance(intra, Mapping):
        return fields
    of_link = {name: value for name, value in link.items() if name != "collective_launch_us"}
    launch = {name: value for name, value in link.items() if name == "collective_launch_us"}
    return {**launch, **fields, "intra_host": {**of_link, **intra}}


def _with_kernels(fields: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """The fields of a device with its profile of kernels, where the file has its name."""
    return (
        {**fields, "kernels": named(fields["kernels"], KERNELS, path, "kernels")}
        if "kernels" in fields
        else fields
    )


_ENUM_FIELDS = {"feature_extension"}  # their values are names, not texts


def _text_proto(message: Mapping[str, Any], indent: str = "") -> str:
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
