"""Predictions of the closed-form transformer model beside published measurements."""

from simulator.validation.case_tables import published_cases, published_outcomes
from simulator.validation.sets.published_rows import records

__all__ = ["published_cases", "published_outcomes", "records"]
