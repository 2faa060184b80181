"""Compile a step for GPUs that are not here: XLA:GPU runs on this machine, for the devices of a `Cluster`.

The executable can't run, but its scheduled HLO and its memory are what the real cluster would get.
"""

import math
import time
import warnings
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from autopar._plugins import Device, compile_only_devices
from autopar.util import memory_of
from simulator.hardware.cluster import Cluster
from simulator.hlo import parse_hlo
from simulator.memory import MemoryUse
from simulator.program import Program

# Without a device there is no autotuning, and untuned Triton GEMMs get tiny tiles: take cuBLAS, as a tuned build mostly would.
# CUB's sort asks the CUDA driver how much scratch memory it needs, and there is none.
_OPTIONS = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_enable_cub_radix_sort": False}


class Lowerable(Protocol):
    """What `jax.jit` and `jax.pmap` return."""

    def lower(self, *args: Any, **kwargs: Any) -> Any: ...


@dataclass(frozen=True, slots=True)
class TargetExecutable:
    """A step compiled for a cluster.

    Attributes:
        hlo_text: what one device runs, scheduled; `simulator.hlo.parse_hlo` reads it.
        memory: bytes on one device, by the compiler's buffer assignment.
        compile_seconds: tracing, lowering and compiling, on this machine.
        num_devices: how many devices take part.
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
    """The first `count` (default: all) devices of `cluster`, to compile for but not to run on.

    To compile a `jax.pmap`ped step for the cluster give them as its devices: `jax.pmap(step, "i", devices=target_devices(cluster))`.
    Raises `ClusterError` for more devices than there are, parts of several hosts, or a cluster whose devices are not GPUs.
    """
    part = cluster.first_devices(cluster.num_devices if count is None else count)
    return compile_only_devices(part.device.xla_target_config(), part.hosts, part.devices_per_host)


def target_mesh(cluster: Cluster, shape: tuple[int, ...], axis_names: tuple[str, ...]) -> Mesh:
    """A mesh of Auto axes over the first devices of `cluster`, row by row; errors as `target_devices`."""
    if len(shape) != len(axis_names):
        raise ValueError(
            f"mesh shape {shape} has {len(shape)} axes but {len(axis_names)} names {axis_names}; one each"
        )
    devices = np.array(target_devices(cluster, math.prod(shape))).reshape(shape)
    return Mesh(devices, axis_names, axis_types=(AxisType.Auto,) * len(shape))


def compile_for(step: Lowerable, args: tuple[Any, ...], cluster: Cluster) -> TargetExecutable:
    """Compile `step` (a jitted or pmapped function) for the shapes of `args` on `cluster`.

    The devices must be the cluster's: a jitted step takes them from its `in_shardings` or from the shardings of `args`
    (ShapeDtypeStructs, say), which are over a `target_mesh`; a pmapped one from its `devices`. Raises ValueError if they are not.
    """
    start = time.perf_counter()
    with warnings.catch_warnings():
        # What was compiled without a device can't be read from JAX's compilation cache (jaxlib 0.11.2): it is compiled again.
        warnings.filterwarnings(
            "ignore", message="Error reading persistent compilation cache entry"
        )
        compiled = step.lower(*args).compile(compiler_options=_OPTIONS)
    seconds = time.perf_counter() - start
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    devices = {device for sharding in shardings for device in sharding.device_set}
    if devices != set(target_devices(cluster, len(devices))):
        kinds = ", ".join(sorted({device.device_kind for device in devices})) or "no device"
        raise ValueError(
            f"the step was compiled for {len(devices)} x {kinds}, not for devices of cluster {cluster.name!r}; give it "
            "shardings over target_mesh(cluster, ...), or for pmap devices=target_devices(cluster)"
        )
    return TargetExecutable(compiled.as_text(), memory_of(compiled), seconds, len(devices))
