"""Primitives whose results are their operands: placements and barriers."""

from autopar.primitives.registry import PrimitiveRecord

_IDENTITY = PrimitiveRecord(movement="identity", is_view=True)

RECORDS = {
    "device_put": _IDENTITY,
    "optimization_barrier": PrimitiveRecord(movement="identity", is_view=True, algebra="linear"),
    "sharding_constraint": _IDENTITY,
}
