"""The session: which hosts steps run on, between `autopar.init` and `autopar.shutdown`.

Without a session, steps run in this process.
"""

import atexit
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autopar.hosts.errors import HostsError
from autopar.hosts.ray_private import default_address, without_uv_hook
from autopar.progress import log_progress
from autopar.runtime.local_backend import LOCAL, use_backend

if TYPE_CHECKING:
    from autopar.hosts.driver import RayHosts

_PROBE_SECONDS = 5.0
"""Seconds to wait for a connection to a Ray cluster's address."""


@dataclass(frozen=True, slots=True)
class HostsRequest:
    """The hosts that the user asked for; the arguments of `autopar.init`."""

    num_nodes: int | None
    num_devices_per_node: int | Sequence[int] | None
    timeout: float

    def start(self) -> "RayHosts":
        """Reserve the hosts and start their workers.

        Raises:
            HostsError: the Ray cluster has fewer hosts or devices.
        """
        from autopar.hosts.driver import RayHosts
        from autopar.hosts.reservation import reserve

        reservation = reserve(self.num_nodes, self.num_devices_per_node, self.timeout)
        return RayHosts(reservation, self.timeout)

    def at_most(self, count: int) -> "HostsRequest":
        """Return the request for at most `count` hosts."""
        if isinstance(self.num_devices_per_node, Sequence):
            return HostsRequest(None, self.num_devices_per_node[:count], self.timeout)
        num_nodes = self.num_nodes and min(self.num_nodes, count)
        return HostsRequest(num_nodes, self.num_devices_per_node, self.timeout)


@dataclass(slots=True)
class Session:
    """The hosts that steps run on, and how to replace and leave them.

    Attributes:
        hosts: the hosts; None if steps run in this process.
        request: the hosts that the user asked for last.
        ray_job: id of this driver's Ray job, if autopar called `ray.init`; None if the user did.
    """

    hosts: "RayHosts | None" = None
    request: HostsRequest | None = None
    ray_job: str | None = None

    def join(self, address: str | None, namespace: str | None, request: HostsRequest) -> None:
        """Join a Ray cluster and start workers, after leaving the present cluster.

        Args:
            address: address of the cluster; None or "auto" for the one that Ray finds.
            namespace: Ray's namespace of this driver.
            request: the hosts.

        Raises:
            HostsError: there is no such cluster, or it has fewer hosts or devices.
            ValueError: this process has joined another cluster.
        """
        self.leave()
        try:
            import ray
        except ImportError as error:
            raise HostsError("cluster='ray' needs Ray: install autopar[ray]") from error
        if ray.is_initialized():
            check_address(address)
        else:
            _connect(address, namespace)
            self.ray_job = ray.get_runtime_context().get_job_id()
        try:
            self._use(request.start())
        except BaseException:
            self.leave()
            raise
        self.request = request
        log_progress(f"joined Ray at {ray.get_runtime_context().gcs_address}")

    def rejoin(self) -> None:
        """Replace workers that have failed, on the hosts that remain.

        Raises:
            HostsError: no workers can be started there.
        """
        from autopar.hosts.reservation import alive_nodes

        assert self.request is not None
        self._end_workers()
        while self.hosts is None:
            count = len(alive_nodes())
            try:
                self._use(self.request.at_most(count).start())
            except HostsError:
                # Ray notices only after a while that a host is gone.
                if len(alive_nodes()) >= count:
                    raise

    def leave(self) -> None:
        """End the workers, and disconnect from the cluster if autopar connected to it."""
        try:
            self._end_workers()
        finally:
            if self.ray_job is not None:
                import ray

                job, self.ray_job = self.ray_job, None
                if ray.is_initialized() and ray.get_runtime_context().get_job_id() == job:
                    ray.shutdown()

    def _use(self, hosts: "RayHosts") -> None:
        from autopar.hosts.ray_backend import RayBackend

        use_backend(RayBackend(hosts))
        self.hosts = hosts

    def _end_workers(self) -> None:
        hosts, self.hosts = self.hosts, None
        use_backend(LOCAL)
        if hosts is not None:
            hosts.close()


current = Session()
"""The session of this process, which `autopar.init` and `autopar.shutdown` change."""


def hosts() -> "RayHosts | None":
    """Return the hosts that steps run on; None if they run in this process."""
    return current.hosts


def check_address(address: str | None) -> None:
    """Raise ValueError if this process has joined another cluster than the one at `address`."""
    import ray

    joined = ray.get_runtime_context().gcs_address
    if address in (None, "auto", "local") or "://" in address or _split(address) == _split(joined):
        return
    raise ValueError(
        f"cluster_address={address!r}, but this process has joined the Ray cluster at {joined} by"
        " ray.init: leave one of the two out, or call ray.shutdown() first"
    )


def _connect(address: str | None, namespace: str | None) -> None:
    import ray

    if address in (None, "auto"):
        address = os.environ.get("RAY_ADDRESS") or "auto"
    named = "the default address" if address == "auto" else address
    try:
        if address == "auto":
            address = default_address()
        if address != "local" and "://" not in address:
            # Ray would end this process if it could not connect.
            socket.create_connection(_split(address), _PROBE_SECONDS).close()
        with without_uv_hook():
            ray.init(address=address, namespace=namespace, log_to_driver=False)
    except (OSError, ValueError) as error:
        raise HostsError(
            f"there is no Ray cluster at {named} ({error}): start one with `ray start --head`, or"
            " call ray.init() before autopar.init to have one on this machine"
        ) from None


def _split(address: str) -> tuple[str, int]:
    """Return the IP address and the port of an address; raise ValueError if it is none."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(
            f"{address!r} is no address, expected host:port, such as 10.0.0.1:6379, 'auto' or"
            " 'local'"
        )
    return socket.gethostbyname(host), int(port)


atexit.register(lambda: current.leave())
