"""Random numbers that devices draw for their own shards: which draws these are, and how they are split.

A draw is whole by itself: a key and a shape. What uses it, a dropout of a split value, reads a part of it on each device. Here that
is followed back to the draw, so that a device draws its part alone, from a key of its own.
"""

from collections.abc import Iterable, Mapping, Sequence

from jax.extend.core import JaxprEqn, Var

from autopar.directives.model_graph import ModelGraph, Node
from autopar.directives.value_layouts import INNER, EquationLayouts, steps_of
from autopar.ir.graph import aval_of
from autopar.ir.spec import LogicalMesh, Spec, axes_of, replicated
from autopar.primitives import op_factors

DRAW = "random_bits"


def draws_of(nodes: Iterable[Node]) -> list[Node]:
    """The nodes that draw random numbers from a single key."""
    return [
        node
        for node in nodes
        if node.eqn.primitive.name == DRAW and aval_of(node.eqn.invars[0]).ndim == 0
    ]


def splits(
    graph: ModelGraph,
    draws: Iterable[Node],
    followed: Mapping[str, EquationLayouts],
    mesh: LogicalMesh,
) -> dict[Var, Spec]:
    """How what reads the draws wants them split; left out are those that are wanted whole, or in more than one way.

    Args:
        followed: how each node takes its operands, by name, when draws are whole.
    """
    wanted: dict[Var, Spec] = {}
    _wanted_before([(node.eqn, followed[node.name]) for node in graph.nodes], wanted, mesh)
    made = (node.eqn.outvars[0] for node in draws)
    return {var: wanted[var] for var in made if axes_of(wanted.get(var, ()))}


def _wanted_before(
    equations: Sequence[tuple[JaxprEqn, EquationLayouts]],
    wanted: dict[Var, Spec],
    mesh: LogicalMesh,
) -> None:
    """Add how equations want what they read, given how their results are wanted: whole where they disagree."""
    for eqn, followed in reversed(equations):
        specs = _wanted_operands(eqn, followed, wanted, mesh)
        for atom, spec in zip(eqn.invars, specs, strict=True):
            if isinstance(atom, Var) and wanted.setdefault(atom, spec) != spec:
                wanted[atom] = replicated(len(spec))


def _wanted_operands(
    eqn: JaxprEqn, followed: EquationLayouts, wanted: Mapping[Var, Spec], mesh: LogicalMesh
) -> Iterable[Spec]:
    """How an equation would take its operands if its results were split as they are wanted."""
    results = [
        wanted.get(var, result.dims)
        for var, result in zip(eqn.outvars, followed.results, strict=True)
    ]
    if eqn.primitive in INNER and results != [result.dims for result in followed.results]:
        return _wanted_inside(eqn, followed, results, mesh)
    for number, (spec, result) in enumerate(zip(results, followed.results, strict=True)):
        if spec != result.dims and eqn.primitive.name != DRAW and eqn.primitive not in INNER:
            factors = op_factors(eqn)
            given = {
                inside[0]: axes
                for inside, axes in zip(factors.results[number], spec, strict=True)
                if inside
            }
            assignment = tuple(given.get(f, ()) for f in range(len(factors.sizes)))
            if factors.result_spec(number, assignment) == spec and factors.allows(assignment, mesh):
                return [factors.operand_spec(k, assignment) for k in range(len(eqn.invars))]
    return [operand.dims for operand in followed.operands]


def _wanted_inside(
    eqn: JaxprEqn, followed: EquationLayouts, results: Sequence[Spec], mesh: LogicalMesh
) -> list[Spec]:
    """The same for what has a derivative of its own, or is called: through the equations inside."""
    jaxpr = eqn.params[INNER[eqn.primitive]]
    steps = steps_of(jaxpr, followed.operands, mesh)[0]
    wanted = {
        var: spec for var, spec in zip(jaxpr.outvars, results, strict=True) if isinstance(var, Var)
    }
    _wanted_before(steps, wanted, mesh)
    return [
        wanted.get(var, operand.dims)
        for var, operand in zip(jaxpr.invars, followed.operands, strict=True)
    ]
