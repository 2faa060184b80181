"""Primitives whose results are their operands: placements, barriers, moves to host memory."""

from jax.extend.core import JaxprEqn

from autopar.ir.array_sizes import array_bytes
from autopar.ir.graph import aval_of
from autopar.primitives.equation_work import Shapes
from autopar.primitives.pointwise import pointwise
from autopar.primitives.registry import PrimitiveRecord
from simulator.work import Kernel


def _host_copy(eqn: JaxprEqn, operands: Shapes, _: Shapes, __: float) -> Kernel:
    size = array_bytes(operands[0], aval_of(eqn.invars[0]).dtype)
    return Kernel(eqn.primitive.name, "host copy", 0.0, size)


_IDENTITY = PrimitiveRecord(movement="identity", is_view=True)
_HOST_COPY = PrimitiveRecord(factors=pointwise, work=_host_copy, is_recomputed=False)

RECORDS = {
    "device_put": _IDENTITY,
    "optimization_barrier": PrimitiveRecord(movement="identity", is_view=True, algebra="linear"),
    "sharding_constraint": _IDENTITY,
    "to_device": _HOST_COPY,
    "to_host": _HOST_COPY,
}
