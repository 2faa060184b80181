"""Equal bodies of `jax.checkpoint` as one jaxpr, so that JAX differentiates each body once.

The blocks of a model are equal but for the names of their scopes. JAX caches derivatives and
transposes of a jaxpr by its identity.
"""

from collections.abc import Hashable, Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.extend.core.primitives import remat_p

from autopar.ir.graph import Atom, literal_key, with_name_stack
from autopar.ir.scope_renaming import is_scope, renaming_scope


def with_shared_bodies(eqns: Sequence[JaxprEqn]) -> list[JaxprEqn]:
    """Return equations whose `jax.checkpoint` calls share equal bodies.

    A call whose body has other names for its scopes ends its name stack in a renaming
    (`autopar.ir.scope_renaming`). Bodies that differ in anything else stay as they are.

    Args:
        eqns: equations of a function before differentiation.
    """
    first: dict[Hashable, tuple[Jaxpr, list[Any]]] = {}
    shared: list[JaxprEqn] = []
    for eqn in eqns:
        if eqn.primitive is remat_p:
            body = _CheckpointedBody(eqn.params["jaxpr"])
            jaxpr, elements = first.setdefault(body.key, (body.jaxpr, body.elements))
            names = _renaming(elements, body.elements)
            if jaxpr is not body.jaxpr and names is not None:
                eqn = eqn.replace(params={**eqn.params, "jaxpr": jaxpr})
                if names:
                    stack = eqn.source_info.name_stack.extend(renaming_scope(names))
                    eqn = with_name_stack(eqn, stack)
        shared.append(eqn)
    return shared


def _renaming(elements: Sequence[Any], others: Sequence[Any]) -> dict[str, str] | None:
    """Return the other name of each scope whose name differs; None if one has several.

    Args:
        elements: elements of the name stacks of a body.
        others: elements of the name stacks of an equal body, in the same order.
    """
    names: dict[str, str] = {}
    for element, other in zip(elements, others, strict=True):
        if is_scope(element) and names.setdefault(element.name, other.name) != other.name:
            return None
    return {name: other for name, other in names.items() if name != other}


class _CheckpointedBody:
    """A jaxpr with a key that is equal for jaxprs that differ only in the names of their scopes.

    Attributes:
        jaxpr: the jaxpr.
        key: the key. It contains the traceback of each equation.
        elements: elements of the name stacks of its equations, in order.
    """

    def __init__(self, jaxpr: Jaxpr) -> None:
        self.jaxpr = jaxpr
        self.elements: list[Any] = []
        self.key = self._key(jaxpr)
        try:
            hash(self.key)
        except TypeError:  # parameters that can't be compared
            self.key = id(jaxpr)

    def _key(self, jaxpr: Jaxpr) -> Hashable:
        numbers: dict[Var, int] = {}

        def name(atom: Atom) -> Hashable:
            if isinstance(atom, Literal):
                return literal_key(atom)
            return numbers.setdefault(atom, len(numbers)), atom.aval

        return (
            tuple(map(name, jaxpr.constvars)),
            tuple(map(id, jaxpr.consts)),
            tuple(map(name, jaxpr.invars)),
            tuple(self._eqn_key(eqn, name) for eqn in jaxpr.eqns),
            tuple(map(name, jaxpr.outvars)),
        )

    def _eqn_key(self, eqn: JaxprEqn, name: Any) -> Hashable:
        stack = eqn.source_info.name_stack.stack
        self.elements += stack
        return (
            eqn.primitive,
            tuple(map(name, eqn.invars)),
            tuple(map(name, eqn.outvars)),
            tuple((key, self._param_key(value)) for key, value in sorted(eqn.params.items())),
            frozenset(eqn.effects),
            eqn.ctx,
            eqn.source_info.traceback,
            tuple(None if is_scope(element) else element for element in stack),
        )

    def _param_key(self, value: Any) -> Hashable:
        match value:
            case Jaxpr():
                return self._key(value)
            case tuple():
                return type(value), tuple(map(self._param_key, value))
            case float():  # 0.0 == -0.0
                return type(value), repr(value)
            case _:  # 1 == True
                return type(value), value
