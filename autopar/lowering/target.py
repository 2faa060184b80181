"""Compilation of a step for absent GPUs: XLA:GPU compiles on this machine for a `Cluster`.

The executable cannot run, but its scheduled HLO and its memory are those of the real cluster.
"""

import math
import threading
import time
import warnings
from collections import defaultdict, deque
from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import jax
import numpy as np
from jax.extend.mlir import ir
from jax.sharding import AxisType, Mesh

from autopar import _plugins
from autopar._plugins import Device, compile_only_devices
from autopar.ir.host_memory import HOST_KIND
from autopar.lowering.memory_limit import compile_within, memory_for_programs
from autopar.primitives.pallas_kernels import describe_call
from autopar.util import memory_of
from simulator.hardware.cluster import Cluster
from simulator.hlo import parse_hlo
from simulator.hlo.kernels import KERNEL_TARGET
from simulator.memory import MemoryUse
from simulator.program import Program

# There is no autotuning without a device, and untuned Triton GEMMs get tiny tiles. cuBLAS is what a
# tuned build would mostly choose. CUB's sort asks the CUDA driver for its scratch memory, and there
# is no driver. To tune fusions, XLA would compile each reduction by itself, which is a quarter to a
# third of all compile time, and then could not time it.
_OPTIONS = {
    "xla_gpu_enable_triton_gemm": False,
    "xla_gpu_enable_cub_radix_sort": False,
    "xla_gpu_experimental_enable_fusion_autotuner": False,
    # kernels of libraries that are not here, such as Transformer Engine, are calls without code
    "xla_gpu_mock_custom_calls": True,
}


def opaque_kernels() -> AbstractContextManager[None]:
    """Lower Pallas kernels to calls that state their cost, while the block is entered."""
    return _plugins.opaque_kernels(KERNEL_TARGET, describe_call)


