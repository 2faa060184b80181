"""The software that drives devices: its costs on the host, for scenarios and for programs."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

SOFTWARE_DEVIATION = 0.04
"""Standard deviation of the relative error of a step that comes from software, its versions and its
kernels, where these are known. It is about what the mean errors of sets of published steps have."""

ExpertKernels = Literal["looped", "grouped", "fused"]
CapturedPart = Literal["mixer", "router"]


@dataclass(frozen=True, slots=True)
class Backend:
    """Costs of launches on the host, fusion of the update, and use of the network.

    Attributes:
        name: the name that users give.
        kernel_us: microseconds of the host for a kernel. A device that computes a kernel faster
            waits for the host.
        step_us: microseconds of the host for a step, beside its kernels.
        update_bytes: bytes per parameter that the optimizer reads and writes, clipping and
            unscaling included. Only scenarios read it; a program has its own kernels.
        max_nics: NICs of a host that a group spreads over, at most; None for all of them. Only
            scenarios read it.
        regathers: whether parameters sharded over the data axis are gathered once more for remat.
            Only scenarios read it.
        fused_casts: whether casts to 8 bits are part of the norm or the activation before a
            product, and those of weights are made once per step. Only scenarios read it.
        gathers_casts: whether inputs and gradients that the tensor axis gathers, and parameters
            that the data axis gathers, are cast to the type of the products before. Only scenarios
            read it.
        fragmentation: part of the bytes of activations and temporaries that is lost between
            allocations. Only scenarios read it.
        tensor_contention: factor by which products and the tensor collectives that overlap with
            them slow each other; that of the link by default. Only scenarios read it.
        expert_kernels: how the products of a device's experts are launched: one by one ("looped"),
            as one kernel for all experts ("grouped"), or so with casts and activation as its
            prologue and epilogue ("fused"). Only scenarios read it.
        captured: parts of a layer that are a CUDA graph, which the host launches as one kernel: the
            mixer with its norm, and the router of experts. Only scenarios read it.
        deviation: standard deviation of the relative error of a step that comes from the kernels of
            the backend and from its versions. Only scenarios read it.
        instruction_us: microseconds of the host for an instruction of a program: the issue of a
            task, a send or a receive.
    """

    name: str
    kernel_us: float
    step_us: float
    update_bytes: float
    max_nics: int | None = None
    regathers: bool = False
    fused_casts: bool = False
    gathers_casts: bool = False
    fragmentation: float = 0.0
    tensor_contention: float | None = None
    expert_kernels: ExpertKernels = "grouped"
    captured: tuple[CapturedPart, ...] = ()
    deviation: float = SOFTWARE_DEVIATION
    instruction_us: float = 0.0


EAGER = Backend(
    "eager",
    kernel_us=54.4,
    step_us=5.1e3,
    update_bytes=60.0,
    fragmentation=0.05,
    instruction_us=54.4,
)
"""PyTorch as Megatron-LM uses it, kernel by kernel.

Its caching allocator doesn't move blocks. The part that it loses to fragmentation was chosen by the
outcomes of 211 published layouts, of which 129 ran out of memory.

`python -m simulator.validation.fit_backends` fits both times of the host to 40 rows of vTrain's
single-node table. The issue of an instruction is assumed to cost as much as a launch.
"""

MEGATRON_CORE = replace(
    EAGER,
    name="megatron-core",
    update_bytes=40.0,
    fused_casts=True,
    gathers_casts=True,
    tensor_contention=1.1,
    expert_kernels="looped",
)
"""Megatron-Core with Transformer Engine: casts to 8 bits are fused and precede gathers (its modules
Linear and LayerNormLinear; fp8_param_gather), and collectives over the tensor axis are copies by
DMA engines (userbuffers), which share only memory bandwidth with the products that they overlap
with. Apex's fused optimizer reads gradient and three states in f32 and writes the states and the
parameter; clipping reads the gradient twice. Its grouped products launch a product of cuBLAS per
expert."""

MEGATRON_GRAPHS = replace(
    MEGATRON_CORE, name="megatron-graphs", kernel_us=0.6, step_us=200.0, expert_kernels="fused"
)
"""Megatron-Core whose steps are one CUDA graph, with experts in one kernel of CuTe DSL, as NVIDIA's
recipes for Blackwell since container 26.06 (github.com/NVIDIA-NeMo/Megatron-Bridge,
scripts/performance/configs: cuda_graph_impl full_iteration, cutedsl_fused_grouped_mlp)."""

ZERO_2021 = replace(EAGER, name="zero-2021", max_nics=1, regathers=True)
"""The first ZeRO-3 of DeepSpeed: an all_gather is one ring, through one NIC of each host."""

JITTED = Backend(
    "jitted",
    kernel_us=1.0,
    step_us=200.0,
    update_bytes=32.0,
    deviation=0.12,
    instruction_us=20.0,
)
"""A compiled step: launches are cheap and the update is one fusion. The numbers are estimates, not
fitted to measurements, and which kernels XLA fuses is assumed: published steps of JAX have a mean
error of 10 %, as errors with a standard deviation of 12 % have."""

CUDA_GRAPH = replace(JITTED, name="cuda-graph", kernel_us=0.6, instruction_us=15.0)
"""A compiled step whose kernels are recorded and launched together: 15 us a launch and 0.6 us a
kernel. Both were measured with empty kernels on an RTX 5070 Ti (github.com/ahrefs/ocannl, issue
488), where kernels launched one by one take 2.7 us. All other costs are assumed to be those of
`JITTED`. The gap between kernels on the device is unchanged."""

BACKENDS: Mapping[str, Backend] = {
    backend.name: backend
    for backend in (
        EAGER,
        MEGATRON_CORE,
        MEGATRON_GRAPHS,
        JITTED,
        CUDA_GRAPH,
        ZERO_2021,
    )
}


def backend_named(name: str) -> Backend:
    """Return one of `BACKENDS`.

    Raises:
        ValueError: the name is unknown.
    """
    if name not in BACKENDS:
        raise ValueError(f"unknown backend {name!r}; expected one of {', '.join(BACKENDS)}")
    return BACKENDS[name]
