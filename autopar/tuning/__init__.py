"""Finding the best of many ways to run a step, by the simulator, and by measuring the best few (after Slapo's tuner)."""

from autopar.tuning.space import Candidate, Domain, Space
from autopar.tuning.trials import Trial, Tuned
from autopar.tuning.tuner import Make, tune

__all__ = ["Candidate", "Domain", "Make", "Space", "Trial", "Tuned", "tune"]
