"""The collectives of a plan: completions of partial results, and reshardings."""

from collections.abc import Iterator

from jax.extend.core import Var

from autopar.analysis.replay import ShardedEquation, replay
from autopar.ir.array_sizes import array_bytes
from autopar.ir.control_flow import repeats
from autopar.ir.graph import aval_of
from autopar.ir.spec import LogicalMesh, Spec, local_shape
from autopar.lowering.planned import Planned
from autopar.sharding.mesh_costs import Step, reshard_steps
from autopar.sharding.reshard_hoisting import moved_bytes


def planned_collectives(planned: Planned) -> Iterator[Step]:
    """Yield every collective of a plan without pipeline stages, as (kind, bytes, mesh axes).

    A collective in a loop counts the bytes of all iterations. A value that several equations read
    with the same sharding is resharded once, before a conversion to a wider dtype.

    Args:
        planned: an `Executable`, or a `PlannedStep`; bytes count as in `simulator.Collective`.

    Raises:
        PlanError: the plan is for another step.
    """
    replayed = replay(planned)
    eqn_of = {var: equation.eqn for equation in replayed.equations for var in equation.eqn.outvars}
    resharded: set[tuple[Var, Spec]] = set()

    def reshard(var: Var, source: Spec, target: Spec) -> Iterator[Step]:
        if source != target and (var, target) not in resharded:
            resharded.add((var, target))
            yield from reshard_steps(
                moved_bytes(eqn_of.get(var), var), source, target, replayed.mesh
            )

    iterations = repeats(planned.step.jaxpr.eqns)
    for equation, times in zip(replayed.equations, iterations, strict=True):
        steps = list(_completions(equation, replayed.mesh))
        for atom, source, target in zip(
            equation.eqn.invars, equation.sources, equation.operands, strict=True
        ):
            if source is not None and isinstance(atom, Var):
                steps += reshard(atom, source, target)
        for kind, num_bytes, axes in steps:
            yield kind, num_bytes * times, axes
    for atom, value in zip(planned.step.jaxpr.outvars, planned.plan.stages[0].outputs, strict=True):
        if isinstance(atom, Var) and atom in replayed.values:
            yield from reshard(atom, replayed.values[atom], value.spec)


def _completions(equation: ShardedEquation, mesh: LogicalMesh) -> Iterator[Step]:
    """Yield the collectives that complete the results of an equation.

    These are a reduce_scatter for each dim of a result that an axis with partial results shards
    afterwards, and one all_reduce over the remaining axes.
    """
    partial = equation.factors.partial_axes(equation.assignment) if equation.factors else ()
    partial = tuple(axis for axis in partial if axis not in equation.deferred)
    for var, spec in zip(equation.eqn.outvars, equation.results, strict=True):
        axes_of_dims = [tuple(axis for axis in axes if axis in partial) for axes in spec]
        scattered = [axis for axes in axes_of_dims for axis in axes]
        aval = aval_of(var)
        shard_bytes = array_bytes(local_shape(aval.shape, spec, mesh), aval.dtype)
        num_bytes = shard_bytes * mesh.ways(scattered)
        for axes in axes_of_dims:
            if axes:
                yield "reduce_scatter", num_bytes, axes
                num_bytes /= mesh.ways(axes)
        if rest := tuple(axis for axis in partial if axis not in scattered):
            yield "all_reduce", num_bytes, rest
