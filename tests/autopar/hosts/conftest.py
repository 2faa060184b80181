"""A Ray cluster of four raylets on this machine."""

import pytest


@pytest.fixture(scope="package")
def cluster():
    """The cluster, which this process has joined."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    for _ in range(3):
        cluster.add_node(num_cpus=2)
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="module")
def raylets(cluster):
    """The cluster; what tests start on it ends with the module."""
    import autopar

    yield cluster
    autopar.shutdown()
