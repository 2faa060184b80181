"""Directives: how to run a model, written separately from the model (after Slapo, ASPLOS'24).

    create_schedule --directives--> ModelSchedule --place--> layout of every value --build--> model

`build` returns a function that runs on shards, or one that pins the directives' decisions for the
planner. Slapo is described by Chen et al., "Slapo: A Schedule Language for Progressive
Optimization of Large Deep Learning Model Training".
"""

from autopar.directives.build_model import Backend, BuiltModel, build
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
]
