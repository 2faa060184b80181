"""A Ray cluster of four raylets on this machine."""

import pytest


@pytest.fixture(scope="module")
def raylets():
    """The cluster, which this process has joined; what tests start on it ends with the module."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    import autopar

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    for _ in range(3):
        cluster.add_node(num_cpus=2)
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    autopar.shutdown()
    ray.shutdown()
    cluster.shutdown()
