"""The hosts that steps run on, once `autopar.init` has found some; until then, and after `shutdown`, it is this process."""

import atexit
import os
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

from autopar.hosts.errors import HostsError
from autopar.hosts.ray_private import found_address
from autopar.progress import log_progress
from autopar.runtime.local_backend import LOCAL, use_backend

if TYPE_CHECKING:
    from autopar.hosts.driver import RayHosts

_hosts: "RayHosts | None" = None
_asked: tuple[int | None, int | Sequence[int] | None, float] | None = None
_job: str | None = None  # the driver's in Ray, if it has been connected here
_PROBE_SECONDS = 5.0


def hosts() -> "RayHosts | None":
    """The hosts that have been joined; None: steps run in this process."""
    return _hosts


def _set(hosts: "RayHosts | None") -> None:
    """Have steps run on these hosts; None: in this process."""
    global _hosts
    if hosts is None:
        use_backend(LOCAL)
    else:
        from autopar.hosts.ray_backend import RayBackend

        use_backend(RayBackend(hosts))
    _hosts = hosts


def join(
    address: str | None,
    num_nodes: int | None,
    num_devices_per_node: int | Sequence[int] | None,
    namespace: str | None,
    timeout: float,
) -> None:
    """Join a Ray cluster and start workers; what was joined before is left."""
    global _asked, _job
    leave()
    try:
        import ray
    except ImportError as error:
        raise HostsError("cluster='ray' needs Ray: install autopar[ray]") from error
    from autopar.hosts.driver import RayHosts

    if ray.is_initialized():
        _check_address(address)
    else:
        _connect(address, namespace)
        _job = ray.get_runtime_context().get_job_id()
    try:
        _set(RayHosts(num_nodes, num_devices_per_node, timeout))
    except BaseException:
        leave()
        raise
    _asked = num_nodes, num_devices_per_node, timeout
    log_progress(f"joined Ray at {ray.get_runtime_context().gcs_address}")


def rejoin() -> None:
    """Start new workers in the place of those that have failed, on as many hosts as were asked for, or all that remain.

    Raises:
        HostsError: no workers can be started on them.
    """
    from autopar.hosts.driver import RayHosts
    from autopar.hosts.workers import alive_nodes

    assert _asked is not None
    num_nodes, num_devices_per_node, timeout = _asked
    _end_workers()
    while _hosts is None:
        count = len(alive_nodes())
        try:
            if isinstance(num_devices_per_node, Sequence):
                _set(RayHosts(None, num_devices_per_node[:count], timeout))
            else:
                _set(RayHosts(num_nodes and min(num_nodes, count), num_devices_per_node, timeout))
        except HostsError:
            if len(alive_nodes()) >= count:
                raise
            # Ray takes a while to notice that a host is gone.


def _check_address(address: str | None) -> None:
    """Raise ValueError if the cluster that has been joined already is another one than that at `address`."""
    import ray

    here = ray.get_runtime_context().gcs_address
    if address in (None, "auto", "local") or "://" in address or _split(address) == _split(here):
        return
    raise ValueError(
        f"cluster_address={address!r}, but this process has joined the Ray cluster at {here} by ray.init: leave one of the two out, or"
        " call ray.shutdown() first"
    )


def _connect(address: str | None, namespace: str | None) -> None:
    import ray

    if address in (None, "auto"):
        address = os.environ.get("RAY_ADDRESS") or "auto"
    named = "the default address" if address == "auto" else address
    try:
        if address == "auto":
            address = found_address()
        if address != "local" and "://" not in address:
            socket.create_connection(
                _split(address), _PROBE_SECONDS
            ).close()  # Ray ends this process if it can't connect
        ray.init(address=address, namespace=namespace, log_to_driver=False)
    except (OSError, ValueError) as error:
        raise HostsError(
            f"there is no Ray cluster at {named} ({error}): start one with `ray start --head`, or call ray.init() before autopar.init to"
            " have one on this machine"
        ) from None


def _split(address: str) -> tuple[str, int]:
    """The host, by number, and the port of an address; ValueError if it has none."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(
            f"{address!r} is no address, expected host:port, such as 10.0.0.1:6379, 'auto' or 'local'"
        )
    return socket.gethostbyname(host), int(port)


def leave() -> None:
    """End the workers and leave the cluster, which goes on; one that this process had joined before stays joined."""
    global _job
    try:
        _end_workers()
    finally:
        if _job is not None:
            import ray

            if ray.is_initialized() and ray.get_runtime_context().get_job_id() == _job:
                ray.shutdown()
            _job = None


def _end_workers() -> None:
    joined = _hosts
    _set(None)
    if joined is not None:
        joined.close()


atexit.register(leave)
