"""Execution of plans on the hosts of a Ray cluster: a driver without accelerators, workers with."""
