"""A model's forward pass as a list of equations with names, each in the module that it belongs to.

JAX writes the scopes in which an equation was made into its name stack, and Flax linen opens one for each module, so that the
path of the module can be read off; a `jax.named_scope` does the same for any function. Calls of `jit` are inlined. What has
a derivative of its own (`custom_jvp`, `custom_vjp`) and loops stay whole. What the model itself recomputes in the backward pass,
by `jax.checkpoint`, is inlined too, and remembered.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.extend.core.primitives import closed_call_p, copy_p, jit_p, remat_p

from autopar.directives.nnx_scopes import MARK
from autopar.ir.graph import Atom, aval_of, needed

_CALLS = {jit_p: "jaxpr", closed_call_p: "call_jaxpr"}
_METHOD = re.compile(r"\.\w+$")


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """An equation: `linear1/add` is the first `add` of module `linear1`, `linear1/add:1` the second."""

    name: str
    scope: str
    eqn: JaxprEqn

    def within(self, path: str) -> bool:
        """Whether the node belongs to the module at `path`, or to one inside it."""
        return within(self.scope, path)


@dataclass(frozen=True, slots=True, eq=False)
class RematRegion:
    """Nodes that the model itself recomputes in the backward pass."""

    nodes: frozenset[str]
    policy: Any
    prevent_cse: Any


@dataclass(frozen=True, eq=False)
class ModelGraph:
    """The forward pass of a model.

    Attributes:
        nodes: in the order in which they run.
        params: for each array among the parameters its path, such as `linear1/kernel`.
        args: the same for the other arguments: `arg0`, or `arg1/mask`.
        in_tree, out_tree: structure of (parameters, *other arguments), and of the result.
        recomputed: the outermost first.
    """

    nodes: tuple[Node, ...]
    params: dict[Var, str]
    args: dict[Var, str]
    invars: tuple[Var, ...]
    outvars: tuple[Atom, ...]
    constants: dict[Var, Any]
    in_tree: Any
    out_tree: Any
    recomputed: tuple[RematRegion, ...] = field(default=())

    @cached_property
    def by_name(self) -> dict[str, Node]:
        return {node.name: node for node in self.nodes}

    @cached_property
    def producer(self) -> dict[Var, Node]:
        return {var: node for node in self.nodes for var in node.eqn.outvars}

    @cached_property
    def value_names(self) -> dict[Var, str]:
        """Parameters by path, other arguments by position, results by node, `top_k#1` for the second of one."""
        names = {**self.params, **self.args}
        names.update((var, f"constant:{number}") for number, var in enumerate(self.constants))
        for node in self.nodes:
            names.update(
                (v, f"{node.name}#{r}" if r else node.name) for r, v in enumerate(node.eqn.outvars)
            )
        return names

    @cached_property
    def values(self) -> dict[str, Var]:
        return {name: var for var, name in self.value_names.items()}

    def inputs_of(self, nodes: Sequence[Node]) -> list[Var]:
        """What `nodes` read and don't make, in the order of first use."""
        made = {var for node in nodes for var in node.eqn.outvars}
        read = (atom for node in nodes for atom in node.eqn.invars if isinstance(atom, Var))
        return [var for var in dict.fromkeys(read) if var not in made]

    def outputs_of(self, nodes: Sequence[Node]) -> list[Var]:
        """What others need of what `nodes` make."""
        own = {node.name for node in nodes}
        needed = {
            a
            for node in self.nodes
            if node.name not in own
            for a in node.eqn.invars
            if isinstance(a, Var)
        }
        needed.update(atom for atom in self.outvars if isinstance(atom, Var))
        return [var for node in nodes for var in node.eqn.outvars if var in needed]


def within(scope: str, path: str) -> bool:
    """Whether `scope` is `path` or inside it."""
    return not path or scope == path or scope.startswith(f"{path}/")


def joined(path: str, name: str) -> str:
    """What is called `name` in the module at `path`; "" is the model itself."""
    return "/".join(filter(None, (path, name)))


