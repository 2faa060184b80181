"""Hypothesis strategies that several test files share."""

import numpy as np
from hypothesis import strategies as st

from autopar.ir.spec import LogicalMesh
from autopar.sharding.selection_problem import CapacityConstraint, SelectionProblem

MESHES = [(1,), (2,), (4,), (8,), (1, 4), (2, 2), (2, 4), (2, 2, 2)]


@st.composite
def meshes(draw: st.DrawFn) -> LogicalMesh:
    """Draw a logical mesh of up to eight devices."""
    shape = draw(st.sampled_from(MESHES))
    return LogicalMesh(shape, ("x", "y", "z")[: len(shape)])


@st.composite
def selection_problems(draw: st.DrawFn, decisions: int = 6, options: int = 4) -> SelectionProblem:
    """Draw a small random selection problem, with forbidden pairs and capacity constraints."""
    sizes = draw(st.lists(st.integers(1, options), min_size=1, max_size=decisions))
    density = draw(st.floats(0, 1))
    forbidden = draw(st.sampled_from([0.0, 0.1, 0.4]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    nodes = [rng.integers(0, 10, size).astype(float) for size in sizes]
    edges = {}
    for i in range(len(sizes)):
        for j in range(i + 1, len(sizes)):
            if rng.random() < density:
                cost = rng.integers(0, 10, (sizes[i], sizes[j])).astype(float)
                edges[i, j] = np.where(rng.random(cost.shape) < forbidden, np.inf, cost)
    constraints = []
    for _ in range(draw(st.integers(0, 2))):
        uses = {
            i: rng.integers(0, 10, size).astype(float)
            for i, size in enumerate(sizes)
            if rng.random() < 0.7
        }
        least = sum(float(use.min()) for use in uses.values())
        most = sum(float(use.max()) for use in uses.values())
        pairs = {
            key: rng.integers(0, 10, cost.shape).astype(float)
            for key, cost in edges.items()
            if rng.random() < 0.3
        }
        constraints.append(
            CapacityConstraint(uses, least + (most - least) * draw(st.floats(-0.2, 1)), pairs)
        )
    return SelectionProblem(nodes, edges, constraints)
