"""Schedules by hand: how to run a model, said apart from the model (after Slapo, Chen et al., ASPLOS'24).

create_schedule --directives--> ModelSchedule --place--> every value's layout --build--> a model on shards, or pins for the planner
"""

from autopar.schedule.build import Built, build
from autopar.schedule.compilers import register_compiler
from autopar.schedule.directives import Schedule, ScheduleError
from autopar.schedule.matcher import Subgraph
from autopar.schedule.model import ModelSchedule, create_schedule
from autopar.schedule.verify import VerificationError, Verify

__all__ = [
    "Built",
    "ModelSchedule",
    "Schedule",
    "ScheduleError",
    "Subgraph",
    "VerificationError",
    "Verify",
    "build",
    "create_schedule",
    "register_compiler",
]