class Lowerable(Protocol):
    """A function that `jax.jit` or `jax.pmap` returns."""

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Lower the function for arguments of these shapes."""
        ...


@dataclass(frozen=True, slots=True)
class TargetExecutable:
    """A step compiled for a cluster.

    Attributes:
        hlo_text: scheduled HLO of one device, which `simulator.hlo.parse_hlo` reads.
        memory: bytes of one device, by the compiler's buffer assignment.
        compile_seconds: seconds of tracing, lowering and compiling, on this machine.
        num_devices: number of devices that take part.
    """

    hlo_text: str
    memory: MemoryUse
    compile_seconds: float
    num_devices: int

    @property
    def program(self) -> Program:
        """The program that every device runs, for `simulator.simulate`."""
        return Program.single(parse_hlo(self.hlo_text), self.num_devices, self.memory)


def target_devices(cluster: Cluster, count: int | None = None) -> tuple[Device, ...]:
    """Return devices of `cluster` to compile for; they cannot run anything.

    To compile a step under `jax.pmap`, pass them as its devices: `jax.pmap(step, "i",
    devices=target_devices(cluster))`.

    Args:
        cluster: the cluster.
        count: number of devices, the first ones of the cluster; by default all.

    Raises:
        ClusterError: the cluster has fewer devices or no GPUs, or `count` is parts of several
            hosts.
    """
    part = cluster.first_devices(cluster.num_devices if count is None else count)
    return compile_only_devices(part.device.xla_target_config(), part.hosts, part.devices_per_host)


def target_mesh(cluster: Cluster, shape: tuple[int, ...], axis_names: tuple[str, ...]) -> Mesh:
    """Return a mesh of Auto axes over the first devices of `cluster`, in row-major order.

    Args:
        cluster: the cluster.
        shape: shape of the mesh.
        axis_names: names of its axes.

    Raises:
        ClusterError: see `target_devices`.
        ValueError: there is not one name for each axis.
    """
    if len(shape) != len(axis_names):
        raise ValueError(
            f"mesh shape {shape} has {len(shape)} axes but {len(axis_names)} names {axis_names};"
            " one each"
        )
    devices = np.array(target_devices(cluster, math.prod(shape))).reshape(shape)
    return Mesh(devices, axis_names, axis_types=(AxisType.Auto,) * len(shape))


def compile_for(
    step: Lowerable,
    args: tuple[Any, ...],
    cluster: Cluster,
    on_host: Sequence[int] = (),
    memory_budget: float | None = None,
) -> TargetExecutable:
    """Compile `step` for the shapes of `args` on `cluster`.

    The devices must be those of the cluster. A jitted step takes them from its `in_shardings` or
    from the shardings of `args` (for example ShapeDtypeStructs), which are over a `target_mesh`; a
    step under `jax.pmap` takes them from its `devices`.

    Args:
        step: a function that `jax.jit` or `jax.pmap` returned.
        args: its arguments.
        cluster: the cluster.
        on_host: the positions of the arrays of `args` that are in host memory.
        memory_budget: bytes of one device; a step that needs more is compiled again with less room
            (`compile_within`).

    Raises:
        ValueError: the step was compiled for other devices.
    """
    start = time.perf_counter()
    with warnings.catch_warnings(), opaque_kernels():
        # JAX's compilation cache cannot read a program that was compiled without a device (jaxlib
        # 0.11.2). It is compiled again.
        warnings.filterwarnings(
            "ignore", message="Error reading persistent compilation cache entry"
        )
        lowered = step.lower(*args)
        _set_memories(lowered.compiler_ir(), on_host)
        options = _OPTIONS | {"xla_gpu_kernel_cache_file": _kernel_file(cluster)}
        available = memory_for_programs(cluster.device.memory_bytes)
        compiled = compile_within(lowered, memory_budget, available, options)
    seconds = time.perf_counter() - start
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    devices = {device for sharding in shardings for device in sharding.device_set}
    if devices != set(target_devices(cluster, len(devices))):
        kinds = ", ".join(sorted({device.device_kind for device in devices})) or "no device"
        raise ValueError(
            f"the step was compiled for {len(devices)} x {kinds}, not for devices of cluster"
            f" {cluster.name!r}; give it shardings over target_mesh(cluster, ...), or for pmap"
            " devices=target_devices(cluster)"
        )
    return TargetExecutable(compiled.as_text() or "", memory_of(compiled), seconds, len(devices))


def _kernel_file(cluster: Cluster) -> str:
    """Return the path of a file in which XLA keeps compiled kernels until this process ends.

    Strategies of a step share most of their kernels, whose code takes a third of the time of
    compilation. There is a file for each kind of GPU and each thread that compiles.

    Args:
        cluster: the cluster whose GPUs the kernels are compiled for.
    """
    folder = Path(_kernel_folder().name)
    folder.mkdir(mode=0o700, exist_ok=True)  # a process forked from this one may have removed it
    target = hash(cluster.device.xla_target_config())
    return str(folder / f"{threading.get_ident()}-{target:x}")


@cache
def _kernel_folder() -> TemporaryDirectory[str]:
    """Return the folder of these files, which is removed when this process ends."""
    return TemporaryDirectory(prefix="autopar-kernels-")


def _set_memories(module: Any, on_host: Sequence[int]) -> None:
    """Mark arguments of a lowered function as arrays in host memory, and match donated ones again.

    JAX knows no memory of absent devices. It takes every argument for an array of a device, and
    lets a result in host memory take the memory of an argument of the device.

    Args:
        module: the module of the function; changed.
        on_host: positions of the arguments in host memory.
    """
    (main,) = (op for op in module.body.operations if op.attributes["sym_name"].value == "main")
    arguments, results = _attributes(main, "arg_attrs"), _attributes(main, "res_attrs")
    with module.context:
        for position in on_host:
            arguments[position][_MEMORY] = ir.StringAttr.get(HOST_KIND)
        if not any(map(_is_on_host, (*arguments, *results))):
            return
        types = ir.FunctionType(main.attributes["function_type"].value)
        unused = defaultdict[Hashable, deque[int]](deque)
        for result, attributes in enumerate(results):
            unused[_alike(types.results[result], attributes)].append(result)
        for argument, attributes in enumerate(arguments):
            own = unused[_alike(types.inputs[argument], attributes)]
            if attributes.pop(_ALIAS, None) is not None and own:
                number = ir.IntegerType.get_signless(32)
                attributes[_ALIAS] = ir.IntegerAttr.get(number, own.popleft())
        main.attributes["arg_attrs"] = ir.ArrayAttr.get(list(map(ir.DictAttr.get, arguments)))


_MEMORY, _ALIAS, _SHARDING = "mhlo.memory_kind", "tf.aliasing_output", "sdy.sharding"
"""Attributes of the arguments and results of a lowered function."""


def _attributes(main: Any, name: str) -> list[dict[str, Any]]:
    """Return the attributes of each argument or result; empty if none has any."""
    if name not in main.attributes:
        return []
    return [{item.name: item.attr for item in ir.DictAttr(each)} for each in main.attributes[name]]


def _is_on_host(attributes: Mapping[str, Any]) -> bool:
    return _MEMORY in attributes and attributes[_MEMORY].value == HOST_KIND


def _alike(array_type: Any, attributes: Mapping[str, Any]) -> Hashable:
    """Return what an argument and a result that share memory have in common."""
    return str(array_type), str(attributes.get(_SHARDING)), _is_on_host(attributes)
