"""Process groups: workers whose JAX processes form one distributed JAX."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from autopar.hosts.errors import PortTakenError
from autopar.hosts.worker import ProcessGroup

if TYPE_CHECKING:
    from autopar.hosts.worker_processes import Workers

_PORTS = 5
"""Number of ports to try for a coordinator, if other programs take them before JAX does."""


def start_process_groups(
    workers: "Workers", groups: Iterable[tuple[int, ...]], ports: int = _PORTS
) -> list[str]:
    """Start JAX on all workers; each group of workers forms one distributed JAX.

    Args:
        workers: workers on which JAX has not been started.
        groups: the hosts of each group. A host in no group runs JAX by itself.
        ports: number of ports to try for the coordinators.

    Returns:
        For each worker the address of its transfer server.

    Raises:
        PortTakenError: all the ports that were tried are taken.
    """
    group_of: dict[int, ProcessGroup] = {}
    for members in groups:
        address = f"{workers.addresses[members[0]]}:{workers.free_port(members[0])}"
        group_of.update(dict.fromkeys(members, ProcessGroup(members, address)))
    try:
        return workers.start_jax([group_of.get(host) for host in range(len(workers.addresses))])
    except PortTakenError:
        if ports == 1:
            raise
    # The other members of the group already wait for a coordinator that does not start.
    workers.restart()
    return start_process_groups(workers, groups, ports - 1)
