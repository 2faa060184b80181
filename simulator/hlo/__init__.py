"""The compiled front end: scheduled HLO in, the body that one device launches out, and what it holds. Text only, no JAX."""

from simulator.hlo.liveness import memory_roles_at_peak
from simulator.hlo.op_list import parse_hlo
from simulator.hlo.text import HloError

__all__ = ["HloError", "memory_roles_at_peak", "parse_hlo"]
