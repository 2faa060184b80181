"""The collectives of a plan: completions of partial results, and reshardings."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from jax.extend.core import Var

from autopar.analysis.replay import Replay, ShardedEquation, replay
from autopar.ir.array_sizes import array_bytes
from autopar.ir.control_flow import repeats
from autopar.ir.graph import Atom, aval_of
from autopar.ir.spec import LogicalMesh, Spec, local_shape
from autopar.lowering.planned import Planned
from autopar.microbatch.gradients import accumulate_p
from autopar.sharding.loop_sums import summed_iterations
from autopar.sharding.mesh_costs import Step, reshard_steps
from autopar.sharding.reshard_hoisting import moved_bytes


@dataclass(frozen=True, slots=True)
class EquationCollectives:
    """The collectives of one run of an equation, each as (kind, bytes, mesh axes).

    Bytes count as in `simulator.Collective`. A collective in a loop has the bytes of all
    iterations.

    Attributes:
        reshardings: collectives that reshard operands; for the last equation also the outputs of
            the step.
        completions: collectives that complete partial results.
    """

    reshardings: tuple[Step, ...]
    completions: tuple[Step, ...]


def planned_collectives(planned: Planned) -> Iterator[Step]:
    """Yield every collective of a plan without pipeline stages, as (kind, bytes, mesh axes).

    These run in one microbatch or after the last one. A collective in a loop counts
    the bytes of all iterations, unless XLA:GPU moves it behind the loop: an all_reduce of what the
    loop only adds up. A value that several equations read with the same sharding is resharded once,
    before a conversion to a wider dtype.

    Args:
        planned: an `Executable`, or a `PlannedStep`; bytes count as in `simulator.Collective`.

    Raises:
        PlanError: the plan is for another step.
    """
    for equation in collectives_by_equation(planned, replay(planned)):
        yield from equation.completions
        yield from equation.reshardings


def collectives_by_equation(
    planned: Planned, replayed: Replay, behind_loops: bool = True
) -> tuple[EquationCollectives, ...]:
    """Return the collectives of each equation of a plan that has been replayed.

    See `planned_collectives`; together they are those.

    Args:
        planned: the step and its plan.
        replayed: the replayed plan.
        behind_loops: whether the compiler moves all_reduces behind loops.
    """
    step, mesh = planned.step, replayed.mesh
    eqn_of = {var: equation.eqn for equation in replayed.equations for var in equation.eqn.outvars}
    resharded: set[tuple[Var, Spec]] = set()

    def reshard(var: Var, source: Spec, target: Spec) -> Iterator[Step]:
        if source != target and (var, target) not in resharded:
            resharded.add((var, target))
            yield from reshard_steps(moved_bytes(eqn_of.get(var), var), source, target, mesh)

    reshardings: list[list[Step]] = []
    for equation in replayed.equations:
        reads = zip(equation.eqn.invars, equation.sources, equation.operands, strict=True)
        reshardings.append(
            [
                each
                for atom, source, target in reads
                if source is not None and isinstance(atom, Var)
                for each in reshard(atom, source, target)
            ]
        )
    for atom, value in zip(step.jaxpr.outvars, planned.plan.stages[0].outputs, strict=True):
        if isinstance(atom, Var) and atom in replayed.values and reshardings:
            reshardings[-1] += reshard(atom, replayed.values[atom], value.spec)
    summed = _summed_over_devices(planned, replayed)

    def in_all_iterations(steps: Iterable[Step], times: float) -> tuple[Step, ...]:
        return tuple((kind, num_bytes * times, axes) for kind, num_bytes, axes in steps)

    iterations = repeats(step.jaxpr.eqns)
    sums = summed_iterations(step.jaxpr.eqns, step.jaxpr.outvars) if behind_loops else {}
    return tuple(
        EquationCollectives(
            in_all_iterations(steps, times),
            in_all_iterations(_completions(equation, mesh, summed, sums), times),
        )
        for equation, steps, times in zip(replayed.equations, reshardings, iterations, strict=True)
    )


def _summed_over_devices(planned: Planned, replayed: Replay) -> set[Var]:
    """Return the accumulated values whose parts on the devices are summed after the microbatches.

    The others are equal on all devices, or are rows of the batch.
    """
    micro = planned.step.microbatching
    if micro is None:
        return set()
    marked = (var for _, mark in micro.marks for var in mark.outvars)
    return {
        var
        for var, combine in zip(marked, micro.combine, strict=True)
        if combine not in ("same", "rows") and var in replayed.values
    }


def _completions(
    equation: ShardedEquation, mesh: LogicalMesh, summed: set[Var], sums: Mapping[Atom, float]
) -> Iterator[Step]:
    """Yield the collectives that complete the results of an equation, in one iteration.

    These are a reduce_scatter for each dim of a result that an axis with partial results shards
    afterwards, and one all_reduce over the remaining axes. XLA moves the latter behind loops that
    only add the result up.
    """
    accumulates = equation.eqn.primitive is accumulate_p
    partial = equation.factors.partial_axes(equation.assignment) if equation.factors else ()
    partial = tuple(axis for axis in partial if axis not in equation.deferred)
    for var, spec in zip(equation.eqn.outvars, equation.results, strict=True):
        if accumulates:
            partial = equation.deferred if var in summed else ()
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
            yield "all_reduce", num_bytes / sums.get(var, 1.0), rest
