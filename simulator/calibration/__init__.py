"""Calibration: parameters of cost models fitted to measurements, with errors on held-out rows."""

from simulator.calibration.fit_profiles import COLUMNS, fit_collective_profile
from simulator.calibration.fit_shared_cpu import MeasuredStep, fit_links, fit_processes
from simulator.calibration.shipped_profiles import write_profile

__all__ = [
    "COLUMNS",
    "MeasuredStep",
    "fit_collective_profile",
    "fit_links",
    "fit_processes",
    "write_profile",
]
