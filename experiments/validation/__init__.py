"""Predictions beside published measurements."""
