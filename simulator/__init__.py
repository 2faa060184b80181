"""Simulation of programs on clusters that need not exist on this machine.

Describe the hardware and the program, and read the timeline.

>>> from simulator import Cluster, Gemm, Kernel, Program, Run, simulate
>>> sizes = Gemm(4096, 4096, 4096)
>>> product = Kernel("matmul", "gemm", flops=sizes.flops, bytes=3 * 4 * 4096**2, gemm=sizes)
>>> program = Program.single((product,))
>>> timeline = simulate(program, Cluster.load("p3.16xlarge"))
>>> f"{timeline.makespan * 1e3:.1f} ms"
'9.7 ms'

`predict` adds the breakdown of the time, the memory by role and the utilization. `Clock` computes
the time alone, in a millisecond.

The package doesn't import JAX: `simulator.hlo` reads compiled programs as text, and all other input
is plain numbers. `simulator.transformer` predicts transformers from their sizes. `python -m
simulator` predicts from files, and compares predictions with published measurements.
"""

from simulator.backend import BACKENDS, Backend
from simulator.costs.cost_model import (
    ClusterCosts,
    CostModel,
    HeterogeneousCosts,
    costs_of,
)
from simulator.engine.breakdown import predict, prediction_of
from simulator.engine.clock import Clock
from simulator.engine.prediction import Prediction
from simulator.engine.simulation import simulate
from simulator.engine.timeline import Timeline
from simulator.engine.trace_reading import load_timeline
from simulator.hardware.cluster import Cluster, Link
from simulator.hardware.cluster_paths import cluster_files, cluster_names
from simulator.hardware.description import ClusterError
from simulator.hardware.device import Device
from simulator.hardware.heterogeneous import HeterogeneousCluster, load_cluster
from simulator.kernel_costs import KernelCost, register_kernel_cost
from simulator.memory import Footprint, MemoryUse
from simulator.program import DeadlockError, Free, Program, Recv, Run, Send, parse_instruction, walk
from simulator.program_file import ProgramError, load_program, save_program
from simulator.spans import Span
from simulator.work import (
    Collective,
    CollectiveKind,
    Done,
    Gemm,
    Kernel,
    Loop,
    OpList,
    Start,
    Work,
    unmodelled_kernels,
    work_of,
)

__all__ = [
    "BACKENDS",
    "Backend",
    "Clock",
    "Cluster",
    "ClusterCosts",
    "ClusterError",
    "Collective",
    "CollectiveKind",
    "CostModel",
    "DeadlockError",
    "Device",
    "Done",
    "Footprint",
    "Free",
    "Gemm",
    "HeterogeneousCluster",
    "HeterogeneousCosts",
    "Kernel",
    "KernelCost",
    "Link",
    "Loop",
    "MemoryUse",
    "OpList",
    "Prediction",
    "Program",
    "ProgramError",
    "Recv",
    "Run",
    "Send",
    "Span",
    "Start",
    "Timeline",
    "Work",
    "cluster_files",
    "cluster_names",
    "costs_of",
    "load_cluster",
    "load_program",
    "load_timeline",
    "parse_instruction",
    "predict",
    "prediction_of",
    "register_kernel_cost",
    "save_program",
    "simulate",
    "unmodelled_kernels",
    "walk",
    "work_of",
]
