"""Helpers for tests and tutorials."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from autopar.hosts.ray_private import without_uv_hook

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

__all__ = ["assert_allclose", "raylets"]

_RAY_CONFIG = {
    # Ray's default of 15 would give every other process precedence over the workers.
    "worker_niceness": 0,
    # autopar's workers have environments of their own and would not use prestarted ones.
    "enable_worker_prestart": False,
    "prestart_worker_first_driver": False,
}


def assert_allclose(x: Any, y: Any, rtol: float = 1e-4, atol: float = 1e-4) -> None:
    """Assert that two pytrees have the same structure and close values.

    The arrays may be on any devices; they are copied to this process.

    Args:
        x: a pytree of arrays.
        y: the pytree that is expected; `rtol` is relative to its values.
        rtol: relative tolerance.
        atol: absolute tolerance.

    Raises:
        AssertionError: structures or values differ; the message names the leaf.
    """
    left, left_tree = jax.tree.flatten_with_path(x)
    right, right_tree = jax.tree.flatten_with_path(y)
    names = [[jax.tree_util.keystr(path) for path, _ in leaves] for leaves in (left, right)]
    if names[0] != names[1]:
        raise AssertionError(f"structures differ: {left_tree} and {right_tree}")
    for (_, a), (_, b), name in zip(left, right, names[0], strict=True):
        np.testing.assert_allclose(
            np.asarray(a), np.asarray(b), rtol, atol, err_msg=f"at {name or 'the value'}"
        )


@contextmanager
def raylets(count: int) -> Iterator["Cluster"]:
    """Start a Ray cluster on this machine, which this process joins, and shut it down on exit.

    `autopar.init(cluster="ray")` then takes each of its nodes, which are processes, for a host.

    Args:
        count: number of nodes.
    """
    import ray
    from ray.cluster_utils import Cluster

    from autopar.initialization import shutdown

    head = {"num_cpus": 2, "include_dashboard": False, "_system_config": _RAY_CONFIG}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(count - 1):
            cluster.add_node(num_cpus=2)
        with without_uv_hook():
            ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
    finally:
        shutdown()
        ray.shutdown()
        cluster.shutdown()