def trace_model(
    fun: Callable[..., Any],
    params: Any,
    args: Sequence[Any],
    root: str | None,
    param_path: Callable[[Any], str],
) -> ModelGraph:
    """Trace `fun(params, *args)`.

    Args:
        root: the scope that the whole model is in: the class of a linen module.
        param_path: from the key path of a parameter to what it is called.
    """
    jaxpr, shapes = jax.make_jaxpr(fun, return_shape=True)(params, *args)
    builder = _Builder(root)
    invars = [Var(var.aval) for var in jaxpr.invars]
    outvars = builder.inline(jaxpr, invars, "", ())
    leaves, in_tree = jax.tree.flatten_with_path((params, *args))
    named = [(var, path) for var, (path, _) in zip(invars, leaves, strict=True)]
    nodes = tuple(
        builder.nodes[n] for n, _ in needed(enumerate(node.eqn for node in builder.nodes), outvars)
    )
    keep = {node.name for node in nodes}
    groups = (RematRegion(frozenset(names) & keep, *rest) for names, *rest in builder.recomputed)
    return ModelGraph(
        nodes,
        {var: param_path(path[1:]) for var, path in named if path[0].idx == 0},
        {var: _arg_path(path) for var, path in named if path[0].idx > 0},
        tuple(invars),
        tuple(outvars),
        builder.constants,
        in_tree,
        jax.tree.structure(shapes),
        tuple(group for group in groups if group.nodes),
    )


def trace_at(
    fun: Callable[..., Sequence[Any]], inputs: Sequence[Var], path: str, taken: Sequence[str]
) -> tuple[list[Node], list[Atom], dict[Var, Any]]:
    """The equations of `fun` of some values, in a scope of their own; what it returns, each made by a copy; and its constants.

    Args:
        taken: names that nodes have already.
    """
    avals = [jax.ShapeDtypeStruct(aval_of(var).shape, aval_of(var).dtype) for var in inputs]
    jaxpr = jax.make_jaxpr(lambda *values: list(map(copy_p.bind, fun(*values))))(*avals)
    builder = _Builder(None, taken)
    outvars = builder.inline(jaxpr, inputs, path, ())
    return builder.nodes, outvars, builder.constants


def _arg_path(path: Any) -> str:
    inner = jax.tree_util.keystr(path[1:], simple=True, separator="/")
    return f"arg{path[0].idx - 1}/{inner}".removesuffix("/")


class _Builder:
    def __init__(self, root: str | None, taken: Sequence[str] = ()) -> None:
        self.root = root
        self.nodes: list[Node] = []
        self.constants: dict[Var, Any] = {}
        self.recomputed: list[tuple[set[str], Any, Any]] = []
        self._count: Counter[str] = Counter(name.partition(":")[0] for name in taken)

    def inline(
        self, jaxpr: Jaxpr, args: Sequence[Atom], stack: str, groups: tuple[set[str], ...]
    ) -> list[Atom]:
        env: dict[Var, Atom] = dict(zip(jaxpr.invars, args, strict=True))
        for var, value in zip(jaxpr.constvars, jaxpr.consts, strict=True):
            env[var] = new = Var(var.aval)
            self.constants[new] = value

        def rename(atom: Atom) -> Atom:
            return atom if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            invars = [rename(atom) for atom in eqn.invars]
            at = joined(stack, str(eqn.source_info.name_stack))
            if eqn.primitive in _CALLS:
                outvars = self.inline(eqn.params[_CALLS[eqn.primitive]], invars, at, groups)
            elif eqn.primitive is remat_p:
                names: set[str] = set()
                self.recomputed.append((names, eqn.params["policy"], eqn.params["prevent_cse"]))
                outvars = self.inline(eqn.params["jaxpr"], invars, at, (*groups, names))
            else:
                outvars = [Var(var.aval) for var in eqn.outvars]
                self._append(
                    eqn.replace(invars=invars, outvars=list(outvars)), self._scope(at), groups
                )
            env.update(zip(eqn.outvars, outvars, strict=True))
        return [rename(atom) for atom in jaxpr.outvars]

    def _append(self, eqn: JaxprEqn, scope: str, groups: tuple[set[str], ...]) -> None:
        name = joined(scope, eqn.primitive.name)
        count, self._count[name] = self._count[name], self._count[name] + 1
        name = f"{name}:{count}" if count else name
        self.nodes.append(Node(name, scope, eqn))
        for group in groups:
            group.add(name)

    def _scope(self, stack: str) -> str:
        """The path of a module: without the model's own name, and without the names of methods (`Embed.attend`)."""
        parts = [part for part in stack.split("/") if part]
        marked = max((k for k, part in enumerate(parts) if part.startswith(MARK)), default=None)
        if marked is not None:
            return "/".join([*parts[marked].removeprefix(MARK).split("."), *parts[marked + 1 :]])
        parts = [_METHOD.sub("", part) for part in parts]
        return "/".join(parts[1:] if parts and parts[0] == self.root else parts)
