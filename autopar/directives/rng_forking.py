"""Random numbers that each device draws for its own shards: how the draws of `fork_rng` are split.

A draw of random numbers has a key and a shape, but no operand that is split: by itself it is whole
on every device, and a dropout of a split value reads a part of it. A backward dataflow analysis
finds how the readers of a draw split it, so that each device draws only its part, with its own key.
"""

from collections.abc import Iterable, Mapping, Sequence

from jax.extend.core import Jaxpr, JaxprEqn, Var

from autopar.directives.model_graph import ModelGraph, Node
from autopar.directives.value_layouts import EquationLayouts, propagate_jaxpr
from autopar.ir.calls import called_jaxpr
from autopar.ir.graph import aval_of
from autopar.ir.spec import LogicalMesh, Spec, axes_of, replicated
from autopar.primitives import op_factors

DRAW = "random_bits"


def random_draws(nodes: Iterable[Node]) -> list[Node]:
    """Return the nodes that draw random numbers from a single key."""
    return [
        node
        for node in nodes
        if node.eqn.primitive.name == DRAW and aval_of(node.eqn.invars[0]).ndim == 0
    ]


def draw_specs(
    graph: ModelGraph,
    draws: Iterable[Node],
    layouts: Mapping[str, EquationLayouts],
    mesh: LogicalMesh,
) -> dict[Var, Spec]:
    """Return how the readers of each draw split it.

    Draws that are read whole, or split in more than one way, are left out.

    Args:
        graph: the model.
        draws: nodes of `graph` that draw random numbers.
        layouts: how each node takes its operands when draws are whole, by the name of the node.
        mesh: the mesh over which values are split.
    """
    wanted: dict[Var, Spec] = {}
    _propagate_backward([(node.eqn, layouts[node.name]) for node in graph.nodes], wanted, mesh)
    results = (node.eqn.outvars[0] for node in draws)
    return {var: wanted[var] for var in results if axes_of(wanted.get(var, ()))}


def _propagate_backward(
    equations: Sequence[tuple[JaxprEqn, EquationLayouts]],
    wanted: dict[Var, Spec],
    mesh: LogicalMesh,
) -> None:
    """Add to `wanted` how equations read their operands: whole where two of them disagree."""
    for eqn, layouts in reversed(equations):
        specs = _operand_specs(eqn, layouts, wanted, mesh)
        for atom, spec in zip(eqn.invars, specs, strict=True):
            if isinstance(atom, Var) and wanted.setdefault(atom, spec) != spec:
                wanted[atom] = replicated(len(spec))


def _operand_specs(
    eqn: JaxprEqn, layouts: EquationLayouts, wanted: Mapping[Var, Spec], mesh: LogicalMesh
) -> Iterable[Spec]:
    """Return how an equation would read its operands if its results were split as `wanted`."""
    results = [
        wanted.get(var, result.dims)
        for var, result in zip(eqn.outvars, layouts.results, strict=True)
    ]
    current = [result.dims for result in layouts.results]
    body = called_jaxpr(eqn)
    if body is not None and results != current:
        return _inner_operand_specs(body, layouts, results, mesh)
    for number, (spec, current_spec) in enumerate(zip(results, current, strict=True)):
        if spec != current_spec and eqn.primitive.name != DRAW:
            factors = op_factors(eqn)
            axes_by_factor = {
                dim_factors[0]: axes
                for dim_factors, axes in zip(factors.results[number], spec, strict=True)
                if dim_factors
            }
            assignment = factors.assignment(axes_by_factor)
            if factors.result_spec(number, assignment) == spec and factors.allows(assignment, mesh):
                return [factors.operand_spec(k, assignment) for k in range(len(eqn.invars))]
    return [operand.dims for operand in layouts.operands]


def _inner_operand_specs(
    jaxpr: Jaxpr, layouts: EquationLayouts, results: Sequence[Spec], mesh: LogicalMesh
) -> list[Spec]:
    """Return `_operand_specs` of an equation with a body, by propagation through the body."""
    steps, _ = propagate_jaxpr(jaxpr, layouts.operands, mesh)
    wanted = {
        var: spec for var, spec in zip(jaxpr.outvars, results, strict=True) if isinstance(var, Var)
    }
    _propagate_backward(steps, wanted, mesh)
    return [
        wanted.get(var, operand.dims)
        for var, operand in zip(jaxpr.invars, layouts.operands, strict=True)
    ]
