"""Shardwise equations: equations that run on shards because XLA's partitioner splits them badly."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from operator import add
from typing import Any

import jax
from jax.extend.core import JaxprEqn
from jax.sharding import get_abstract_mesh

from autopar.ir.evaluate import Apply, as_traced
from autopar.ir.spec import AnyMesh, LogicalMesh, Spec, partition_spec, replicated
from autopar.microbatch.accumulation import complete_sum, spec_along
from autopar.plan_stages import Stage
from autopar.primitives import bind_shards, op_factors, runs_on_shards
from autopar.primitives.factors import assignment_of

type PinnedSpecs = Mapping[tuple[int, str], Mapping[int, Spec]]
"""Specs that a plan pins, by number and side of the equation, then by position."""


def pinned_specs(stage: Stage) -> PinnedSpecs:
    """Return the specs of a stage's constraints."""
    pinned: dict[tuple[int, str], dict[int, Spec]] = defaultdict(dict)
    for constraint in stage.constraints:
        pinned[constraint.eqn, constraint.side][constraint.index] = constraint.spec
    return pinned


def shardwise(mesh: AnyMesh, pinned: PinnedSpecs | None = None) -> Apply:
    """Return how equations run on `mesh`: through XLA's partitioner, or on shards.

    Args:
        mesh: the mesh.
        pinned: specs of operands and results. A shardwise equation without any runs whole on every
            device.
    """
    specs = pinned or {}

    def apply(number: int, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        if not runs_on_shards(eqn) and not _is_callback_on_shards(eqn):
            return as_traced(number, eqn, operands)
        return _on_shards(
            eqn, operands, specs.get((number, "in"), {}), specs.get((number, "out"), {}), mesh
        )

    return apply


def _is_callback_on_shards(eqn: JaxprEqn) -> bool:
    """Return whether an equation calls Python inside of `jax.shard_map`.

    JAX lowers no callback there if XLA is to partition it along other axes of the mesh.
    """
    return eqn.primitive.name == "pure_callback" and bool(get_abstract_mesh().manual_axes)


def _on_shards(
    eqn: JaxprEqn,
    operands: Sequence[Any],
    reads: Mapping[int, Spec],
    results: Mapping[int, Spec],
    mesh: AnyMesh,
) -> list[Any]:
    """Run an equation on the shards of its operands, and complete its results.

    Inside of `jax.shard_map`, operands are one device's part along the manual axes, which the other
    axes divide further.
    """
    context = get_abstract_mesh()
    manual = () if context.empty else context.manual_axes
    free = tuple(axis for axis in mesh.shape if axis not in manual)
    logical = LogicalMesh(tuple(mesh.shape[axis] for axis in free), free)

    factors = op_factors(eqn)
    read_specs = [
        spec_along(reads[k], free) if k in reads else None for k in range(len(eqn.invars))
    ]
    pinned = [
        spec_along(results[r], free) if r in results else None for r in range(len(eqn.outvars))
    ]
    assignment = assignment_of(factors, read_specs, pinned)
    if not factors.allows(assignment, logical):
        assignment = ((),) * len(assignment)
    partial = factors.partial_axes(assignment)
    sources = [factors.operand_spec(k, assignment) for k in range(len(eqn.invars))]
    produced = [factors.result_spec(r, assignment) for r in range(len(eqn.outvars))]
    scattered = [
        spec_along(spec, partial) if spec else replicated(len(own))
        for spec, own in zip(pinned, produced, strict=True)
    ]
    completed_specs = [tuple(map(add, *specs)) for specs in zip(produced, scattered, strict=True)]

    def local(*shards: Any) -> list[Any]:
        values = bind_shards(eqn, sources, produced, shards, logical)
        return [
            complete_sum(value, spec, partial)
            for value, spec in zip(values, scattered, strict=True)
        ]

    run = jax.shard_map(
        local,
        mesh=None if manual else mesh,
        in_specs=tuple(map(partition_spec, sources)),
        out_specs=list(map(partition_spec, completed_specs)),
        axis_names=set(free),
        check_vma=False,  # nothing is differentiated through this
    )
    return run(*operands)
