"""A model of XLA:GPU: how it fuses a step into kernels, and which values it then stores.

This is the only interface to the model. `traffic` returns what each equation adds to the reads and
writes of its kernel, `stored_values` the values that are written to device memory, `lifetimes`,
`readings` and `pooling_zeros` when they are live, `padded_dims` where they are padded. The model is
written by hand for `XLA_VERSION`; `experiments.validation.fidelity` compares it with compiled
programs, and has to run again when jaxlib changes.
"""

from autopar.xla_fusion.epilogues import epilogues
from autopar.xla_fusion.fusion import Moved, Traffic, traffic
from autopar.xla_fusion.lifetimes import lifetimes, pooling_zeros, readings, stored_values
from autopar.xla_fusion.padding import Groups, padded_dims, padding_factor
from autopar.xla_fusion.reductions import takes_two_kernels
from autopar.xla_fusion.views import is_relaid, is_view

__all__ = [
    "XLA_VERSION",
    "Groups",
    "Moved",
    "Traffic",
    "epilogues",
    "is_relaid",
    "is_view",
    "lifetimes",
    "padded_dims",
    "padding_factor",
    "pooling_zeros",
    "readings",
    "stored_values",
    "takes_two_kernels",
    "traffic",
]

XLA_VERSION = "0.11.2"
"""The version of jaxlib whose fusion the model describes."""
