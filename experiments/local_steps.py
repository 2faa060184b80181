"""A model's step on the devices of this machine: devices, arguments, results compared."""

import os
from typing import Any

import jax
import numpy as np

from experiments.models import Model
from simulator import Cluster

PATIENT_COLLECTIVES = "--xla_cpu_collective_call_terminate_timeout_seconds=600"
"""A flag for busy machines, where a virtual device may be so late that XLA aborts, after 40 s."""


def use_devices_like(cluster: Cluster, needed: int) -> None:
    """Have JAX use virtual CPU devices for a CPU cluster, else the GPUs of this machine.

    Args:
        cluster: the cluster whose kind of device is wanted.
        needed: number of devices.

    Raises:
        ValueError: this machine has too few of them.
    """
    if cluster.device.kind == "cpu":
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", cluster.num_devices)
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {PATIENT_COLLECTIVES}"
    present = jax.devices()
    if present[0].platform != cluster.device.kind or len(present) < needed:
        raise ValueError(
            f"{cluster.name} is to be measured on {needed} x {cluster.device.kind}, but present are"
            f" {len(present)} x {present[0].platform} ({present[0].device_kind}); measure where"
            " they are, or use 'source: simulated'"
        )


def initial_args(model: Model) -> Any:
    """Return (state, batch) of `model` as host arrays, the same on every call."""
    init = jax.jit(lambda key: (model.init_state(key), model.make_batch(key)))
    return jax.device_get(init(jax.random.key(0)))


def next_state(result: Any) -> Any:
    """Return the state from the result of a training step: (state, loss), or the state alone."""
    return result[0] if type(result) is tuple else result


def largest_difference(actual: Any, expected: Any) -> float:
    """Return the largest absolute difference between two results of the same structure."""
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    return max(
        float(np.max(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64))))
        for a, b in pairs
    )
