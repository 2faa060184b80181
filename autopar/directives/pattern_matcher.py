"""Match the equations of a pattern with those of a model, backwards along data edges."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from autopar.directives.broadcasts import BroadcastView, look_through, sizes
from autopar.directives.definitions import DirectiveError
from autopar.directives.model_graph import ModelGraph, Node
from autopar.ir.graph import Atom, aval_of
from autopar.primitives import record_of

_FREE = frozenset({
    *("out_sharding", "sharding", "weak_type", "precision", "preferred_element_type", "new_sizes", "shape"),
    *("jvp", "jvp_jaxpr_fun", "fwd", "bwd", "fwd_jaxpr_thunk", "num_consts", "symbolic_zeros", "accuracy"),
})  # fmt: skip
"""Parameters that don't say what is computed, beyond what shapes and the other parameters do."""


@dataclass(frozen=True, slots=True)
class Subgraph:
    """Equations of a model that belong together.

    Attributes:
        nodes: their names, in the order in which they run.
        inputs: the values that a pattern's arguments stand for, in their order; for others what the equations read.
    """

    nodes: tuple[str, ...]
    inputs: tuple[str, ...]

    def __str__(self) -> str:
        return f"[{', '.join(self.nodes)}]"


type _Pair = tuple[Atom, Atom, JaxprEqn | None, JaxprEqn | None]
"""Atoms of the pattern and of the graph that should be the same, and the equations that read them."""


@dataclass(frozen=True, slots=True)
class _State:
    """A match so far: the graph's nodes for each of the pattern's, its value for each argument, and nodes looked through.

    A pattern's node may be several of the graph that compute the same.
    """

    nodes: dict[str, tuple[Node, ...]]
    bound: dict[Var, BroadcastView]
    between: tuple[Node, ...]


