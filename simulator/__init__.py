"""Simulates programs on clusters that need not be here: describe the hardware, what runs on it, and read the timeline.

>>> from simulator import Cluster, Gemm, Kernel, Program, Run, simulate
>>> product = Kernel("matmul", "gemm", flops=2 * 4096**3, bytes=3 * 4 * 4096**2, gemm=Gemm(4096, 4096, 4096))
>>> program = Program.single((product,))
>>> timeline = simulate(program, Cluster.load("p3.16xlarge"))
>>> f"{timeline.makespan * 1e3:.1f} ms"
'9.7 ms'

`predict` says where the time goes, what a device holds and how well it is used; `Clock` finds the time alone, in no time.

It knows nothing of JAX: `simulator.hlo` reads compiled programs as text, everything else is plain numbers. `simulator.transformer` predicts
transformers by their sizes, `python -m simulator` does so from files and compares with published numbers.
"""

from simulator.backend import BACKENDS, Backend
from simulator.costs.cost_model import (
    BandwidthOnly,
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
from simulator.hardware.cluster import Cluster, Device, Link, cluster_files, cluster_names
from simulator.hardware.description import ClusterError
from simulator.hardware.heterogeneous import HeterogeneousCluster, load_cluster
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
    "BandwidthOnly",
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
    "parse_instruction",
    "predict",
    "prediction_of",
    "save_program",
    "simulate",
    "unmodelled_kernels",
    "walk",
    "work_of",
]
