"""Layers: the runs of equations that make up stages, marked by hand or found by clustering."""
