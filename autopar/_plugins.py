"""XLA's CUDA 12 plugin as a compiler for absent GPUs, and disabled as a backend without GPUs.

The wheel `jax-cuda12-pjrt`, which the extra `autopar[compile]` installs, contains the compiler. JAX
starts every such wheel as a backend, which prints a traceback on a machine without a GPU. JAX also
refuses to trace calls of cuDNN without a GPU, which `assume_cudnn` allows. All private names of JAX
that autopar uses are in this module (seen in 0.11.2).
"""

import functools
import importlib
import importlib.util
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from threading import Lock
from types import ModuleType, SimpleNamespace
from typing import Any

Device = Any
"""A `jax.Device`, which pyright takes for a variable."""

_PLUGIN = "jax_plugins.xla_cuda12"
_NEEDED = {_PLUGIN: "jax-cuda12-pjrt", "nvidia.cuda_nvcc": "nvidia-cuda-nvcc-cu12"}
_CUDNN_VERSION = 91100  # 9.11, the first for Blackwell Ultra
# the last one is a GPU under WSL
_GPU_FILES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")


def silence_idle_plugin() -> None:
    """Keep JAX from starting the CUDA 12 plugin as a backend where it cannot run.

    It can run if there is an NVIDIA device, `jax[cuda12]` is installed, and `jax[cuda13]`, which
    would start on the same GPUs, is not. Otherwise its `initialize` is replaced by a function that
    does nothing, and JAX uses its other backends as if the plugin were not installed. Call this
    before the first use of a device.
    """
    can_run = any(map(os.path.exists, _GPU_FILES)) and _installed("jax_cuda12_plugin")
    if _installed(_PLUGIN) and (not can_run or _installed("jax_plugins.xla_cuda13")):
        vars(_plugin())["initialize"] = lambda: None


def backends_started() -> bool:
    """Return whether JAX has initialized its backends, after which its platforms are fixed."""
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


@contextmanager
def assume_cudnn() -> Iterator[None]:
    """Let JAX trace calls of cuDNN while the block runs, on a machine without a GPU.

    `jax.nn.dot_product_attention(..., implementation="cudnn")` looks for cuDNN when it is traced,
    and raises "cuDNN is not detected" without it. Inside the block it finds a recent cuDNN and
    GPU. Planning and predicting do this by themselves; use the block where your own code traces
    the model, as `jax.eval_shape(model.init, ...)` does. Where JAX finds cuDNN, the block changes
    nothing.

    Example:
        >>> with autopar.assume_cudnn():
        ...     params = jax.eval_shape(model.init, jax.random.key(0), tokens)
    """
    _cudnn.enter()
    try:
        yield
    finally:
        _cudnn.leave()


class _AssumedCudnn:
    """Replaces what JAX asks about cuDNN while some thread is in a block of `assume_cudnn`."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._blocks = 0
        self._originals: dict[str, Any] = {}

    def enter(self) -> None:
        """Replace the questions on entering the first block, if JAX has not found cuDNN."""
        from jax._src.cudnn import fused_attention_stablehlo as attention

        assumed = {
            "cuda_versions": SimpleNamespace(cudnn_get_version=lambda: _CUDNN_VERSION),
            "check_compute_capability": lambda capability: True,
            "is_cuda_compute_capability_equal": lambda capability: False,
        }
        with self._lock:
            if not self._blocks and attention.__dict__["cuda_versions"] is None:
                self._originals = {name: attention.__dict__[name] for name in assumed}
                attention.__dict__.update(assumed)
            self._blocks += 1

    def leave(self) -> None:
        """Restore the questions on leaving the last block."""
        from jax._src.cudnn import fused_attention_stablehlo as attention

        with self._lock:
            self._blocks -= 1
            if not self._blocks:
                attention.__dict__.update(self._originals)
                self._originals = {}


_cudnn = _AssumedCudnn()


type _Description = Callable[[Mapping[str, Any], Any], Mapping[str, object]]
"""Maps the parameters of a `pallas_call` and the dtype of its result to the text of its call."""

_description: ContextVar[_Description | None] = ContextVar("description", default=None)


@contextmanager
def opaque_kernels(target: str, describe: _Description) -> Iterator[None]:
    """Lower Pallas kernels for CUDA to custom calls inside the block.

    Without a GPU, Mosaic GPU has no lowering. Triton's lowering is for the GPU of this process,
    which need not be the cluster's. The calls have the operands, results, layouts and aliases of
    the kernels, but can't run. Kernels in interpret mode are lowered as always.

    Args:
        target: target of the custom calls.
        describe: returns the backend_config of the call, as an object of JSON.
    """
    _lower_pallas_calls(target)
    token = _description.set(describe)
    try:
        yield
    finally:
        _description.reset(token)


@functools.cache
def _lower_pallas_calls(target: str) -> None:
    """Register the lowering of Pallas kernels for CUDA, which is JAX's outside of the blocks."""
    from jax._src.interpreters import mlir
    from jax._src.pallas import pallas_call

    def lower(ctx: Any, *operands: Any, **params: Any) -> Any:
        describe = _description.get()
        if describe is None or params["interpret"]:
            return pallas_call._pallas_call_lowering(ctx, *operands, **params)
        return mlir.custom_call(
            target,
            result_types=[mlir.aval_to_ir_type(ctx.module_context, aval) for aval in ctx.avals_out],
            operands=operands,
            backend_config=json.dumps(describe(params, ctx.avals_out[0].dtype)),
            operand_layouts=[range(aval.ndim)[::-1] for aval in ctx.avals_in],
            result_layouts=[range(aval.ndim)[::-1] for aval in ctx.avals_out],
            operand_output_aliases=dict(params["input_output_aliases"]),
        ).results

    mlir.register_lowering(pallas_call.pallas_call_p, lower, platform="cuda")


