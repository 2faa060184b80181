"""Predictions of the closed-form transformer model beside published measurements."""

from simulator.validation.sets.published_rows import records

__all__ = ["records"]
