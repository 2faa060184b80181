"""The compiled front end: scheduled HLO in, the body that one device launches out. Text only, no JAX."""

from simulator.hlo.body import parse_hlo
from simulator.hlo.text import HloError

__all__ = ["HloError", "parse_hlo"]
