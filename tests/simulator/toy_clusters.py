"""A toy device, and clusters of few devices whose collectives have seconds that follow by hand."""

from typing import Any

from simulator.hardware.cluster import Cluster, Link

BASE = Cluster.load("dgx_h100")

DEVICE: dict[str, Any] = {
    "name": "toy",
    "kind": "gpu",
    "source": "made up",
    "memory_gb": 16,
    "cores": 10,
    "peak_tflop_per_s": {"f32": 10},
    "vector_tflop_per_s": 10,
    "memory_bandwidth_gb_per_s": 1000,
    "kernel_launch_us": 0,
    "kernels": {"efficiency": 1.0, "memory_efficiency": 1.0},
}
"""Fields of a device."""


def toy_cluster(**changes: object) -> Cluster:
    """Return hosts with links of 100 GB/s, two NICs of 10 GB/s, and no latencies or launches.

    Args:
        changes: fields of `Cluster` with other values than these or those of `BASE`.
    """
    fields = {name: getattr(BASE, name) for name in Cluster.model_fields}
    fields |= {
        "nics_per_host": 2,
        "collective_launch_us": 0.0,
        "collectives": None,
        "intra_host": Link(bandwidth_gb_per_s=100, latency_us=0),
        "inter_host": Link(bandwidth_gb_per_s=10, latency_us=0),
    }
    return Cluster.model_validate(fields | changes)
