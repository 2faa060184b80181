"""Layers: the runs of equations that pipeline stages are made of, marked by hand or found by clustering."""
