"""A Ray cluster on this machine: several nodes that are processes here, as if each were a host."""

from collections.abc import Iterator
from contextlib import contextmanager

import ray
from ray.cluster_utils import Cluster

import autopar
from autopar.hosts.ray_private import without_uv_hook

CONFIG = {
    "worker_niceness": 0,  # 15 by default: workers would wait for whatever else runs
    "enable_worker_prestart": False,  # nobody takes what is started before it is asked for: workers have environments of their own
    "prestart_worker_first_driver": False,
}


@contextmanager
def raylets(count: int) -> Iterator[Cluster]:
    """So many nodes, which this process has joined."""
    head = {"num_cpus": 2, "include_dashboard": False, "_system_config": CONFIG}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(count - 1):
            cluster.add_node(num_cpus=2)
        with without_uv_hook():
            ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
    finally:
        autopar.shutdown()
        ray.shutdown()
        cluster.shutdown()
