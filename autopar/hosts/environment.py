"""What a host needs to take part: the driver's versions, enough devices, and free ports."""

import os
import re
import socket
import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version

import jax

from autopar._plugins import backends_started
from autopar.devices import Device
from autopar.hosts.errors import HostsError, PortTakenError

_PACKAGES = ("jax", "jaxlib", "numpy", "flax", "autopar")
"""Packages whose versions must agree on all hosts.

The driver's JAX serializes programs and the worker's deserializes them, numpy likewise for arrays;
workers run autopar, which imports flax.
"""

_SPARE_THREADS = 8
"""Threads of XLA's pool in a worker beyond one for each virtual device (variable NPROC).

By default the pool has a thread for each core. If all of them wait for a collective, none is left
to send other workers the values that they need to join it.
"""

_VIRTUAL_DEVICES = re.compile(r"--xla_force_host_platform_device_count=(\d+)")


def virtual_devices() -> int | None:
    """Return the number of virtual CPU devices that XLA_FLAGS sets, or None."""
    flag = _VIRTUAL_DEVICES.search(os.environ.get("XLA_FLAGS", ""))
    return int(flag[1]) if flag else None


def variables_of_worker(platform: str, num_devices: int) -> dict[str, str]:
    """Return the environment variables of a worker.

    XLA_FLAGS is the driver's, except for the number of virtual devices.

    Args:
        platform: "cpu" or "cuda".
        num_devices: number of devices of the worker's host.
    """
    flags = _VIRTUAL_DEVICES.sub("", os.environ.get("XLA_FLAGS", "")).split()
    variables = {"JAX_PLATFORMS": platform}
    if platform == "cpu":
        flags.append(f"--xla_force_host_platform_device_count={num_devices}")
        variables["NPROC"] = str(num_devices + _SPARE_THREADS)
    if flags:
        variables["XLA_FLAGS"] = " ".join(flags)
    return variables


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that must agree on all hosts."""
    return {
        "Python": f"{sys.version_info.major}.{sys.version_info.minor}",
        **{name: _version(name) for name in _PACKAGES},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def check_versions(
    host: int, address: str, expected: Mapping[str, str], present: Mapping[str, str]
) -> None:
    """Raise HostsError if a host has other versions than the driver.

    Args:
        host: number of the host.
        address: address of the host.
        expected: the driver's versions by package.
        present: the host's versions by package.
    """
    different = {name: wanted for name, wanted in expected.items() if present.get(name) != wanted}
    if not different:
        return
    described = ", ".join(
        f"{name} {present.get(name, 'not installed')} (the driver: {wanted})"
        for name, wanted in different.items()
    )
    remedies = [f"run it with Python {expected['Python']}"] if "Python" in different else []
    packages = [f"{name}=={wanted}" for name, wanted in different.items() if name != "Python"]
    if packages:
        remedies.append(f"pip install {' '.join(packages)}")
    raise HostsError(f"host {host} ({address}) has {described}; {' and '.join(remedies)} there")


def leave_gpus() -> None:
    """Keep this process, the driver, off the GPUs, which the workers need.

    Sets `jax_platforms` to "cpu" for the rest of the process. If the process already uses a GPU,
    it warns instead.
    """
    first = (jax.config.jax_platforms or "cpu").split(",")[0]  # pyright: ignore[reportAttributeAccessIssue]
    if not backends_started() and first == "cpu":
        jax.config.update("jax_platforms", "cpu")
    elif (jax.default_backend() if backends_started() else first) != "cpu":
        warnings.warn(
            "this process has JAX on a GPU, whose memory it takes from a worker on this host: set"
            " JAX_PLATFORMS=cpu for it, or call autopar.init(cluster='ray') before anything that"
            " uses a device",
            stacklevel=2,
        )


def devices_of(
    members: Sequence[int], wanted: Sequence[Sequence[int]], host: int, address: str
) -> dict[int, Device]:
    """Return the devices of a distributed JAX by number.

    Args:
        members: the hosts that form it, in the order of their processes.
        wanted: for each host the numbers of its devices.
        host: number of this host.
        address: address of this host.

    Raises:
        HostsError: JAX finds no devices, or too few on some host.
    """
    try:
        present = jax.devices()
    except RuntimeError as error:
        raise HostsError(
            f"host {host} ({address}) has no accelerator that JAX can use: {error}; install"
            " autopar[cuda12] or autopar[cuda13] there, for the CUDA version of its driver"
        ) from None
    devices: dict[int, Device] = {}
    for process, member in enumerate(members):
        own = [device for device in present if device.process_index == process]
        if len(own) < len(wanted[member]):
            raise HostsError(
                f"host {member} has {len(own)} {present[0].platform} devices that JAX can use, but"
                f" autopar.init asked for {len(wanted[member])}; ask for fewer"
                " (num_devices_per_node), or check jax.devices() on that host"
            )
        devices.update(zip(wanted[member], own, strict=False))
    return devices


def free_port() -> int:
    """Return a port of this host that no program listens on."""
    with socket.socket() as server:
        server.bind(("", 0))
        return server.getsockname()[1]


def check_port(host: int, address: str) -> None:
    """Raise PortTakenError if the port of an address is in use; JAX would end the process."""
    port = int(address.rpartition(":")[2])
    with socket.socket() as server:
        try:
            server.bind(("", port))
        except OSError as error:
            raise PortTakenError(
                f"host {host}: port {port}, for JAX's coordinator ({address}), can't be used:"
                f" {error}"
            ) from None
