"""Schedules by hand: how to run a model, said apart from the model (after Slapo, Chen et al., ASPLOS'24).

create_schedule --directives--> ModelSchedule --place--> every value's layout --build--> a model on shards, or pins for the planner
"""

from autopar.directives.build import Backend, BuiltModel, build
from autopar.directives.compilers import register_compiler
from autopar.directives.definitions import DirectiveError, DirectiveSchedule
from autopar.directives.pattern_matcher import Subgraph
from autopar.directives.scheduled_model import ModelSchedule, create_schedule
from autopar.directives.verify import VerificationError, Verify

__all__ = [
    "Backend",
    "BuiltModel",
    "DirectiveError",
    "DirectiveSchedule",
    "ModelSchedule",
    "Subgraph",
    "VerificationError",
    "Verify",
    "build",
    "create_schedule",
    "register_compiler",
]
