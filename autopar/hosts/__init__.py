"""Execution of plans on the hosts of a Ray cluster, by a driver and a worker on each host."""
