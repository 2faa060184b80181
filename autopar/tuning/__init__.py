"""Finding the best of many ways to run a step, by the simulator, and by measuring the best few (after Slapo's tuner)."""

from autopar.tuning.search_space import Candidate, Domain, SearchSpace
from autopar.tuning.trials import Trial, TuningResult
from autopar.tuning.tuner import Make, tune

__all__ = ["Candidate", "Domain", "Make", "SearchSpace", "Trial", "TuningResult", "tune"]
