"""A mesh of devices is described by the shipped cluster with the same kind of device."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from autopar.devices import cluster_of


def mesh(count: int, platform: str, kind: str) -> Any:
    """Return a stand-in for a mesh, with the attributes that identify its hardware."""
    device = SimpleNamespace(platform=platform, device_kind=kind)
    return SimpleNamespace(devices=np.array([device] * count, object))


@pytest.mark.parametrize("count", [1, 8, 12])
def test_virtual_devices_are_of_one_machine_however_many(count: int) -> None:
    cluster = cluster_of(mesh(count, "cpu", "cpu"))
    assert (cluster.name, cluster.hosts, cluster.num_devices) == ("cpu-virtual", 1, count)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("Tesla V100-SXM2-16GB", "p3.16xlarge"),
        ("NVIDIA H200", "dgx_h200"),
        ("NVIDIA B200", "dgx_b200"),
        ("NVIDIA GB200", "gb200_nvl72"),
        ("NVIDIA B300", "dgx_b300"),
        ("NVIDIA GB300", "gb300_nvl72"),
    ],
)
def test_gpus_are_recognized_by_their_kind(kind: str, name: str) -> None:
    assert [cluster_of(mesh(count, "gpu", kind)).num_devices for count in (1, 4)] == [1, 4]
    assert cluster_of(mesh(4, "gpu", kind)).name == name


def test_gpus_of_an_unknown_kind_count_as_others_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="no cluster file for 'Radeon'"):
        assert cluster_of(mesh(2, "gpu", "Radeon")).name == "dgx_a100_80"
