"""Sharding without a solver, a baseline for plans: a rule for inputs, and greedy propagation.

The rule is the largest-dim heuristic of Alpa's ablation (OSDI'22, section 8.2): each mesh axis
shards the largest dim that it divides. In the order of the step, each decision then takes the
option that needs the least resharding.
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
    """Return the spec of an input in a mode without a solver.

    "heuristic" shards the batch over the first axis, carried state as `largest_dims` does, and no
    other input. "manual" takes the first allowed spec: the pinned one, or no sharding.

    Args:
        role: role of the input.
        shape: its shape.
        allowed: the specs that pins and options allow.
        mesh: the logical mesh.
        mode: "heuristic" or "manual".
    """
    wanted = allowed[0]
    if mode == "heuristic" and role == "batch":
        wanted = (mesh.nontrivial_axes[:1], *replicated(len(shape) - 1))
    elif mode == "heuristic" and role in ("parameter", "state"):
        wanted = largest_dims(shape, mesh)
    return wanted if wanted in allowed else allowed[0]


def largest_dims(shape: Sequence[int], mesh: LogicalMesh) -> Spec:
    """Return the spec in which each mesh axis in turn shards the largest dim that it divides.

    A dim counts with the size of its shard so far. Of equal dims the first counts as the largest.
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
    """Return the choice in which each decision in turn needs the least resharding.

    Of equal options the first is taken: options that shard less come first, and an all_reduce comes
    before a reduce_scatter.

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
                "propagation ends where every sharding needs a forbidden collective; allow more of"
                " them, or let the solver choose"
            )
        choice.append(best)
    return Solution(tuple(choice), problem.cost(choice), gap=None, core=0)
