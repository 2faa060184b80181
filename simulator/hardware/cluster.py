"""Clusters: devices, links and how many of each, read from YAML files.

The shipped files are in `simulator/hardware/clusters`; a user's own file works the same way.
Clusters with several kinds of hosts are in `simulator.hardware.heterogeneous`.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from simulator.hardware.cluster_paths import cluster_path
from simulator.hardware.collective_profile import PROFILES as COLLECTIVES
from simulator.hardware.collective_profile import CollectiveProfile, MeasuredLink, SizeCurve
from simulator.hardware.description import (
    ClusterError,
    Description,
    read,
    resolve_reference,
    validate,
)
from simulator.hardware.device import Device, load_device, with_kernels

_MEASURED_FIELDS = {
    "collective_launch_us": ("collective_launch_us", "launch_us"),
    "latency_us": ("intra_host.latency_us", "hop_us"),
    "half_size_mb": ("intra_host.half_size_mb", "half_size_mb"),
}
"""Fields that measured collectives determine.

Maps each field of `MeasuredLink` to the field of a cluster and to the field of a curve.
"""


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
                    f"{field}: given {given:g}, but `collectives` were measured on a link with "
                    f"{measured:g} ({self.collectives.gpu}); expected {measured:g}, or leave the "
                    "field out. Measured collectives scale with intra_host.bandwidth_gb_per_s "
                    f"alone; change their curves (collectives.all_reduce.{curve_field}, ...), or "
                    "use `collectives: null` to compute collectives from the link"
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
                fields["device"] = with_kernels(device, path)
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
                f"{self.name!r} has {self.devices_per_host} devices per host, not {local}; use as"
                " many or fewer, or a cluster with larger hosts"
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
