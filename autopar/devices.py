"""The devices that are here: as a mesh to run on, and as a cluster that the cost model knows."""

import warnings
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from autopar.checks import NONE, SHAPE, AllowedValues, checked, instance, integer, items, short_repr
from autopar.ir.spec import AnyMesh, LogicalMesh
from autopar.plan import Plan, Stage
from simulator.hardware.cluster import Cluster
from simulator.hardware.heterogeneous import AnyCluster

type Device = Any  # jax.Device, which type checkers can't see
type Devices = AnyMesh | int | Sequence[int] | Sequence[Device] | None
"""A mesh, a number of devices, a mesh shape such as (2, 4), a list of devices, or None for all that are there.

An abstract mesh is enough to plan and to predict; what runs needs devices.
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
"""`Devices`, with tuples for other sequences."""

AXIS_NAMES = ("x", "y", "z", "w")
"""Names of mesh axes where the user gives none."""

_CLUSTER_OF_KIND = {
    "V100": "p3.16xlarge",
    "A100": "dgx_a100_80",
    "H100": "dgx_h100",
    "H200": "dgx_h200",
    "GB200": "gb200_nvl72",
    "B200": "dgx_b200",
}


def logical_mesh(shape: Sequence[int]) -> LogicalMesh:
    """A mesh of `shape` with the default axis names."""
    if not 1 <= len(shape) <= len(AXIS_NAMES):
        raise ValueError(
            f"mesh shape {tuple(shape)} has {len(shape)} axes, expected 1 to {len(AXIS_NAMES)}"
        )
    return LogicalMesh(tuple(shape), AXIS_NAMES[: len(shape)])


def device_mesh(
    devices: Devices, shape: Sequence[int] | None = None, axis_names: tuple[str, ...] | None = None
) -> Mesh:
    """The mesh that the user means, with Auto axes.

    Args:
        devices: see `Devices`.
        shape, axis_names: of the mesh, when they are known already (from a plan); the devices' own by default.

    Raises:
        ValueError: more devices than are here, or another number than `shape` needs.
    """
    if isinstance(devices, Mesh):
        if shape is not None and tuple(shape) != devices.axis_sizes:
            raise ValueError(
                f"the plan needs a mesh of shape {tuple(shape)}, got one of shape {devices.axis_sizes}"
            )
        names = axis_names or devices.axis_names
        return Mesh(devices.devices, names, axis_types=(AxisType.Auto,) * len(names))
    chosen, own_shape = _choose(devices, prod(shape) if shape is not None else None)
    shape = own_shape if shape is None else tuple(shape)
    if prod(shape) != len(chosen):
        raise ValueError(f"a mesh of shape {shape} needs {prod(shape)} devices, got {len(chosen)}")
    names = axis_names or logical_mesh(shape).axis_names
    return Mesh(np.array(chosen).reshape(shape), names, axis_types=(AxisType.Auto,) * len(shape))


def planned_mesh(devices: Devices) -> AnyMesh:
    """The mesh that the user means, as `device_mesh`; an abstract one stays abstract."""
    if isinstance(devices, AbstractMesh):
        auto = (AxisType.Auto,) * len(devices.axis_names)
        return AbstractMesh(devices.axis_sizes, devices.axis_names, axis_types=auto)
    return device_mesh(devices)


def _choose(devices: Devices, count: int | None) -> tuple[list[Device], tuple[int, ...]]:
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
            f"a mesh of shape {sizes} needs {wanted} devices, but only {len(present)} {present[0].platform} device(s)"
            f" are here; for virtual ones set XLA_FLAGS=--xla_force_host_platform_device_count={wanted} and"
            " JAX_PLATFORMS=cpu before starting Python"
        )
    return present[:wanted], sizes


def mesh_on_cluster(cluster: AnyCluster, devices: Devices) -> LogicalMesh:
    """The mesh that the user means, of the first devices of a cluster that need not be here.

    Raises:
        ValueError: the cluster has fewer devices, or `devices` are some that are here, and another number of them.
    """
    mesh, there = requested_mesh(devices, cluster.num_devices), cluster.num_devices
    are_here = isinstance(devices, Mesh) or (
        isinstance(devices, tuple) and isinstance(devices[0], jax.Device)
    )
    if mesh.num_devices > there or (are_here and mesh.num_devices != there):
        raise ValueError(
            f"devices is {short_repr(devices)}, {mesh.num_devices} of them, but cluster {cluster.name!r} has {there}; give the shape of a"
            f" mesh of its first devices, such as ({there},)"
        )
    return mesh


def requested_mesh(devices: Devices, count: int) -> LogicalMesh:
    """The logical mesh that the user means, where all devices are `count`."""
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
    """Return the devices of this process that a plan runs on, in the order in which it numbers them.

    Args:
        devices: those that the user means; by default the first ones that are here.

    Raises:
        ValueError: they are fewer than the plan needs, or in a mesh of another shape.
    """
    needed = max(device for stage in plan.stages for device in stage.devices) + 1
    whole, shape = plan.schedule.is_whole_step, plan.stages[0].mesh_shape
    if isinstance(devices, Mesh) and whole and shape != devices.axis_sizes:
        raise ValueError(
            f"the plan needs a mesh of shape {shape}, got one of shape {devices.axis_sizes}"
        )
    present = list(devices.devices.flat) if isinstance(devices, Mesh) else _choose(devices, None)[0]
    if needed > len(present) or (devices is not None and whole and needed < len(present)):
        raise ValueError(f"the plan needs {needed} devices, got {len(present)}")
    return present


def submeshes(
    devices: Mapping[int, Device] | Sequence[Device], stages: Sequence[Stage]
) -> tuple[Mesh, ...]:
    """Return the mesh of each stage; the plan numbers the devices."""

    def mesh(stage: Stage) -> Mesh:
        chosen = np.array([devices[device] for device in stage.devices]).reshape(stage.mesh_shape)
        return Mesh(chosen, stage.axis_names, axis_types=(AxisType.Auto,) * len(stage.mesh_shape))

    return tuple(map(mesh, stages))


def cluster_of(mesh: Mesh) -> Cluster:
    """The hardware under `mesh` as the cost model knows it.

    A GPU of an unknown kind is taken for an A100, with a warning: plans stay correct, but may not be the fastest.
    """
    device = mesh.devices.flat[0]
    count = mesh.devices.size
    if device.platform == "cpu":
        return _sized("cpu-virtual", count)
    return _sized(cluster_of_kind(device.device_kind), count)


def cluster_of_kind(device_kind: str) -> str:
    """The name of the cluster of GPUs of a kind; an A100's, with a warning, where the kind is unknown."""
    for kind, name in _CLUSTER_OF_KIND.items():
        if kind in device_kind:
            return name
    warnings.warn(
        f"no cluster file for {device_kind!r}: planning as for an A100; give the method cluster= a file of your own",
        stacklevel=3,
    )
    return "dgx_a100_80"


def devices_match(cluster: Cluster, devices: Sequence[Device]) -> bool:
    """Whether the devices may be those of `cluster`: a GPU of unknown name may be any GPU."""
    if (devices[0].platform == "cpu") != (cluster.device.kind == "cpu"):
        return False

    def kind(name: str) -> str | None:
        return next((kind for kind in _CLUSTER_OF_KIND if kind in name), None)

    here, wanted = kind(devices[0].device_kind), kind(cluster.device.name)
    return here == wanted or None in (here, wanted)


def _sized(name: str, count: int) -> Cluster:
    """A shipped cluster, grown to whole hosts until it holds `count` devices."""
    cluster = Cluster.load(name)
    if count <= cluster.devices_per_host:
        return cluster.first_devices(count)
    if cluster.inter_host is None:  # one machine, however many virtual devices it has
        return cluster.model_copy(update={"devices_per_host": count})
    return cluster.with_size(hosts=-(-count // cluster.devices_per_host))
