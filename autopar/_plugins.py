"""XLA's CUDA 12 plugin: kept quiet where it can't run, and loaded as a compiler for GPUs that are not here.

The `jax-cuda12-pjrt` wheel is a dependency because it holds the compiler. JAX takes every such wheel for a backend to start, and
without a GPU that prints a traceback. The private names of JAX we need for both ends are all in this module (seen in 0.11.2).
"""

import functools
import importlib
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

Device = Any
"""A `jax.Device`: pyright takes that name for a variable."""

_PLUGIN = "jax_plugins.xla_cuda12"
_NEEDED = {_PLUGIN: "jax-cuda12-pjrt", "nvidia.cuda_nvcc": "nvidia-cuda-nvcc-cu12"}
_GPU_FILES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")  # the last is a GPU under WSL


def silence_idle_plugin() -> None:
    """Keep JAX from starting the CUDA 12 plugin as a backend, unless it can run: call before the first use of a device.

    It can run where there is an NVIDIA device and `jax[cuda12]` is installed and `jax[cuda13]`, which would want the same GPUs,
    is not. Everywhere else its start does nothing, and JAX goes on with the other backends as if it were not installed.
    """
    can_run = any(map(os.path.exists, _GPU_FILES)) and _installed("jax_cuda12_plugin")
    if _installed(_PLUGIN) and (not can_run or _installed("jax_plugins.xla_cuda13")):
        vars(_plugin())["initialize"] = lambda: None


def backends_started() -> bool:
    """Whether JAX has looked for devices, after which it can't be told any more which ones to use."""
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


@functools.cache
def compile_only_devices(
    target_config: str, hosts: int, devices_per_host: int
) -> tuple[Device, ...]:
    """Stand-ins for `hosts` x `devices_per_host` GPUs that programs can be compiled for but not run on, in order of their ids.

    `target_config` is XLA's GpuTargetConfig text: what the compiler wants to know of a GPU. The same arguments give the same
    devices, so that shardings built at different times agree. Raises ImportError when the compiler is not installed.
    """
    from jax.experimental import topologies  # its import is slow, and needed only to compile
    from jaxlib import xla_client

    topology = xla_client.make_c_api_device_topology(
        _compiler(), "", target_config=target_config, topology=f"1x{hosts}x{devices_per_host}"
    )
    return tuple(topologies.TopologyDescription(topology._make_compile_only_devices()).devices)


@functools.cache
def _compiler() -> object:
    from jaxlib import xla_client

    if missing := [wheel for module, wheel in _NEEDED.items() if not _installed(module)]:
        raise ImportError(
            f"compiling for GPUs that are not here needs {' and '.join(missing)} (Linux only), not installed; "
            f"reinstall autopar, or: pip install {' '.join(missing)}"
        )
    # Loaded under a name of our own: JAX never takes it for a backend, and a real "cuda" backend keeps its name.
    library = Path(_plugin().__file__ or "").with_name("xla_cuda_plugin.so")
    with _no_stderr():
        api = xla_client.load_pjrt_plugin_dynamically("autopar_target", str(library))
        xla_client.initialize_pjrt_plugin("autopar_target")
    return api


def _plugin() -> ModuleType:
    return importlib.import_module(_PLUGIN)


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the parent package
        return False


@contextmanager
def _no_stderr() -> Iterator[None]:
    """Drop what C++ writes to file descriptor 2: loading the library logs that no driver was found, which no flag turns off."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(nowhere)
        os.close(kept)
