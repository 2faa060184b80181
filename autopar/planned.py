"""A step and the plan for it, which belong together."""

from dataclasses import dataclass
from typing import Protocol

from autopar.plan import Plan
from autopar.trace import StepGraph


class Planned(Protocol):
    """A step and the plan for it: an `Executable`, or a `PlannedStep`."""

    @property
    def step(self) -> StepGraph: ...
    @property
    def plan(self) -> Plan: ...


@dataclass(frozen=True)
class PlannedStep:
    """A traced step and the plan for it, for devices that need not be here.

    Raises:
        PlanError: the plan is for another step.
    """

    step: StepGraph
    plan: Plan

    def __post_init__(self) -> None:
        self.plan.check(self.step.fingerprint)
