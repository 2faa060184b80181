"""`jax.shard_map`: a region that the user sharded by hand, and which is kept as it is."""

from collections.abc import Iterable
from math import prod
from typing import Any

from jax.extend.core import JaxprEqn

from autopar.ir.spec import from_partition_spec
from autopar.primitives.factors import Dims, FactorBuilder, OpFactors
from autopar.primitives.registry import PrimitiveRecord
from autopar.primitives.rule_helpers import shape_of


def _shard_map(eqn: JaxprEqn) -> OpFactors:
    """Give each group of the region's mesh axes a factor, for the dims that its specs shard by it.

    The rest of each dim is whole.
    """
    build, known = FactorBuilder(), dict[tuple[str, ...], tuple[int, ...]]()

    def factor(axes: tuple[str, ...]) -> tuple[int, ...]:
        if axes not in known:
            known[axes] = build.new(prod(eqn.params["mesh"].shape[axis] for axis in axes))
        return known[axes]

    for axes in region_axes(eqn):
        factor(axes)

    def dims(shape: tuple[int, ...], spec: Any) -> Dims:
        entries = zip(shape, from_partition_spec(spec, len(shape)), strict=True)
        return tuple(
            (
                *(outer := factor(axes) if axes else ()),
                *build.new(size // (build.sizes[outer[0]] if outer else 1), "whole"),
            )
            for size, axes in entries
        )

    operands = [
        dims(shape_of(v), spec) for v, spec in zip(eqn.invars, eqn.params["in_specs"], strict=True)
    ]
    results = [
        dims(shape_of(v), spec)
        for v, spec in zip(eqn.outvars, eqn.params["out_specs"], strict=True)
    ]
    return build.build(operands, results, decides=True)


def region_axes(eqn: JaxprEqn) -> list[tuple[str, ...]]:
    """Return the groups of the region's mesh axes that shard a dim, in the order of the factors."""

    def entries() -> Iterable[tuple[str, ...]]:
        for spec in (*eqn.params["in_specs"], *eqn.params["out_specs"]):
            yield from from_partition_spec(spec, len(spec))

    sizes = eqn.params["mesh"].shape
    return list(dict.fromkeys(axes for axes in entries() if prod(sizes[axis] for axis in axes) > 1))


SHARD_MAP = "shard_map"
"""Name of the primitive, of which JAX has no public object."""

RECORDS = {SHARD_MAP: PrimitiveRecord(factors=_shard_map, runs_body=True)}
