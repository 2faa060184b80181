"""Lifetimes of the memory of a step by decisions: values, partial results, and workspaces.

Inputs are live during the whole step, and a carried output reuses the memory of its input. Other
values are live from the equation that computes them to the last one that reads them, if they are
stored at all (`autopar.xla_fusion`). Sums over microbatches are live as long as their loop.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn, Var
from jax.extend.core.primitives import conv_general_dilated_p, dot_general_p
from jax.lax import optimization_barrier_p

from autopar.ir import control_flow
from autopar.ir.array_sizes import array_bytes, value_bytes
from autopar.ir.graph import Atom, aval_of, variables
from autopar.ir.host_memory import is_on_host, to_device_p
from autopar.ir.memo import memoized_on_step
from autopar.ir.spec import LogicalMesh, Spec, Specs, local_shape
from autopar.ir.step_graph import StepGraph
from autopar.primitives import record_of
from autopar.sharding.distinct_options import each_once
from autopar.sharding.mesh_costs import COMBINED_BYTES
from autopar.sharding.step_decisions import Decisions, PartialResult
from autopar.xla_fusion import (
    Groups,
    is_view,
    lifetimes,
    padded_dims,
    padding_factor,
    pooling_zeros,
    readings,
)
from simulator.memory import Role
from simulator.work import CollectiveKind


@dataclass(frozen=True, eq=False, slots=True)
class Lifetime:
    """Memory that is in use from program point `start` to `end`, both included.

    Attributes:
        decision: the decision on which its size depends.
        start: first program point.
        end: last program point.
        sizes: bytes under each option of the decision.
        var: its value; None for activations of other microbatches, for gradients before their
            reduce_scatter, and for workspaces of products.
        role: its role if `var` is None.
    """

    decision: int
    start: int
    end: int
    sizes: np.ndarray
    var: Var | None = None
    role: Role | None = None


def value_lifetimes(step: StepGraph, decisions: Decisions, mesh: LogicalMesh) -> list[Lifetime]:
    """Return the lifetimes of all values that are stored."""
    reused = {step.jaxpr.outvars[o] for o in step.carried if isinstance(step.jaxpr.outvars[o], Var)}
    alive = dict(lifetimes(step, decisions.exponentials))
    if step.microbatching is None and not decisions.hides_latency:
        _postpone(step, decisions, mesh, alive)
    lives = _take_sums(step, alive)
    lives += [
        (var, start, end) for var, (start, end) in alive.items() if var not in reused or not start
    ]
    batch = {step.jaxpr.invars[i] for i in step.batch}  # all microbatches of it are live
    others = step.in_flight - 1
    end = len(step.jaxpr.eqns)
    saved = sizes_of(step.saved_in_flight, decisions, mesh) if others else ()
    padded = padded_dims(step) if decisions.workspace else {}
    memory = [Lifetime(d, 0, end, others * sizes, role="activations") for d, sizes in saved]
    for var, start, end in lives:
        if (placement := decisions.placements.get(var)) is not None:
            sizes = local_bytes(var, placement.specs, mesh, padded.get(var, ())) * (
                step.num_micro_batches if var in batch else 1
            )
            memory.append(Lifetime(placement.decision, start, end, sizes, var))
    if step.num_micro_batches > 1 and not step.cross_task_values:
        memory += _microbatch_slices(step, decisions, mesh, batch)
    memory += _zeros_read_again(step, decisions, mesh, alive.keys())
    memory += _workspaces(step, decisions, alive)
    memory += _relaid_fetches(step, decisions, mesh)
    return memory + list(_partial_results(step, decisions, mesh, alive))


def _take_sums(step: StepGraph, alive: dict[Var, tuple[int, int]]) -> list[tuple[Var, int, int]]:
    """Remove sums over microbatches from `alive`, and return when they and their addends are live.

    A sum is live during the loop over microbatches; its addends are added in place.
    """
    bases = bases_of_views(step)
    lives: list[tuple[Var, int, int]] = []
    for number, eqn in step.microbatching.marks if step.microbatching else ():
        for atom, var in zip(eqn.invars, eqn.outvars, strict=True):
            if aval_of(atom).shape != aval_of(var).shape:  # rows are written into the total
                alive[var] = 0, alive.pop(var, (number, number))[1]
                continue
            if isinstance(atom, Var) and atom not in step.jaxpr.invars:
                lives.append((atom, 0, number))
                if (base := bases.get(atom, atom)) not in step.jaxpr.invars:
                    alive.pop(base, None)
            _, until = alive.pop(var, (number, number))
            if until > number:
                lives.append((var, number + 1, until))
    return lives


def _microbatch_slices(
    step: StepGraph, decisions: Decisions, mesh: LogicalMesh, batch: Collection[Var]
) -> Iterator[Lifetime]:
    """Yield the examples of the present microbatch, if a product reads them.

    Fused kernels read them from the batch in place. The first one also writes them for products,
    and for the barriers before recomputation.
    """
    bases = bases_of_views(step)
    readers = (
        eqn
        for eqn in step.jaxpr.eqns
        if record_of(eqn).fusion == "contraction" or eqn.primitive is optimization_barrier_p
    )
    operands = {bases.get(atom, atom) for eqn in readers for atom in variables(eqn.invars)}
    reads = readings(step)
    for var in batch:
        if var in operands and (placement := decisions.placements.get(var)) is not None:
            first, last = reads[var]
            sizes = local_bytes(var, placement.specs, mesh)
            yield Lifetime(placement.decision, first, last, sizes, role="inputs")


def _relaid_fetches(step: StepGraph, decisions: Decisions, mesh: LogicalMesh) -> Iterator[Lifetime]:
    """Yield copies of values from host memory in the layout of convolutions, if any reads them.

    Other kernels read that layout, too.
    """
    fetched = {eqn.outvars[0] for eqn in step.jaxpr.eqns if eqn.primitive is to_device_p}
    relaid = {
        atom
        for eqn in step.jaxpr.eqns
        if eqn.primitive is conv_general_dilated_p
        for atom in eqn.invars
        if isinstance(atom, Var) and atom in fetched
    }
    for var in sorted(relaid, key=readings(step).__getitem__):
        if (placement := decisions.placements.get(var)) is not None:
            sizes = local_bytes(var, placement.specs, mesh)
            yield Lifetime(placement.decision, *readings(step)[var], sizes, role="temporaries")


def _zeros_read_again(
    step: StepGraph, decisions: Decisions, mesh: LogicalMesh, alive: Set[Var]
) -> Iterator[Lifetime]:
    """Yield a copy of the zeros onto which a gradient of pooling is added, for kernels before it.

    XLA needs none if the first kernel that reads the zeros stores its result: it makes both.
    """
    for result, (first, last) in pooling_zeros(step).items():
        placement = decisions.placements.get(result)
        if placement is not None and alive.isdisjoint(step.jaxpr.eqns[first].outvars):
            sizes = local_bytes(result, placement.specs, mesh)
            yield Lifetime(placement.decision, first, last, sizes, role="temporaries")


def _workspaces(
    step: StepGraph, decisions: Decisions, alive: Mapping[Var, tuple[int, int]]
) -> Iterator[Lifetime]:
    """Yield the workspace of each matrix product, while it runs."""
    for number, eqn in enumerate(step.jaxpr.eqns):
        placement = decisions.placements.get(eqn.outvars[0]) if eqn.outvars else None
        if placement is None or not decisions.workspace or not _is_matrix_product(eqn):
            continue
        at, _ = alive.get(eqn.outvars[0], (number, number))
        sizes = np.full(len(placement.specs), float(decisions.workspace))
        yield Lifetime(placement.decision, at, at, sizes, role="temporaries")


def _is_matrix_product(eqn: JaxprEqn) -> bool:
    """Return whether an equation is a product of cuBLAS: neither operand is a vector."""
    if eqn.primitive is not dot_general_p:
        return False
    contracted, batch = eqn.params["dimension_numbers"]
    return all(
        math.prod(size for dim, size in enumerate(aval_of(atom).shape) if dim not in (*c, *b)) > 1
        for atom, c, b in zip(eqn.invars, contracted, batch, strict=True)
    )


def _postpone(
    step: StepGraph,
    decisions: Decisions,
    mesh: LogicalMesh,
    alive: dict[Var, tuple[int, int]],
) -> None:
    """Compute a product right before it is first read if its operands are smaller than its result.

    Where XLA does not hide latency, it schedules for least memory: gradients of large weights from
    small batches are computed right before their update.

    Args:
        step: the step.
        decisions: its decisions.
        mesh: the logical mesh.
        alive: first and last program point of each stored value; changed.
    """
    bases = bases_of_views(step)
    reads, loops = readings(step), control_flow.spans(step.jaxpr.eqns).values()

    def size(var: Var, of: Callable[[np.ndarray], float]) -> float:
        placement = decisions.placements.get(var)
        return of(local_bytes(var, placement.specs, mesh)) if placement else 0.0

    for number, eqn in enumerate(step.jaxpr.eqns):
        result = eqn.outvars[0] if eqn.outvars else None
        until, last = reads.get(result, (number, number)) if result else (number, number)
        if record_of(eqn).fusion != "contraction" or result not in alive or until <= number + 1:
            continue
        if any(start <= number <= end or start <= until <= end for start, end in loops):
            continue
        operands = {bases.get(atom, atom) for atom in variables(eqn.invars)}
        longer = [var for var in operands if var in alive and alive[var][1] < until]
        if sum(size(var, np.max) for var in longer) < size(result, np.min):
            reader, last_reader = (decisions.leaders.get(n, n) for n in (until, last))
            in_one_kernel = reader == last_reader and alive[result][1] == last
            alive[result] = (until - 1, until if in_one_kernel else alive[result][1])
            alive.update((var, (alive[var][0], until - 1)) for var in longer)


@memoized_on_step
def bases_of_views(step: StepGraph) -> Mapping[Var, Var]:
    """Return for each view the value whose memory it shares, also through other views."""
    bases: dict[Var, Var] = {}
    for eqn in step.jaxpr.eqns:
        if is_view(eqn) and isinstance(atom := eqn.invars[0], Var):
            bases[eqn.outvars[0]] = bases.get(atom, atom)
    return bases


def _partial_results(
    step: StepGraph, decisions: Decisions, mesh: LogicalMesh, alive: Mapping[Var, tuple[int, int]]
) -> Iterator[Lifetime]:
    """Yield results before a collective completes them elsewhere.

    They are live beside the complete result while the collective runs. Only an asynchronous
    all_reduce of one array is in place. XLA combines collectives on gradients of weights: each
    waits until the last one that it is combined with is computed.
    """
    delays = decisions.hides_latency and step.microbatching is None
    waiting: dict[CollectiveKind, list[list[tuple[PartialResult, int]]]] = {}
    room: dict[CollectiveKind, float] = {}
    for partial in decisions.partial:
        kind, var = partial.kind, step.jaxpr.eqns[partial.eqn].outvars[0]
        at = alive.get(var, (partial.eqn, 0))[0]
        if partial.is_combined and delays:
            at = max(at, readings(step).get(var, (at + 1, 0))[0] - 1)
        if not partial.is_combined:
            if kind == "all_reduce" and decisions.hides_latency:
                continue
            sizes, placement = partial.sizes, decisions.placements[var]
            if placement is not None and _is_matrix_product(step.jaxpr.eqns[partial.eqn]):
                # the workspace is free before the complete result takes memory
                result = local_bytes(var, placement.specs, mesh)
                sizes = np.maximum(sizes - np.minimum(decisions.workspace, result), 0.0)
            yield Lifetime(partial.decision, at, at, sizes, role="temporaries")
            continue
        parts = mesh.num_devices if kind == "reduce_scatter" else 1
        result = value_bytes(var) / parts
        groups = waiting.setdefault(kind, [])
        if result > room.get(kind, 0.0):
            groups.append([])
            room[kind] = COMBINED_BYTES
        room[kind] -= result
        groups[-1].append((partial, at))
    for kind, groups in waiting.items():
        for group in groups:
            if kind == "all_reduce" and decisions.hides_latency and len(group) == 1:
                continue
            late = not delays and all(start > partial.eqn for partial, start in group)
            last = (min if late else max)(start for _, start in group)
            for partial, start in group:
                # until then there is no complete result, which all_reduce makes as large
                first = min(start, last) if kind == "reduce_scatter" else last
                yield Lifetime(partial.decision, first, last, partial.sizes, role="gradients")


def sizes_of(
    values: Iterable[Var], decisions: Decisions, mesh: LogicalMesh
) -> list[tuple[int, np.ndarray]]:
    """Return the decision of each value that has one, and its bytes under each option."""
    placed = ((var, decisions.placements.get(var)) for var in values)
    return [(p.decision, local_bytes(var, p.specs, mesh)) for var, p in placed if p is not None]


def local_bytes(atom: Atom, specs: Specs, mesh: LogicalMesh, padded: Groups = ()) -> np.ndarray:
    """Bytes on one device under each spec, with the padding of the given dims."""
    if is_on_host(atom):
        return np.zeros(len(specs))
    return _array_sizes(aval_of(atom).shape, aval_of(atom).dtype, specs, mesh, padded)


@lru_cache(maxsize=1 << 14)
def _array_sizes(
    shape: tuple[int, ...], dtype: Any, specs: Specs, mesh: LogicalMesh, padded: Groups
) -> np.ndarray:
    def size(spec: Spec) -> float:
        local = local_shape(shape, spec, mesh)
        return array_bytes(local, dtype) * padding_factor(local, padded)

    return np.array(each_once(size, specs), float)
