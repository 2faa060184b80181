"""The compiled front end: scheduled HLO text to the op list of a device, and to memory roles.

It reads text and needs no JAX.
"""

from simulator.hlo.liveness import temporary_memory
from simulator.hlo.op_list import parse_hlo
from simulator.hlo.text import HloError

__all__ = ["HloError", "parse_hlo", "temporary_memory"]
