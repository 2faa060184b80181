"""The software that drives devices: what it costs the host, for scenarios and for programs."""

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Backend:
    """What a launch costs the host, how well things are fused, and how the network is used.

    Attributes:
        kernel_us: of the host for a kernel; a device that computes faster than that waits for the host.
        step_us: of the host for a step, beside its kernels.
        update_bytes: read and written per parameter by the optimizer, clipping and unscaling included; a program has its own kernels.
        max_nics: NICs of a host that a group spreads over, at most; None for all of them. Only scenarios read it.
        regathers: whether parameters divided over the data axis are gathered once more to recompute activations. Only scenarios
            read it.
        instruction_us: of the host for an instruction of a program: handing over a task, a send or a receive.
    """

    name: str
    kernel_us: float
    step_us: float
    update_bytes: float
    max_nics: int | None = None
    regathers: bool = False
    instruction_us: float = 0.0


EAGER = Backend("eager", kernel_us=54.4, step_us=5.1e3, update_bytes=60.0, instruction_us=54.4)
"""PyTorch as Megatron-LM uses it, kernel by kernel. Both times of the host are fitted to 40 rows of vTrain's single-node table; a send is
taken to be a launch like any other."""

ZERO_2021 = replace(EAGER, name="zero-2021", max_nics=1, regathers=True)
"""The first ZeRO-3 of DeepSpeed: a gather is one ring, through one NIC of each host."""

JITTED = Backend("jitted", kernel_us=1.0, step_us=200.0, update_bytes=32.0, instruction_us=20.0)
"""A compiled step: launches are cheap, the update is one fusion. Estimates: nothing was fitted to them."""

CUDA_GRAPH = replace(JITTED, name="cuda-graph", kernel_us=0.6, instruction_us=15.0)
"""A compiled step whose kernels are recorded and launched together: 15 us a launch and 0.6 us a kernel, measured with kernels that do
nothing on an RTX 5070 Ti (github.com/ahrefs/ocannl, issue 488), where kernels launched one by one take 2.7. What a step costs besides is taken
to be as in `JITTED`. The gap between kernels on the device stays as it is."""

BACKENDS: Mapping[str, Backend] = {
    backend.name: backend for backend in (EAGER, JITTED, CUDA_GRAPH, ZERO_2021)
}


def backend_named(name: str) -> Backend:
    """One of `BACKENDS`; an unknown name: `ValueError`."""
    if name not in BACKENDS:
        raise ValueError(f"unknown backend {name!r}; expected one of {', '.join(BACKENDS)}")
    return BACKENDS[name]
