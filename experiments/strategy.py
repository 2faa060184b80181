"""Strategies of the sweep, and what those that compile one program for all devices share."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import autopar
from experiments.models.model import Model
from simulator import Cluster, Program, Timeline, simulate

type Shape = tuple[int, ...]
"""Devices along each axis of a logical mesh."""


@dataclass(frozen=True, slots=True)
class Runnable:
    """A compiled step and its arguments on their devices.

    Attributes:
        step: runs the step on (state, batch).
        args: (state, batch), distributed; the step may donate the state.
        gather: turns a distributed result into the arrays that the serial step returns.
        memory_bytes: bytes that the step needs on one device.
        compile_seconds: seconds of compiling it.
    """

    step: Callable[..., Any]
    args: tuple[Any, Any]
    gather: Callable[[Any], Any]
    memory_bytes: int
    compile_seconds: float


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """A simulated step.

    Attributes:
        program: the program, compiled for the cluster.
        timeline: its timeline.
        compile_seconds: seconds of compiling it on this machine.
    """

    program: Program
    timeline: Timeline
    compile_seconds: float


class Strategy(ABC):
    """A way to run a training step on several devices."""

    @abstractmethod
    def runs_on(self, model: Model, mesh: Shape) -> bool:
        """Return whether the strategy applies to the model on a mesh of that shape.

        The sweep leaves out the cells to which it does not.
        """

    def plan(self, model: Model, mesh: Shape, cluster: Cluster) -> autopar.Plan | None:
        """Return the plan for a step; None if there is nothing to decide. Uses no device."""
        return None

    @abstractmethod
    def prepare(
        self, model: Model, mesh: Shape, plan: autopar.Plan | None, args: tuple[Any, Any]
    ) -> Runnable:
        """Compile for the devices of this process, and move the host arrays `args` there."""

    @abstractmethod
    def predict(
        self, model: Model, mesh: Shape, plan: autopar.Plan | None, cluster: Cluster
    ) -> SimulatedStep:
        """Compile for `cluster` and simulate. Uses no device."""


def compile_here(step: Any, args: tuple[Any, Any]) -> tuple[Any, float]:
    """Return a jitted or pmapped function, compiled for the devices of `args`, and the seconds."""
    start = time.perf_counter()
    return step.lower(*args).compile(), time.perf_counter() - start


def simulated(executable: autopar.TargetExecutable, cluster: Cluster) -> SimulatedStep:
    """Simulate a step that every device of one mesh runs alike."""
    program = executable.program
    return SimulatedStep(program, simulate(program, cluster), executable.compile_seconds)
