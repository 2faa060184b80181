"""Subgraph matching: the equations of a model that compute what a pattern computes.

The matcher is a backtracking search from the results backwards along data dependences.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from autopar.directives.broadcasts import BroadcastView, look_through_broadcasts, nontrivial_sizes
from autopar.directives.definitions import DirectiveError
from autopar.directives.model_graph import ModelGraph, Node
from autopar.ir.graph import Atom, aval_of
from autopar.primitives import record_of

_FREE = frozenset({
    *("out_sharding", "sharding", "weak_type", "precision", "preferred_element_type"),
    *("new_sizes", "shape", "accuracy"),
    *("jvp", "jvp_jaxpr_fun", "fwd", "bwd", "fwd_jaxpr_thunk", "num_consts", "symbolic_zeros"),
})  # fmt: skip
"""Equation parameters that do not change what is computed, given shapes and other parameters."""


@dataclass(frozen=True, slots=True)
class Subgraph:
    """A set of equations of a model, as `find` returns it.

    Attributes:
        nodes: the names of the equations, in the order in which they run.
        inputs: for a match of a pattern, the value bound to each argument of the pattern. For
            other subgraphs, the values that the equations read.
    """

    nodes: tuple[str, ...]
    inputs: tuple[str, ...]

    def __str__(self) -> str:
        return f"[{', '.join(self.nodes)}]"


type _Pair = tuple[Atom, Atom, JaxprEqn | None, JaxprEqn | None]
"""An atom of the pattern, the atom of the graph that has to match it, and the equations that read
each of them."""


@dataclass(frozen=True, slots=True)
class _State:
    """A partial match.

    Attributes:
        nodes: the nodes of the graph that match each node of the pattern. There are several where
            the graph computes a value more than once.
        bound: the value bound to each argument of the pattern.
        between: broadcasting nodes of the graph between matched nodes.
    """

    nodes: dict[str, tuple[Node, ...]]
    bound: dict[Var, BroadcastView]
    between: tuple[Node, ...]


class PatternMatcher:
    """A search for matches of a pattern in a model.

    Args:
        graph: the model.
        pattern: the pattern, traced for arguments of some shapes.
        allowed: the names of the nodes that may be part of a match.
        like: the shapes and dtypes of the pattern's arguments; None if any shape matches.
    """

    def __init__(
        self, graph: ModelGraph, pattern: ModelGraph, allowed: set[str], like: Sequence[Any] | None
    ) -> None:
        self.graph = graph
        self.pattern = pattern
        self.allowed = allowed
        self.shapes = {}
        if like is not None:
            self.shapes = {var: aval.shape for var, aval in zip(pattern.args, like, strict=True)}

    def matches(self, result: Var) -> Iterator[Subgraph]:
        """Yield the subgraphs that compute `result` as the pattern does.

        Each match is yielded with its arguments bound before broadcasts, then after them.
        """
        for state in self._solve(
            [(self.pattern.outvars[0], result, None, None)], _State({}, {}, ())
        ):
            for through in (True, False):
                subgraph = self._subgraph(state, result, through)
                if subgraph is not None:
                    yield subgraph

    def _solve(self, pairs: list[_Pair], state: _State) -> Iterator[_State]:
        """Yield every extension of `state` in which all `pairs` match."""
        if not pairs:
            yield state
            return
        (wanted, given, reader, other), *rest = pairs
        left = look_through_broadcasts(self.pattern, wanted)
        right = look_through_broadcasts(self.graph, given)
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
            if state.bound.get(source, right).source is right.source:
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
        """Yield every extension of `state` in which the producers of both values match."""
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
        between = state.between + given.nodes
        matched = state.nodes.get(left.name, ())
        if right in matched:
            yield from self._solve(rest, _State(state.nodes, state.bound, between))
            return
        after = _State({**state.nodes, left.name: (*matched, right)}, state.bound, between)
        as_written = list(left.eqn.invars)
        commutes = record_of(left.eqn).commutes
        for order in (as_written, as_written[::-1]) if commutes else (as_written,):
            operands = zip(order, right.eqn.invars, strict=True)
            yield from self._solve([(a, b, left.eqn, right.eqn) for a, b in operands] + rest, after)

    def _is_elementwise(self, atom: Atom) -> bool:
        """Return whether a value of the pattern is an elementwise function of its arguments.

        A model may compute such a value before a broadcast.
        """
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
        """Return whether one of `values` has the shape that `like` gives to an argument."""
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
        """Return a match as a subgraph, or None if a value inside is used outside.

        Args:
            state: the match.
            result: its result in the model.
            through: whether arguments are bound before broadcasts that NumPy's rules imply.
        """
        own = {node.name for nodes in (*state.nodes.values(), state.between) for node in nodes}
        if not own <= self.allowed:
            return None
        inputs = []
        for var in self.pattern.args:
            if var not in state.bound:
                raise DirectiveError(
                    f"argument {self.pattern.args[var]} of the pattern is not used in it; use it in"
                    " the pattern, or leave it out"
                )
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
        """Return the value to bind to an argument of the pattern, and add nodes behind it to `own`.

        Broadcasts that NumPy's rules imply join the match if nothing else uses them. So do nodes
        after which the value no longer has `shape`, that of the argument.
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
        """Return whether `nodes` may join a match, and only the match uses their results."""
        together = own | {node.name for node in nodes}
        members = [node for node in self.graph.nodes if node.name in together]
        results = {var for node in nodes for var in node.eqn.outvars}
        outputs = self.graph.outputs_of(members)
        return together - own <= self.allowed and results.isdisjoint(outputs)


def _frame(atom: Atom, reader: JaxprEqn | None) -> Sequence[int]:
    """Return the shape to which `reader` broadcasts its operand `atom`."""
    if reader is not None and record_of(reader).fusion == "elementwise":
        return aval_of(reader.outvars[0]).shape
    return aval_of(atom).shape


def _position(node: Node, var: Atom) -> int:
    return next(position for position, result in enumerate(node.eqn.outvars) if result is var)


def _same_operation(left: JaxprEqn, right: JaxprEqn) -> bool:
    if left.primitive is not right.primitive or len(left.invars) != len(right.invars):
        return False
    # An elementwise operation commutes with broadcasts, so that its shape may differ.
    if record_of(left).fusion != "elementwise" and _result_sizes(left) != _result_sizes(right):
        return False
    return _defining_params(left) == _defining_params(right)


def _result_sizes(eqn: JaxprEqn) -> list[list[int]]:
    return [nontrivial_sizes(var) for var in eqn.outvars]


def _defining_params(eqn: JaxprEqn) -> dict[str, Any]:
    """Return the parameters that define what is computed, with jaxprs as text, to compare them."""
    params = {key: value for key, value in eqn.params.items() if key not in _FREE}
    return {key: str(value) if hasattr(value, "eqns") else value for key, value in params.items()}
