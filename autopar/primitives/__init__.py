"""What planning knows of JAX's primitives, and the functions that look it up for an equation.

`autopar.primitives.registry` documents the records and how to add one. Each family of primitives
has a module with its records.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jax.extend.core import JaxprEqn

from autopar.ir import control_flow
from autopar.ir.array_sizes import hlo_dtype
from autopar.ir.evaluate import bind
from autopar.ir.graph import aval_of
from autopar.ir.spec import LogicalMesh, Spec, local_shape
from autopar.primitives import (
    collectives,
    contractions,
    fused_attention,
    index,
    library_markers,
    linalg,
    loops,
    moves,
    opaque,
    order,
    pallas_kernels,
    pointwise,
    ragged_products,
    random,
    reduce,
    shape,
    shard_map,
)
from autopar.primitives.factors import OpFactors
from autopar.primitives.registry import (
    MissingRuleError,
    PrimitiveRecord,
    is_registered,
    record_of,
    register,
)
from simulator.array_type import Array
from simulator.kernel_costs import has_cost, registered_kernel
from simulator.work import Kernel

__all__ = [
    "FAMILIES",
    "MissingRuleError",
    "PrimitiveRecord",
    "bind_shards",
    "is_product",
    "kernel_name",
    "kernel_of",
    "op_factors",
    "record_of",
    "register",
    "runs_on_shards",
]

FAMILIES = {
    "collectives": collectives.RECORDS,
    "contractions": contractions.RECORDS,
    "fused_attention": fused_attention.RECORDS,
    "index": index.RECORDS,
    "library_markers": library_markers.RECORDS,
    "linalg": linalg.RECORDS,
    "loops": loops.RECORDS,
    "moves": moves.RECORDS,
    "opaque": opaque.RECORDS,
    "order": order.RECORDS,
    "pallas_kernels": pallas_kernels.RECORDS,
    "pointwise": pointwise.RECORDS,
    "ragged_products": ragged_products.RECORDS,
    "random": random.RECORDS,
    "reduce": reduce.RECORDS,
    "shape": shape.RECORDS,
    "shard_map": shard_map.RECORDS,
}
"""The records by family, and by primitive or JAX's name of it."""

for _family in FAMILIES.values():
    for _primitive, _record in _family.items():
        register(_primitive, _record)


def op_factors(eqn: JaxprEqn) -> OpFactors:
    """Return the factors of `eqn`, which say how its dims may be sharded.

    Raises:
        MissingRuleError: the primitive has no record, and has effects or works on something other
            than arrays.
    """
    return record_of(eqn).factors(eqn)


def is_product(eqn: JaxprEqn) -> bool:
    """Return whether an equation of a flat jaxpr is a matrix product or convolution."""
    is_computed = bool(eqn.outvars) and eqn.primitive not in control_flow.MARKERS
    return is_computed and kernel_of(eqn).kind in ("gemm", "conv")


def kernel_of(
    eqn: JaxprEqn, moved_bytes: float = 0.0, shards: Sequence[tuple[int, ...]] | None = None
) -> Kernel:
    """Return the kernel of `eqn` on one device.

    Args:
        eqn: the equation.
        moved_bytes: bytes that it reads from and writes to device memory; less than the bytes of
            its operands and results if it is fused.
        shards: shapes of the shards of its operands and of its results, before partial sums are
            completed; None if nothing is sharded.
    """
    atoms = (*eqn.invars, *eqn.outvars)
    if shards is None:
        shards = [aval_of(atom).shape for atom in atoms]
    count = len(eqn.invars)
    name = kernel_name(eqn)
    if has_cost(name):
        arrays = [
            Array(hlo_dtype(aval_of(atom).dtype), tuple(shape))
            for atom, shape in zip(atoms, shards, strict=True)
        ]
        return registered_kernel(name, arrays[:count], arrays[count:], name)
    kernel = record_of(eqn).work(eqn, shards[:count], shards[count:], moved_bytes)
    return kernel if is_registered(eqn.primitive) else replace(kernel, unmodelled=name)


def kernel_name(eqn: JaxprEqn) -> str:
    """Return the name by which the cost of the kernel of `eqn` may be registered."""
    match eqn.primitive.name:
        case "pallas_call":
            return pallas_kernels.name_of(eqn.params)
        case "ffi_call":
            return eqn.params["target_name"]
        case name:
            return name


def bind_shards(
    eqn: JaxprEqn,
    operands: Sequence[Spec],
    results: Sequence[Spec],
    shards: Sequence[Any],
    mesh: LogicalMesh,
) -> list[Any]:
    """Apply the primitive of `eqn` to the shards of its operands, on each device of a manual mesh.

    Args:
        eqn: the equation.
        operands: specs of its operands.
        results: specs of its results, before partial sums are completed.
        shards: this device's shards of the operands.
        mesh: the mesh.

    Returns:
        This device's shards of the results; partial sums where a summed dim is sharded.
    """
    specs = zip(eqn.outvars, results, strict=True)
    shapes = [local_shape(aval_of(var).shape, spec, mesh) for var, spec in specs]
    local = record_of(eqn).local
    arrays = local(eqn, operands, results, shapes, shards) if local else bind(eqn, shards)
    assert [array.shape for array in arrays] == shapes, (
        f"{eqn.primitive.name}: its rule says shards of {shapes}, computed were {arrays}"
    )
    return arrays


def runs_on_shards(eqn: JaxprEqn) -> bool:
    """Return whether the equation runs on shards (`bind_shards`), not through XLA's partitioner.

    The partitioner would compute wrong numbers, or all of the results on every device, or add
    collectives.
    """
    condition = record_of(eqn).runs_on_shards
    return condition if isinstance(condition, bool) else condition(eqn)
