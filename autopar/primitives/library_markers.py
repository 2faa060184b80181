"""Primitives that libraries put around computations: markers of Equinox, choices of platform.

They have the values of simple JAX operations. The records go by name, so Equinox is not imported.
"""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn

from autopar.ir.evaluate import bind
from autopar.ir.spec import Spec
from autopar.primitives.factors import FactorBuilder, Kind, OpFactors
from autopar.primitives.local_forms import Shapes
from autopar.primitives.pointwise import pointwise
from autopar.primitives.registry import PrimitiveRecord
from autopar.primitives.rule_helpers import ShardingRule, shape_of


def _over_all(kind: Kind) -> ShardingRule:
    """Return the rule of a reduction over all dims of its operand."""

    def rule(eqn: JaxprEqn) -> OpFactors:
        build = FactorBuilder()
        operand = tuple(build.new(size, kind) for size in shape_of(eqn.invars[0]))
        return build.build([operand], [()])

    return rule


def _mapped(eqn: JaxprEqn) -> OpFactors:
    """Share the dim over which `jax.vmap` maps a primitive of Equinox; keep the others whole."""
    build = FactorBuilder()
    mapped = build.new(eqn.params["__axis_size"])
    operands = [
        tuple(
            mapped if dim == axis else build.new(size, "whole")
            for dim, size in enumerate(shape_of(atom))
        )
        for atom, axis in zip(eqn.invars, eqn.params["__batch_axes"], strict=True)
    ]
    results = [(mapped, *build.dims(shape_of(var)[1:], "whole")) for var in eqn.outvars]
    return build.build(operands, results)


def _mapped_on_shard(
    eqn: JaxprEqn, _in: Sequence[Spec], _out: Sequence[Spec], shapes: Shapes, shards: Sequence[Any]
) -> list[Any]:
    return bind(eqn, shards, __axis_size=shapes[0][0])


_MARK = PrimitiveRecord(movement="identity", is_view=True)

RECORDS = {
    "nonbatchable": _MARK,
    "nondifferentiable_backward": _MARK,
    "nontraceable": _MARK,
    # an uninitialized number, from which JAX makes the results of a scan
    "empty2": PrimitiveRecord(factors=pointwise, fusion="elementwise"),
    # a number without operands, by which `jax.lax.platform_dependent` chooses
    "platform_index": PrimitiveRecord(factors=pointwise, fusion="elementwise"),
    "select_if_vmap": PrimitiveRecord(
        factors=pointwise, fusion="elementwise", algebra="selection", data=slice(1, None)
    ),
    "unvmap_all": PrimitiveRecord(factors=_over_all("min"), fusion="reduction"),
    "unvmap_any": PrimitiveRecord(factors=_over_all("max"), fusion="reduction"),
    "unvmap_max": PrimitiveRecord(factors=_over_all("max"), fusion="reduction"),
    # a primitive of Equinox's `create_vprim`, or another vprim, under `jax.vmap`
    "vprim": PrimitiveRecord(factors=_mapped, local=_mapped_on_shard),
}