class PatternMatcher:
    def __init__(
        self, graph: ModelGraph, pattern: ModelGraph, allowed: set[str], like: Sequence[Any] | None
    ) -> None:
        self.graph, self.pattern, self.allowed = graph, pattern, allowed
        self.shapes = (
            {}
            if like is None
            else {v: each.shape for v, each in zip(pattern.args, like, strict=True)}
        )

    def matches(self, result: Var) -> Iterator[Subgraph]:
        """The subgraphs that compute `result` as the pattern does, with arguments before and after broadcasts."""
        for state in self._solve(
            [(self.pattern.outvars[0], result, None, None)], _State({}, {}, ())
        ):
            for through in (True, False):
                found = self._subgraph(state, result, through)
                if found is not None:
                    yield found

    def _solve(self, pairs: list[_Pair], state: _State) -> Iterator[_State]:
        """Every way to match the pairs."""
        if not pairs:
            yield state
            return
        (wanted, given, reader, other), *rest = pairs
        left, right = look_through(self.pattern, wanted), look_through(self.graph, given)
        source = left.source
        if isinstance(source, Literal) or source in self.pattern.constants:
            if self._same_constant(source, right.source):
                yield from self._solve(
                    rest, _State(state.nodes, state.bound, state.between + right.nodes)
                )
        elif source in self.pattern.args:
            if isinstance(right.source, Literal) or not self._is_like(
                source, (given, right.source)
            ):
                return
            known = state.bound.get(source, right)
            if known.source is right.source:
                yield from self._solve(
                    rest, _State(state.nodes, {source: right, **state.bound}, state.between)
                )
        elif left.order(wanted, _frame(wanted, reader)) == right.order(
            given, _frame(given, other)
        ) or (right.numpy_like and self._is_elementwise(source)):
            yield from self._solve_nodes(source, right, rest, state)

    def _solve_nodes(
        self, wanted: Var, given: BroadcastView, rest: list[_Pair], state: _State
    ) -> Iterator[_State]:
        left = self.pattern.producer[wanted]
        right = self.graph.producer.get(given.source) if isinstance(given.source, Var) else None
        if (
            right is None
            or right.name not in self.allowed
            or not _same_operation(left.eqn, right.eqn)
        ):
            return
        if _position(left, wanted) != _position(right, given.source):
            return
        between, known = state.between + given.nodes, state.nodes.get(left.name, ())
        if right in known:
            yield from self._solve(rest, _State(state.nodes, state.bound, between))
            return
        after = _State({**state.nodes, left.name: (*known, right)}, state.bound, between)
        as_written = list(left.eqn.invars)
        commutes = record_of(left.eqn).commutes
        for order in (as_written, as_written[::-1]) if commutes else (as_written,):
            operands = zip(order, right.eqn.invars, strict=True)
            yield from self._solve([(a, b, left.eqn, right.eqn) for a, b in operands] + rest, after)

    def _is_elementwise(self, atom: Atom) -> bool:
        """Whether a value of the pattern is of its arguments element by element: it may then be computed before a broadcast."""
        if isinstance(atom, Literal):
            return True
        if atom in self.pattern.args:
            return atom not in self.shapes
        node = self.pattern.producer.get(atom)
        return (
            node is not None
            and record_of(node.eqn).fusion == "elementwise"
            and all(map(self._is_elementwise, node.eqn.invars))
        )

    def _is_like(self, argument: Var, values: Sequence[Atom]) -> bool:
        """Whether one of `values` has the shape that is wanted of an argument, if any is."""
        shape = self.shapes.get(argument)
        return shape is None or any(aval_of(value).shape == shape for value in values)

    def _same_constant(self, wanted: Atom, given: Atom) -> bool:
        values = []
        for atom, graph in ((wanted, self.pattern), (given, self.graph)):
            if isinstance(atom, Literal):
                values.append(np.asarray(atom.val))
            elif atom in graph.constants:
                values.append(np.asarray(graph.constants[atom]))
            else:
                return False
        left, right = (
            value.astype(np.float64) if value.dtype != bool else value for value in values
        )
        return left.shape == right.shape and bool(
            np.all((left == right) | np.isclose(left, right, rtol=1e-6, atol=0))
        )

    def _subgraph(self, state: _State, result: Var, through: bool) -> Subgraph | None:
        """The match as it is, or None when a value inside is used outside; `through` has arguments looked through broadcasts."""
        own = {node.name for nodes in (*state.nodes.values(), state.between) for node in nodes}
        if not own <= self.allowed:
            return None
        inputs = []
        for var in self.pattern.args:
            if var not in state.bound:
                raise DirectiveError(f"{self.pattern.args[var]} of the pattern is not used in it")
            inputs.append(self._input(state.bound[var], aval_of(var).shape, own, through))
        nodes = [node for node in self.graph.nodes if node.name in own]
        if any(var is not result for var in self.graph.outputs_of(nodes)):
            return None
        return Subgraph(
            tuple(node.name for node in nodes), tuple(self.graph.value_names[var] for var in inputs)
        )

    def _input(
        self, bound: BroadcastView, shape: tuple[int, ...], own: set[str], through: bool
    ) -> Var:
        """The value to bind, before broadcasts that NumPy's rules imply and nobody else uses; these join the match.

        So do changes of shape after which it has no longer that of the pattern's argument.
        """
        values = [*(node.eqn.outvars[0] for node in bound.nodes), bound.source]
        if through and bound.nodes and bound.numpy_like:
            starts = [len(bound.nodes)]
        else:
            starts = [k for k, value in enumerate(values) if aval_of(value).shape == shape]
        start = next((k for k in starts if self._alone(bound.nodes[:k], own)), 0)
        own.update(node.name for node in bound.nodes[:start])
        value = values[start]
        assert isinstance(value, Var)
        return value

    def _alone(self, nodes: Sequence[Node], own: set[str]) -> bool:
        """Whether `nodes` may join a match and what they make is used in it only."""
        together = own | {node.name for node in nodes}
        members = [node for node in self.graph.nodes if node.name in together]
        made = {var for node in nodes for var in node.eqn.outvars}
        return together - own <= self.allowed and made.isdisjoint(self.graph.outputs_of(members))


def _frame(atom: Atom, reader: JaxprEqn | None) -> Sequence[int]:
    """The shape to which an operand is broadcast where it is read."""
    if reader is not None and record_of(reader).fusion == "elementwise":
        return aval_of(reader.outvars[0]).shape
    return aval_of(atom).shape


def _position(node: Node, var: Atom) -> int:
    return next(position for position, each in enumerate(node.eqn.outvars) if each is var)


def _same_operation(left: JaxprEqn, right: JaxprEqn) -> bool:
    if left.primitive is not right.primitive or len(left.invars) != len(right.invars):
        return False
    # What works on each element alone may do so before a broadcast or after.
    alike = record_of(left).fusion == "elementwise" or _sizes(left) == _sizes(right)
    return alike and _meaning(left) == _meaning(right)


def _sizes(eqn: JaxprEqn) -> list[list[int]]:
    """The shapes of the results, without dims of size one."""
    return [sizes(var) for var in eqn.outvars]


def _meaning(eqn: JaxprEqn) -> dict[str, Any]:
    """The parameters that say what is computed, in a form that compares."""
    kept = {key: value for key, value in eqn.params.items() if key not in _FREE}
    return {key: str(value) if hasattr(value, "eqns") else value for key, value in kept.items()}
