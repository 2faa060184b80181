"""Run equations on each device's shards where XLA's partitioner would divide them wrongly."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from operator import add
from typing import Any

import jax
from jax.extend.core import JaxprEqn
from jax.sharding import get_abstract_mesh

from autopar.ir.evaluate import Apply, as_traced
from autopar.ir.spec import AnyMesh, LogicalMesh, Spec, partition_spec, replicated
from autopar.microbatch.accumulation import along, complete
from autopar.plan import Stage
from autopar.primitives import bind_shards, is_partitioned_wrongly, op_factors
from autopar.primitives.factors import assignment_of

type PinnedSpecs = Mapping[tuple[int, str], Mapping[int, Spec]]
"""The specs that a plan pins, by number and side of the equation, and by position."""


def pinned_specs(stage: Stage) -> PinnedSpecs:
    """Return the specs of a stage's constraints."""
    wanted: dict[tuple[int, str], dict[int, Spec]] = defaultdict(dict)
    for constraint in stage.constraints:
        wanted[constraint.eqn, constraint.side][constraint.index] = constraint.spec
    return wanted


def shardwise(mesh: AnyMesh, wanted: PinnedSpecs | None = None) -> Apply:
    """How equations run on `mesh`: the partitioner divides them, but for those that run on shards.

    Args:
        wanted: where operands and results are. A shardwise equation without any runs whole on every device.
    """
    specs = wanted or {}

    def apply(number: int, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        if not is_partitioned_wrongly(eqn):
            return as_traced(number, eqn, operands)
        return _on_shards(
            eqn, operands, specs.get((number, "in"), {}), specs.get((number, "out"), {}), mesh
        )

    return apply


def _on_shards(
    eqn: JaxprEqn,
    operands: Sequence[Any],
    reads: Mapping[int, Spec],
    results: Mapping[int, Spec],
    mesh: AnyMesh,
) -> list[Any]:
    """Run an equation on the shards of its operands, and complete its results.

    Inside of `jax.shard_map` operands are a device's part along the axes that are manual there; the other axes divide that.
    """
    context = get_abstract_mesh()
    manual = () if context.empty else context.manual_axes
    free = tuple(axis for axis in mesh.shape if axis not in manual)
    logical = LogicalMesh(tuple(mesh.shape[axis] for axis in free), free)

    def planned(specs: Mapping[int, Spec], count: int) -> list[Spec | None]:
        return [along(specs[k], free) if k in specs else None for k in range(count)]

    factors = op_factors(eqn)
    pinned = planned(results, len(eqn.outvars))
    assignment = assignment_of(factors, planned(reads, len(eqn.invars)), pinned)
    if not factors.allows(assignment, logical):
        assignment = ((),) * len(assignment)
    partial = factors.partial_axes(assignment)
    sources = [factors.operand_spec(k, assignment) for k in range(len(eqn.invars))]
    made = [factors.result_spec(r, assignment) for r in range(len(eqn.outvars))]
    scattered = [
        along(spec, partial) if spec else replicated(len(own))
        for spec, own in zip(pinned, made, strict=True)
    ]
    completed_specs = [tuple(map(add, *each)) for each in zip(made, scattered, strict=True)]

    def local(*shards: Any) -> list[Any]:
        values = bind_shards(eqn, sources, made, shards, logical)
        return [
            complete(value, spec, partial) for value, spec in zip(values, scattered, strict=True)
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
