"""What a strategy of the sweep is, and what those that compile one program for all devices share."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import autopar
from experiments.models.model import Model
from simulator import Cluster, Timeline, simulate

type Shape = tuple[int, ...]
"""Devices along each axis of a logical mesh."""


@dataclass(frozen=True, slots=True)
class Runnable:
    """A compiled step, its arguments on their devices, and what they cost.

    Attributes:
        args: (state, batch), distributed; the step may donate the state.
        gather: turns a distributed result into the arrays that the serial step returns.
        memory_bytes: on one device, for one step.
    """

    step: Callable[..., Any]
    args: tuple[Any, Any]
    gather: Callable[[Any], Any]
    memory_bytes: int
    compile_seconds: float


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """A step on a simulated clock, and the seconds that compiling it took here."""

    timeline: Timeline
    compile_seconds: float


class Strategy(Protocol):
    """A way to run a training step on several devices."""

    def runs_on(self, model: Model, mesh: Shape) -> bool:
        """Whether the strategy means anything for the model on a mesh of that shape; if not, the sweep leaves the cell out."""
        ...

    def plan(self, model: Model, mesh: Shape, cluster: Cluster) -> autopar.Plan | None:
        """Decide everything that needs deciding; None if nothing does. Touches no device."""
        ...

    def prepare(
        self, model: Model, mesh: Shape, plan: autopar.Plan | None, args: tuple[Any, Any]
    ) -> Runnable:
        """Compile for the devices present, and distribute the host arrays `args` over them."""
        ...

    def predict(
        self, model: Model, mesh: Shape, plan: autopar.Plan | None, cluster: Cluster
    ) -> SimulatedStep:
        """Compile for `cluster` and simulate. Touches no device."""
        ...


def compile_here(step: Any, args: tuple[Any, Any]) -> tuple[Any, float]:
    """`step` (a jitted or pmapped function) compiled for the devices of `args`, and the seconds that took."""
    start = time.perf_counter()
    return step.lower(*args).compile(), time.perf_counter() - start


def simulated(executable: autopar.TargetExecutable, cluster: Cluster) -> SimulatedStep:
    """Time a step that every device of one mesh runs alike."""
    return SimulatedStep(simulate(executable.program, cluster), executable.compile_seconds)