@functools.cache
def compile_only_devices(
    target_config: str, hosts: int, devices_per_host: int
) -> tuple[Device, ...]:
    """Return stand-ins for absent GPUs, for which programs can be compiled but not run.

    The same arguments return the same devices, so that shardings built at different times agree.

    Args:
        target_config: the text of XLA's GpuTargetConfig, the compiler's description of a GPU.
        hosts: number of hosts.
        devices_per_host: number of GPUs per host.

    Returns:
        `hosts` x `devices_per_host` devices in the order of their ids.

    Raises:
        ImportError: the extra `autopar[compile]` is not installed.
    """
    # imported late because the import is slow
    from jax.experimental import topologies
    from jaxlib import xla_client

    topology = xla_client.make_c_api_device_topology(
        _compiler(), "", target_config=target_config, topology=f"1x{hosts}x{devices_per_host}"
    )
    return tuple(topologies.TopologyDescription(topology._make_compile_only_devices()).devices)


@functools.cache
def _compiler() -> object:
    """Load the plugin as a PJRT API under its own name, which JAX never starts as a backend."""
    from jaxlib import xla_client

    if missing := [wheel for module, wheel in _NEEDED.items() if not _installed(module)]:
        raise ImportError(
            f"compiling for absent GPUs needs {' and '.join(missing)}, not installed;"
            " pip install 'autopar[compile]' (Linux only), or predict without --compiled or with"
            " fidelity='analytic', which compiles nothing"
        )
    # a real "cuda" backend keeps its name
    library = Path(_plugin().__file__ or "").with_name("xla_cuda_plugin.so")
    with _no_stderr():
        api = xla_client.load_pjrt_plugin_dynamically("autopar_target", str(library))
        xla_client.initialize_pjrt_plugin("autopar_target")
    _partition_custom_calls(api)
    return api


def _partition_custom_calls(api: object) -> None:
    """Let the compiler call the rules of `jax.experimental.custom_partitioning`.

    JAX gives them to the plugins that it starts as backends. Without them the compiler replicates
    such calls on all devices, and compiles none of their bodies.
    """
    from jax._src import custom_partitioning
    from jaxlib import xla_client

    xla_client.register_custom_call_partitioner(
        custom_partitioning._CUSTOM_PARTITIONING_CALL_NAME,
        custom_partitioning._custom_partitioning_propagate_user_sharding,
        custom_partitioning._custom_partitioning_partition,
        custom_partitioning._custom_partitioning_infer_sharding_from_operands,
        can_side_effecting_have_replicated_sharding=True,
        c_api=api,
    )


def _plugin() -> ModuleType:
    return importlib.import_module(_PLUGIN)


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is not installed
        return False


@contextmanager
def _no_stderr() -> Iterator[None]:
    """Redirect file descriptor 2 to the null device inside the block.

    Loading the library logs from C++ that no driver was found, which no flag turns off.
    """
    stderr = os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(null)
        os.close(stderr)
