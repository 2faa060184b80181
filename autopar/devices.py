"""Devices as the user gives them: as a mesh to run on, and as a cluster for the cost model."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from autopar.checks import NONE, SHAPE, AllowedValues, checked, instance, integer, items, short_repr
from autopar.ir.host_memory import HOST_KIND
from autopar.ir.spec import AnyMesh, LogicalMesh
from autopar.plan import Plan
from autopar.plan_stages import Stage
from simulator.hardware.cluster import Cluster
from simulator.hardware.heterogeneous import AnyCluster

type Device = Any
"""A `jax.Device`, which pyright takes for a variable."""

type Devices = AnyMesh | int | Sequence[int] | Sequence[Device] | None
"""A mesh, a number of devices, a mesh shape such as (2, 4), a list of devices, or None for all.

An abstract mesh suffices to plan and to predict; only execution needs devices.
"""


def _distinct_devices(value: Any) -> tuple[Device, ...]:
    devices = items(instance("", jax.Device), "", least=1).take(value)
    if len(set(devices)) < len(devices):
        raise ValueError
    return devices


DEVICES = AllowedValues(
    "a jax.sharding.Mesh, a mesh shape such as (2, 4), a number or a list of devices, each once",
    (
        NONE
        | instance("", Mesh, AbstractMesh)
        | integer()
        | SHAPE
        | AllowedValues("", _distinct_devices)
    ).take,
)
"""The allowed values of a `Devices` option; other sequences become tuples."""

AXIS_NAMES = ("x", "y", "z", "w")
"""Default names of mesh axes."""

_CLUSTER_OF_KIND = {
    "V100": "p3.16xlarge",
    "A100": "dgx_a100_80",
    "H100": "dgx_h100",
    "H200": "dgx_h200",
    "A800": "a800_roce",
    "GB300": "gb300_nvl72",
    "B300": "dgx_b300",
    "GB200": "gb200_nvl72",
    "B200": "dgx_b200",
}


def logical_mesh(shape: Sequence[int]) -> LogicalMesh:
    """Return a mesh of `shape` with the default axis names.

    Raises:
        ValueError: the shape has no axes, or more than `AXIS_NAMES`.
    """
    if not 1 <= len(shape) <= len(AXIS_NAMES):
        raise ValueError(
            f"mesh shape {tuple(shape)} has {len(shape)} axes, expected 1 to {len(AXIS_NAMES)}"
        )
    return LogicalMesh(tuple(shape), AXIS_NAMES[: len(shape)])


def check_host_memory(devices: Iterable[Device]) -> None:
    """Check that devices can keep arrays in the memory of their host.

    Raises:
        ValueError: one of them can't.
    """
    for device in devices:
        kinds = [memory.kind for memory in device.addressable_memories()]
        if HOST_KIND not in kinds:
            raise ValueError(
                f"the plan keeps values in host memory, but {device} has no memory of kind"
                f" {HOST_KIND!r}, only {', '.join(map(repr, kinds))}; plan the step again with"
                ' offload="none"'
            )


def device_mesh(devices: Devices, shape: Sequence[int] | None = None) -> Mesh:
    """Return the mesh of this process's devices that `devices` stands for, with Auto axes.

    Args:
        devices: see `Devices`.
        shape: the shape that the mesh must have, e.g. that of a plan; any by default.

    Raises:
        ValueError: this process has too few devices, or `shape` needs another number of them.
    """
    if isinstance(devices, Mesh):
        if shape is not None and tuple(shape) != devices.axis_sizes:
            raise ValueError(
                f"the plan needs a mesh of shape {tuple(shape)},"
                f" got one of shape {devices.axis_sizes}"
            )
        names = devices.axis_names
        return Mesh(devices.devices, names, axis_types=(AxisType.Auto,) * len(names))
    chosen, own_shape = _choose(devices, prod(shape) if shape is not None else None)
    shape = own_shape if shape is None else tuple(shape)
    if prod(shape) != len(chosen):
        raise ValueError(f"a mesh of shape {shape} needs {prod(shape)} devices, got {len(chosen)}")
    names = logical_mesh(shape).axis_names
    return Mesh(np.array(chosen).reshape(shape), names, axis_types=(AxisType.Auto,) * len(shape))


def planned_mesh(devices: Devices) -> AnyMesh:
    """Return the mesh that `devices` stands for, as `device_mesh`; abstract ones stay abstract."""
    if isinstance(devices, AbstractMesh):
        auto = (AxisType.Auto,) * len(devices.axis_names)
        return AbstractMesh(devices.axis_sizes, devices.axis_names, axis_types=auto)
    return device_mesh(devices)


def _choose(devices: Devices, count: int | None) -> tuple[list[Device], tuple[int, ...]]:
    """Return the devices of this process, and the mesh shape, that `devices` stands for.

    Args:
        devices: see `Devices`; no concrete mesh.
        count: number of devices that None stands for; all by default.
    """
    if isinstance(devices, AbstractMesh):
        raise ValueError(
            f"{devices} has no devices to run on; give a jax.sharding.Mesh of its axes"
        )
    present = jax.devices()
    if devices is None:
        devices = len(present) if count is None else count
    given = checked("devices", devices, DEVICES)
    if isinstance(given, tuple) and not isinstance(given[0], int):
        return list(given), (len(given),)
    sizes = (given,) if isinstance(given, int) else given
    wanted = prod(sizes)
    if wanted > len(present):
        raise ValueError(
            f"a mesh of shape {sizes} needs {wanted} devices, but only {len(present)}"
            f" {present[0].platform} device(s) are here; for virtual ones set"
            f" XLA_FLAGS=--xla_force_host_platform_device_count={wanted} and JAX_PLATFORMS=cpu"
            " before starting Python"
        )
    return present[:wanted], sizes


def mesh_on_cluster(cluster: AnyCluster, devices: Devices) -> LogicalMesh:
    """Return the logical mesh that `devices` stands for, on the first devices of a cluster.

    Raises:
        ValueError: the cluster has fewer devices; or `devices` are devices of this process, and
            the cluster has more.
    """
    mesh = requested_mesh(devices, cluster.num_devices)
    available = cluster.num_devices
    are_of_process = isinstance(devices, Mesh) or (
        isinstance(devices, tuple) and isinstance(devices[0], jax.Device)
    )
    if mesh.num_devices > available or (are_of_process and mesh.num_devices != available):
        raise ValueError(
            f"devices is {short_repr(devices)}, {mesh.num_devices} of them, but cluster"
            f" {cluster.name!r} has {available}; give the shape of a mesh of its first devices,"
            f" such as ({available},)"
        )
    return mesh


def requested_mesh(devices: Devices, count: int) -> LogicalMesh:
    """Return the logical mesh that `devices` stands for; None stands for `count` devices."""
    match devices:
        case None:
            return logical_mesh((count,))
        case Mesh() | AbstractMesh():
            return LogicalMesh(devices.axis_sizes, devices.axis_names)
        case int():
            return logical_mesh((devices,))
        case [int(), *_]:
            return logical_mesh(devices)
        case _:
            return logical_mesh((len(devices),))


def devices_of_plan(devices: Devices, plan: Plan) -> list[Device]:
    """Return the devices of this process that a plan runs on, in the order of their numbers.

    Args:
        devices: see `Devices`; by default the first devices of this process.
        plan: the plan.

    Raises:
        ValueError: the plan needs more devices, or a mesh of another shape.
    """
    needed = max(device for stage in plan.stages for device in stage.devices) + 1
    is_whole_step = plan.schedule.is_whole_step
    shape = plan.stages[0].mesh_shape
    if isinstance(devices, Mesh) and is_whole_step and shape != devices.axis_sizes:
        raise ValueError(
            f"the plan needs a mesh of shape {shape}, got one of shape {devices.axis_sizes}; give"
            " the number of devices instead, or plan the step for this mesh"
        )
    present = list(devices.devices.flat) if isinstance(devices, Mesh) else _choose(devices, None)[0]
    has_spare = devices is not None and needed < len(present)
    if needed > len(present) or (is_whole_step and has_spare):
        raise ValueError(
            f"the plan needs {needed} devices, got {len(present)}; give as many, or plan the step"
            f" for {len(present)}"
        )
    return present


def submeshes(
    devices: Mapping[int, Device] | Sequence[Device], stages: Sequence[Stage]
) -> tuple[Mesh, ...]:
    """Return the mesh of each stage.

    Args:
        devices: the devices by their numbers in the plan.
        stages: the stages of the plan.
    """

    def mesh(stage: Stage) -> Mesh:
        chosen = np.array([devices[device] for device in stage.devices]).reshape(stage.mesh_shape)
        return Mesh(chosen, stage.axis_names, axis_types=(AxisType.Auto,) * len(stage.mesh_shape))

    return tuple(map(mesh, stages))


def cluster_of(mesh: Mesh) -> Cluster:
    """Return the shipped cluster that describes the devices of a mesh.

    A GPU of an unknown kind counts as an A100, with a warning: plans stay correct, but may not be
    the fastest.

    Args:
        mesh: a mesh of devices of this process.

    Returns:
        The cluster with at least as many devices: part of a host, or whole hosts.
    """
    device = mesh.devices.flat[0]
    count = mesh.devices.size
    if device.platform == "cpu":
        return _sized("cpu-virtual", count)
    return _sized(cluster_of_kind(device.device_kind), count)


def cluster_of_kind(device_kind: str) -> str:
    """Return the name of the shipped cluster with GPUs of a kind.

    Args:
        device_kind: `jax.Device.device_kind`, e.g. "NVIDIA H100 80GB HBM3". An unknown kind stands
            for an A100, with a warning.
    """
    for kind, name in _CLUSTER_OF_KIND.items():
        if kind in device_kind:
            return name
    warnings.warn(
        f"no cluster file for {device_kind!r}: planning as for an A100; give the method cluster= a"
        " file of your own",
        stacklevel=3,
    )
    return "dgx_a100_80"


def devices_match(cluster: Cluster, devices: Sequence[Device]) -> bool:
    """Return whether the devices may be of the kind in `cluster`; an unknown GPU may be any GPU."""
    if (devices[0].platform == "cpu") != (cluster.device.kind == "cpu"):
        return False

    def kind(name: str) -> str | None:
        return next((kind for kind in _CLUSTER_OF_KIND if kind in name), None)

    present = kind(devices[0].device_kind)
    described = kind(cluster.device.name)
    return present == described or None in (present, described)


def _sized(name: str, count: int) -> Cluster:
    """Return a shipped cluster with at least `count` devices: part of a host, or whole hosts."""
    cluster = Cluster.load(name)
    if count <= cluster.devices_per_host:
        return cluster.first_devices(count)
    if cluster.inter_host is None:  # virtual devices of one machine
        return cluster.model_copy(update={"devices_per_host": count})
    return cluster.with_size(hosts=-(-count // cluster.devices_per_host))
