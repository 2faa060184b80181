"""The hosts that steps run on, once `autopar.init` has found some; until then, and after `shutdown`, it is this process."""

import atexit
import os
from typing import TYPE_CHECKING

from autopar.hosts.errors import HostsError
from autopar.progress import tell

if TYPE_CHECKING:
    from autopar.hosts.cluster import RayHosts

_hosts: "RayHosts | None" = None


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
    global _hosts
    leave()
    try:
        import ray
    except ImportError as error:
        raise HostsError("cluster='ray' needs Ray: install autopar[ray]") from error
    from autopar.hosts.cluster import RayHosts

    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # else workers build the environment anew
    if not ray.is_initialized():
        try:
            ray.init(address=address or "auto", namespace=namespace, log_to_driver=False)
        except ConnectionError as error:
            raise HostsError(
                f"there is no Ray cluster at {address or 'the default address'}: start one with `ray start --head`, or call ray.init()"
                " before autopar.init to have one on this machine"
            ) from error
    _hosts = RayHosts(num_nodes, num_devices_per_node, timeout)
    tell(f"joined Ray at {ray.get_runtime_context().gcs_address}")


def leave() -> None:
    """End the workers and leave the cluster, which goes on."""
    global _hosts
    if _hosts is not None:
        _hosts.close()
        _hosts = None


atexit.register(leave)
