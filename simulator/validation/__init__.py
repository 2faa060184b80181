"""Predictions of the closed-form transformer model beside published measurements."""

from simulator.validation.case_tables import published_cases
from simulator.validation.sets.published_rows import records

__all__ = ["published_cases", "records"]
