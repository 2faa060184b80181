"""What hosts must have in common with the driver, and what a host must have to take part."""

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
"""Programs are serialised by the driver's JAX and read by a worker's, arrays likewise by numpy; workers run our own code, which uses flax."""


_SPARE_THREADS = 8
"""Threads of a worker beside those of its virtual devices, by the variable that XLA has for that. There are as many as cores otherwise,
and while all wait for a collective nobody is left to send others what they need before they can join in."""

_VIRTUAL_DEVICES = re.compile(r"--xla_force_host_platform_device_count=(\d+)")


def virtual_devices() -> int | None:
    """How many virtual CPU devices XLA_FLAGS asks for in this process, if it does."""
    asked = _VIRTUAL_DEVICES.search(os.environ.get("XLA_FLAGS", ""))
    return int(asked[1]) if asked else None


def variables_of_worker(platform: str, num_devices: int) -> dict[str, str]:
    """The environment variables of a worker: XLA gets the flags that it has here, but for the number of virtual devices."""
    flags = _VIRTUAL_DEVICES.sub("", os.environ.get("XLA_FLAGS", "")).split()
    found = {"JAX_PLATFORMS": platform}
    if platform == "cpu":
        flags.append(f"--xla_force_host_platform_device_count={num_devices}")
        found["NPROC"] = str(num_devices + _SPARE_THREADS)
    return found | ({"XLA_FLAGS": " ".join(flags)} if flags else {})


def versions() -> dict[str, str]:
    """What must be the same everywhere."""
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
    host: int, address: str, here: Mapping[str, str], there: Mapping[str, str]
) -> None:
    """Raise HostsError if a host has other versions than the driver."""
    different = {name: each for name, each in here.items() if there.get(name) != each}
    if not different:
        return
    found = ", ".join(
        f"{name} {there.get(name, 'not installed')} (the driver: {each})"
        for name, each in different.items()
    )
    packages = " ".join(f"{name}=={each}" for name, each in different.items() if name != "Python")
    todo = [f"run it with Python {here['Python']}"] if "Python" in different else []
    todo += [f"pip install {packages}"] if packages else []
    raise HostsError(f"host {host} ({address}) has {found}; {' and '.join(todo)} there")


def leave_gpus() -> None:
    """Have this process, the driver, use no GPU: workers want all that their hosts have, and it may be on one of these.

    Afterwards JAX has only the CPU here, also when the hosts are left. A driver that uses a GPU already is warned.
    """
    first = (jax.config.jax_platforms or "cpu").split(",")[0]  # pyright: ignore[reportAttributeAccessIssue]
    if not backends_started() and first == "cpu":
        jax.config.update("jax_platforms", "cpu")
    elif (jax.default_backend() if backends_started() else first) != "cpu":
        warnings.warn(
            "this process has JAX on a GPU, whose memory it takes from a worker on this host: set JAX_PLATFORMS=cpu for it, or call"
            " autopar.init(cluster='ray') before anything that uses a device",
            stacklevel=2,
        )


def devices_of(
    members: Sequence[int], wanted: Sequence[Sequence[int]], host: int, address: str
) -> dict[int, Device]:
    """The devices that JAX has, by number.

    Args:
        members: the hosts that form one distributed JAX, in the order of their processes.
        wanted: for each host the numbers of its devices.
        host: this one.

    Raises:
        HostsError: JAX finds none here, or fewer than wanted on some host.
    """
    try:
        found = jax.devices()
    except RuntimeError as error:
        raise HostsError(
            f"host {host} ({address}) has no accelerator that JAX can use: {error}; install autopar[cuda12] or autopar[cuda13] there, as"
            " its driver wants"
        ) from None
    devices: dict[int, Device] = {}
    for process, member in enumerate(members):
        there = [device for device in found if device.process_index == process]
        if len(there) < len(wanted[member]):
            raise HostsError(
                f"host {member} has {len(there)} {found[0].platform} devices that JAX can use, but {len(wanted[member])} are wanted of it;"
                " give autopar.init fewer (num_devices_per_node), or see there what jax.devices() says"
            )
        devices.update(zip(wanted[member], there, strict=False))
    return devices


def free_port() -> int:
    """A port of this host that nobody listens on."""
    with socket.socket() as found:
        found.bind(("", 0))
        return found.getsockname()[1]


def check_port(host: int, address: str) -> None:
    """Raise PortTakenError if somebody listens on the port of an address of this host: JAX would end the process."""
    port = int(address.rpartition(":")[2])
    with socket.socket() as tried:
        try:
            tried.bind(("", port))
        except OSError as error:
            raise PortTakenError(
                f"host {host}: port {port}, for JAX's coordinator ({address}), can't be had: {error}"
            ) from None
