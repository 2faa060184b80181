"""Sharding problems with known optima, memory budgets included."""

import json
from pathlib import Path

import numpy as np
import pytest

from autopar.sharding.selection_problem import CapacityConstraint, InfeasibleError, SelectionProblem
from autopar.sharding.solver import solve

INSTANCES = json.loads((Path(__file__).parents[2] / "golden" / "ilp_instances.json").read_text())[
    "instances"
]


def as_problem(instance) -> SelectionProblem:
    """Convert an instance of the golden file to a problem.

    Followers are merged with their leaders, aliases are forbidden pairs, and sets of live values
    are capacity constraints.
    """
    follow = instance["follow"]

    def leader(i):
        return i if follow[i] < 0 else leader(follow[i])

    leaders = [i for i in range(len(follow)) if follow[i] < 0]
    decision_of = {i: leaders.index(leader(i)) for i in range(len(follow))}
    nodes = [np.zeros(len(instance["node"][i])) for i in leaders]
    for i, cost in enumerate(instance["node"]):
        nodes[decision_of[i]] += cost
    edges = {}

    def join(i, j, matrix):
        i, j = decision_of[i], decision_of[j]
        if i == j:
            nodes[i] += np.diagonal(matrix)
            return
        key, matrix = ((i, j), matrix) if i < j else ((j, i), matrix.T)
        edges[key] = edges.get(key, 0) + matrix

    for (i, j), costs in zip(instance["edges"], instance["edge_costs"], strict=True):
        join(
            i,
            j,
            np.reshape(costs, (len(instance["node"][i]), len(instance["node"][j]))).astype(float),
        )
    for (i, j), flags in zip(instance["aliases"], instance["alias_costs"], strict=True):
        forbidden = np.reshape(flags, (len(instance["node"][i]), len(instance["node"][j]))) > 0.5
        join(i, j, np.where(forbidden, np.inf, 0.0))
    limits = []
    for live in instance["liveness"]:
        uses = {}
        for i in live:
            uses[decision_of[i]] = uses.get(decision_of[i], 0) + np.array(instance["memory"][i])
        limits.append(CapacityConstraint(uses, instance["budget"]))
    return SelectionProblem(nodes, edges, limits)


@pytest.mark.parametrize(
    "instance", INSTANCES, ids=lambda x: f"{x['name'].split('.')[-1]}-{x['budget']:.3g}"
)
def test_the_solver_finds_the_known_optimum(instance):
    problem = as_problem(instance)
    if instance["optimum"] is None:
        with pytest.raises(InfeasibleError):
            solve(problem)
    else:
        assert solve(problem).objective == pytest.approx(instance["optimum"], rel=1e-5)
