"""Measurements that the simulator is calibrated with."""
