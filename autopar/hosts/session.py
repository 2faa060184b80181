"""The hosts that steps run on, once `autopar.init` has found some; until then, and after `shutdown`, it is this process."""

import atexit
import os
import socket
from typing import TYPE_CHECKING

from autopar.hosts.errors import HostsError
from autopar.progress import tell

if TYPE_CHECKING:
    from autopar.hosts.cluster import RayHosts

_hosts: "RayHosts | None" = None
_asked: tuple[int | None, int | None, float] | None = None


def hosts() -> "RayHosts | None":
    """The hosts that have been joined; None: steps run in this process."""
    return _hosts


def join(
    address: str | None,
    num_nodes: int | None,
    num_devices_per_node: int | None,
    namespace: str | None,
    timeout: float,
) -> None:
    """Join a Ray cluster and start workers; what was joined before is left."""
    global _hosts, _asked
    leave()
    try:
        import ray
    except ImportError as error:
        raise HostsError("cluster='ray' needs Ray: install autopar[ray]") from error
    from autopar.hosts.cluster import RayHosts

    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # else workers build the environment anew
    if not ray.is_initialized():
        _connect(address, namespace)
    _hosts = RayHosts(num_nodes, num_devices_per_node, timeout)
    _asked = num_nodes, num_devices_per_node, timeout
    tell(f"joined Ray at {ray.get_runtime_context().gcs_address}")


def rejoin() -> None:
    """Start new workers in the place of those that have failed, on as many hosts as were asked for, or all that remain.

    Raises:
        HostsError: no workers can be started on them.
    """
    from autopar.hosts.cluster import RayHosts
    from autopar.hosts.workers import alive_nodes

    global _hosts
    assert _asked is not None
    num_nodes, num_devices_per_node, timeout = _asked
    leave()
    while _hosts is None:
        count = len(alive_nodes())
        try:
            _hosts = RayHosts(num_nodes and min(num_nodes, count), num_devices_per_node, timeout)
        except HostsError:
            if len(alive_nodes()) >= count:
                raise
            # Ray takes a while to notice that a host is gone.


def _connect(address: str | None, namespace: str | None) -> None:
    import ray

    error: Exception | None = None
    try:
        if address not in (None, "auto", "local") and "//" not in address:
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), timeout=5).close()  # Ray ends this process if it can't connect
        ray.init(address=address or "auto", namespace=namespace, log_to_driver=False)
    except (ConnectionError, OSError, ValueError) as found:
        error = found
    if error is not None:
        raise HostsError(
            f"there is no Ray cluster at {address or 'the default address'} ({error}): start one with `ray start --head`, or call"
            " ray.init() before autopar.init to have one on this machine"
        )


def leave() -> None:
    """End the workers and leave the cluster, which goes on."""
    global _hosts
    if _hosts is not None:
        _hosts.close()
        _hosts = None


atexit.register(leave)
