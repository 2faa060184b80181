"""Fits a cluster whose hosts are processes of one machine to transfers and steps that were measured there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from simulator.calibration.fit_cluster import launch_and_bandwidth
from simulator.engine.shared_cpu import simulate_processes
from simulator.hardware.cluster import Cluster, Processes
from simulator.hardware.collective_profile import SizeCurve
from simulator.hardware.description import ClusterError
from simulator.program import Program

_LEAST = 1e-6
"""Microseconds that count as none, so that there is a logarithm."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step over several hosts.

    Attributes:
        shape: hosts, and devices of each.
        task_seconds: of each task by itself.
        seconds: of the step.
    """

    program: Program
    shape: tuple[int, int]
    task_seconds: Mapping[str, float]
    seconds: float

    def predicted(self, cluster: Cluster) -> float:
        """Seconds of the step on so many hosts of `cluster`."""
        return simulate_processes(
            self.program, cluster.with_size(*self.shape), self.task_seconds
        ).makespan


def fit_links(
    base: Cluster, within: Sequence[tuple[float, float]], between: Sequence[tuple[float, float]]
) -> Cluster:
    """The cluster with the transfers between two devices that were measured: (bytes, seconds), within a host and between two."""
    if base.inter_host is None:
        raise ClusterError(
            f"cluster {base.name!r} has one host; expected one with a section inter_host"
        )
    launch, bandwidth, half_size = launch_and_bandwidth(within)
    permute = SizeCurve(
        launch_us=launch * 1e6,
        hop_us=0.0,
        half_size_mb=half_size / 1e6,
        bandwidth_gb_per_s=bandwidth / 1e9,
    )
    launch, bandwidth, half_size = launch_and_bandwidth(between)
    inter = base.inter_host.model_copy(
        update={
            "latency_us": max(0.0, launch * 1e6 - base.collective_launch_us),
            "half_size_mb": half_size / 1e6,
            "bandwidth_gb_per_s": bandwidth / 1e9,
        }
    )
    collectives = base.curves.model_copy(update={"collective_permute": permute})
    return base.model_copy(update={"collectives": collectives, "inter_host": inter})


def fit_processes(base: Cluster, steps: Sequence[MeasuredStep]) -> Cluster:
    """The cluster with what steps and tasks cost a host, and how many instructions go on at once, as fits the steps best.

    Least squares of the logarithm of predicted over measured, by the simplex of Nelder and Mead, as tasks that change places make kinks.
    """
    if len(steps) < len(Processes.model_fields):
        raise ValueError(
            f"{len(steps)} steps; expected {len(Processes.model_fields)} at least, one for each number"
        )

    def cluster(values: NDArray) -> Cluster:
        step, task, more = (each if each > 10 * _LEAST else 0.0 for each in np.exp(values).tolist())
        return base.model_copy(
            update={
                "processes": Processes(step_us=step, task_us=task, concurrent_instructions=1 + more)
            }
        )

    def error(values: NDArray) -> float:
        found = cluster(values)
        return sum(log(each.predicted(found) / each.seconds) ** 2 for each in steps)

    low, high = np.log([_LEAST, _LEAST, _LEAST]), np.log([1e6, 1e5, 63.0])
    start = np.log([1e3, 1e2, 0.2])
    best = minimize(
        error,
        start,
        method="Nelder-Mead",
        bounds=list(zip(low, high, strict=True)),
        options={"xatol": 0.01},
    )
    return cluster(best.x)
