"""Search for the fastest way to run a step, by simulation and measurement (after Slapo's tuner)."""

from autopar.tuning.search_space import Candidate, Domain, SearchSpace
from autopar.tuning.trials import Trial, TuningResult
from autopar.tuning.tuner import StepFactory, tune

__all__ = ["Candidate", "Domain", "SearchSpace", "StepFactory", "Trial", "TuningResult", "tune"]
