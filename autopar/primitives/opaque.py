"""Primitives that every device computes whole, for want of a better rule."""

from autopar.primitives.registry import PrimitiveRecord
from autopar.primitives.rule_helpers import replicated

_WHOLE = PrimitiveRecord(factors=replicated)

RECORDS = {
    "cholesky_update": _WHOLE,
    "custom_linear_solve": _WHOLE,
    "pure_callback": _WHOLE,
    "rng_bit_generator": _WHOLE,
    "rng_uniform": _WHOLE,
}
