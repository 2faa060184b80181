"""Fit a cluster whose hosts are processes of one machine to measured transfers and steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log

import numpy as np
from numpy.typing import NDArray

from simulator.calibration.fit_cluster import launch_and_bandwidth
from simulator.engine.shared_cpu import simulate_processes
from simulator.hardware.cluster import Cluster, Processes
from simulator.hardware.collective_profile import SizeCurve
from simulator.hardware.description import ClusterError
from simulator.program import Program

_ZERO_US = 1e-6
"""Microseconds that stand for none, as parameters are fitted by their logarithms."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A measured step over several hosts.

    Attributes:
        program: the program of the step.
        shape: number of hosts, and of devices of each.
        task_seconds: seconds of each task alone, by its name.
        seconds: seconds of the step.
    """

    program: Program
    shape: tuple[int, int]
    task_seconds: Mapping[str, float]
    seconds: float

    def predicted(self, cluster: Cluster) -> float:
        """Return the predicted seconds of the step on as many hosts of a cluster."""
        return simulate_processes(
            self.program, cluster.with_size(*self.shape), self.task_seconds
        ).makespan


def fit_links(
    base: Cluster, within: Sequence[tuple[float, float]], between: Sequence[tuple[float, float]]
) -> Cluster:
    """Return a cluster with links that are fitted to transfers between two devices.

    Args:
        base: the cluster, with a section `inter_host`.
        within: bytes and seconds of transfers within a host.
        between: bytes and seconds of transfers between two hosts.

    Raises:
        ClusterError: the cluster has no section `inter_host`.
    """
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
    """Return a cluster with the section `processes` that fits steps best.

    The fit is least squares of the log error by the simplex method of Nelder and Mead: the error
    has kinks where the order of tasks changes.

    Args:
        base: the cluster with the other sections.
        steps: the measured steps.

    Raises:
        ValueError: there are fewer steps than numbers in the section.
    """
    from scipy.optimize import minimize  # slow to import

    if len(steps) < len(Processes.model_fields):
        raise ValueError(
            f"{len(steps)} steps; expected {len(Processes.model_fields)} at least, one for each "
            "number"
        )

    def cluster(values: NDArray) -> Cluster:
        step, task, extra = (
            number if number > 10 * _ZERO_US else 0.0 for number in np.exp(values).tolist()
        )
        return base.model_copy(
            update={
                "processes": Processes(
                    step_us=step, task_us=task, concurrent_instructions=1 + extra
                )
            }
        )

    def error(values: NDArray) -> float:
        candidate = cluster(values)
        return sum(log(step.predicted(candidate) / step.seconds) ** 2 for step in steps)

    low = np.log([_ZERO_US, _ZERO_US, _ZERO_US])
    high = np.log([1e6, 1e5, 63.0])
    start = np.log([1e3, 1e2, 0.2])
    best = minimize(
        error,
        start,
        method="Nelder-Mead",
        bounds=list(zip(low, high, strict=True)),
        options={"xatol": 0.01},
    )
    return cluster(best.x)
