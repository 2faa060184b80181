"""Sharding without a solver, as the baseline to compare plans with: a rule for inputs, and propagation from them.

The rule is the largest-dim heuristic that Alpa's ablation has (OSDI'22, section 8.2): each mesh axis shards the largest dim
that it divides. Propagation is greedy: each decision, in the order of the step, takes what leaves most values where they are.
"""

from collections.abc import Sequence

import numpy as np

from autopar.ir.spec import LogicalMesh, Spec, Specs, replicated
from autopar.sharding.dataflow import InputRole
from autopar.sharding.options import Mode
from autopar.sharding.selection_problem import InfeasibleError, SelectionProblem, Solution


def input_placed(
    role: InputRole, shape: Sequence[int], allowed: Specs, mesh: LogicalMesh, mode: Mode
) -> Spec:
    """The one spec of an input that a mode without solver takes, of those `allowed`.

    "heuristic" shards the batch over the first axis, carried state as `largest_dims` does, and nothing else; "manual" takes the
    first spec, which is the pinned one, or whole.
    """
    wanted = allowed[0]
    if mode == "heuristic" and role == "batch":
        first = next((axis for axis in mesh.axis_names if mesh.sizes[axis] > 1), None)
        wanted = (
            replicated(len(shape)) if first is None else ((first,), *replicated(len(shape) - 1))
        )
    elif mode == "heuristic" and role in ("parameter", "state"):
        wanted = largest_dims(shape, mesh)
    return wanted if wanted in allowed else allowed[0]


def largest_dims(shape: Sequence[int], mesh: LogicalMesh) -> Spec:
    """Each mesh axis in turn on the dim of the largest shard that it divides evenly; on none if it divides none.

    The first of equal dims counts as larger.
    """
    local, spec = list(shape), list(replicated(len(shape)))
    for axis in mesh.axis_names:
        size = mesh.sizes[axis]
        fits = [
            dim
            for dim, length in enumerate(local)
            if size > 1 and length % size == 0 and length > 0
        ]
        if fits:
            largest = max(fits, key=lambda dim: local[dim])
            local[largest] //= size
            spec[largest] = (*spec[largest], axis)
    return tuple(spec)


def propagate(problem: SelectionProblem) -> Solution:
    """For each decision in turn the option with the least resharding from and to what is placed, the first among equals.

    First come those that shard least, and an all_reduce comes before a reduce_scatter.

    Raises:
        InfeasibleError: a decision is left with forbidden options only.
    """
    earlier: list[list[tuple[int, np.ndarray]]] = [[] for _ in problem.nodes]
    for (i, j), cost in problem.edges.items():
        earlier[j].append((i, cost))
    choice: list[int] = []
    for neighbours, cost in zip(earlier, problem.nodes, strict=True):
        moved = sum(
            (edge[choice[i]] for i, edge in neighbours), np.where(np.isfinite(cost), 0.0, np.inf)
        )
        best = int(moved.argmin())
        if not np.isfinite(moved[best]):
            raise InfeasibleError(
                "propagation ends where every sharding needs a forbidden collective; allow more of them, or let the solver choose"
            )
        choice.append(best)
    return Solution(tuple(choice), problem.cost(choice), gap=None, core=0)
