"""Measurements that the simulator is calibrated with, or compared with."""
