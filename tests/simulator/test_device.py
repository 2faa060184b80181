"""Devices: usable memory, and the target for which XLA compiles without the device."""

import pytest

from simulator.hardware.cluster import Cluster
from simulator.hardware.description import ClusterError
from simulator.hardware.device import Device
from tests.simulator.toy_clusters import DEVICE


def test_usable_memory_is_that_of_the_driver_minus_a_reserve() -> None:
    device = Cluster.load("p3.16xlarge").device
    assert device.memory_bytes == 16_935_682_048  # 16 GiB without ECC and the driver
    assert device.usable_bytes == device.memory_bytes - 1_000_000_000


def test_the_xla_target_prints_as_a_text_proto() -> None:
    target = {
        "gpu_device_info": {
            "core_count": 80,
            "clock_rate_ghz": 1.53,
            "ecc_enabled": True,
            "rate": [{"key": 1}, {"key": 2}],
        },
        "version": {"feature_extension": "NONE"},
        "platform_name": "CUDA",
    }
    expected = """\
gpu_device_info {
  core_count: 80
  clock_rate_ghz: 1.53
  ecc_enabled: true
  rate {
    key: 1
  }
  rate {
    key: 2
  }
}
version {
  feature_extension: NONE
}
platform_name: "CUDA"
"""
    assert Device(**DEVICE, xla_target=target).xla_target_config() == expected
    with pytest.raises(ClusterError, match="device 'toy' has no xla_target"):
        Device(**DEVICE).xla_target_config()


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("p3.16xlarge", ("core_count: 80", "major: 7", "device_memory_size: 16935682048")),
        ("dgx_a100_80", ("core_count: 108", "major: 8", "device_memory_size: 85100068864")),
        ("dgx_h100", ("core_count: 132", "major: 9", "device_memory_size: 84942979072")),
        ("h200", ("core_count: 132", "major: 9", "device_memory_size: 151397597184")),
    ],
)
def test_the_xla_target_describes_the_device(name: str, facts: tuple[str, ...]) -> None:
    device = Cluster.load(name).device
    text = device.xla_target_config()
    assert all(fact in text for fact in facts)
    assert f"core_count: {device.cores}" in text
    assert f"device_memory_size: {device.memory_bytes}" in text
    assert f'device_description_str: "{device.name}"' in text
