"""The compiled front end: scheduled HLO in, the body that one device launches out, and what it holds. Text only, no JAX."""

from simulator.hlo.body import parse_hlo
from simulator.hlo.liveness import held_at_peak
from simulator.hlo.text import HloError

__all__ = ["HloError", "held_at_peak", "parse_hlo"]
