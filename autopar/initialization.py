"""Which devices run steps: the devices of this process, or the devices of a Ray cluster."""

import gc
from collections.abc import Sequence

import jax

from autopar.checkpoint.saving import finish_saving
from autopar.checks import NONE, TEXT, checked, integer, items, one_of, real
from autopar.hosts import session
from autopar.ir.memo import forget_steps


def init(
    cluster: str = "local",
    cluster_address: str | None = None,
    num_nodes: int | None = None,
    num_devices_per_node: int | Sequence[int] | None = None,
    namespace: str | None = None,
    timeout: float = 600.0,
) -> None:
    """Select the devices for steps that are compiled from now on.

    Without `init`, steps run on the devices of this process, as after `init("local")`.

    Args:
        cluster: "local" for the devices of this process, "ray" for the hosts of a Ray cluster.
        cluster_address: address of the Ray cluster; by default the one that Ray finds. Unused if
            `ray.init` has been called.
        num_nodes: number of hosts to use; all by default.
        num_devices_per_node: number of GPUs to use on each host, all by default. On hosts without
            GPUs the number of virtual CPU devices, by default the number in this process's
            XLA_FLAGS. A sequence such as (4, 2) has a number for each host.
        namespace: Ray namespace of the driver. Unused if `ray.init` has been called.
        timeout: seconds after which a host that does not answer a request, such as to compile a
            program, counts as hung.

    Raises:
        HostsError: there is no such Ray cluster, or it has fewer hosts or devices, or other
            versions of JAX.
        OptionError: an option has a type or a value that is not allowed.
    """
    checked("cluster", cluster, one_of("local", "ray"))
    cluster_address = checked("cluster_address", cluster_address, TEXT | NONE)
    num_nodes = checked("num_nodes", num_nodes, integer() | NONE)
    counts = integer() | items(integer(), "such a number for each host", least=1) | NONE
    num_devices_per_node = checked("num_devices_per_node", num_devices_per_node, counts)
    namespace = checked("namespace", namespace, TEXT | NONE)
    timeout = checked("timeout", timeout, real(above=0.0))
    match cluster:
        case "local":
            session.current.leave()
            jax.devices()
        case "ray":
            request = session.HostsRequest(num_nodes, num_devices_per_node, timeout)
            session.current.join(cluster_address, namespace, request)


def shutdown() -> None:
    """End the workers on other hosts, drop all compiled programs and free their device memory.

    A checkpoint that is being written is finished first.

    Raises:
        Exception: the error of a checkpoint that could not be written, once all else is done.
    """
    try:
        finish_saving()
    finally:
        session.current.leave()
        jax.clear_caches()
        forget_steps()
        gc.collect()  # steps and their executables refer to one another
