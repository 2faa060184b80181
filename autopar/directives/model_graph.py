"""The forward pass of a model as a list of named equations, each in a module of the model.

JAX records the named scopes around an equation in its name stack. Flax linen opens a scope for each
module, so the name stack gives the path of the module; `jax.named_scope` does the same in any
function. Calls of `jit` are inlined. Functions with a derivative rule (`custom_jvp`, `custom_vjp`)
and loops stay single equations. Calls of `jax.checkpoint` in the model are inlined too; their
equations are recorded as regions.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.extend.core.primitives import copy_p, remat_p

from autopar._plugins import assume_cudnn
from autopar.directives.nnx_scopes import MARK
from autopar.ir.calls import called_jaxpr, has_derivative_rule
from autopar.ir.graph import Atom, aval_of, needed, variables

_METHOD = re.compile(r"\.\w+$")
_VMAP = re.compile(r"\bvmap\(([^()]*)\)")


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """An equation. `linear1/add` is the first `add` of module `linear1`; `:1` marks the second."""

    name: str
    scope: str
    eqn: JaxprEqn

    def within(self, path: str) -> bool:
        """Return whether the node belongs to the module at `path`, or to one inside it."""
        return within(self.scope, path)


@dataclass(frozen=True, slots=True, eq=False)
class RematRegion:
    """Nodes that the model itself recomputes in the backward pass, by `jax.checkpoint`."""

    nodes: frozenset[str]
    policy: Any
    prevent_cse: Any


@dataclass(frozen=True, eq=False)
class ModelGraph:
    """The forward pass of a model.

    Attributes:
        nodes: the equations in the order in which they run.
        params: the path of each parameter, such as `linear1/kernel`.
        args: the name of each other argument: `arg0`, or `arg1/mask`.
        invars: parameters and other arguments, flat.
        outvars: the results, flat.
        constants: values that the model closes over.
        in_tree: the structure of (parameters, *other arguments).
        out_tree: the structure of the result.
        remat_regions: regions of `jax.checkpoint`, the outermost first.
    """

    nodes: tuple[Node, ...]
    params: dict[Var, str]
    args: dict[Var, str]
    invars: tuple[Var, ...]
    outvars: tuple[Atom, ...]
    constants: dict[Var, Any]
    in_tree: Any
    out_tree: Any
    remat_regions: tuple[RematRegion, ...] = ()

    @cached_property
    def by_name(self) -> dict[str, Node]:
        """Nodes by name."""
        return {node.name: node for node in self.nodes}

    @cached_property
    def producer(self) -> dict[Var, Node]:
        """The node that computes each value."""
        return {var: node for node in self.nodes for var in node.eqn.outvars}

    @cached_property
    def value_names(self) -> dict[Var, str]:
        """The name of each value.

        Parameters are named by path, other arguments by position, and results by node, with `#1`
        for the second result (`top_k#1`).
        """
        names = {**self.params, **self.args}
        names.update((var, f"constant:{number}") for number, var in enumerate(self.constants))
        for node in self.nodes:
            names.update(
                (v, f"{node.name}#{r}" if r else node.name) for r, v in enumerate(node.eqn.outvars)
            )
        return names

    @cached_property
    def values(self) -> dict[str, Var]:
        """Values by name."""
        return {name: var for var, name in self.value_names.items()}

    def inputs_of(self, nodes: Sequence[Node]) -> list[Var]:
        """Return the values that `nodes` read but do not compute, in the order of first use."""
        computed = {var for node in nodes for var in node.eqn.outvars}
        read = variables(atom for node in nodes for atom in node.eqn.invars)
        return [var for var in dict.fromkeys(read) if var not in computed]

    def outputs_of(self, nodes: Sequence[Node]) -> list[Var]:
        """Return the results of `nodes` that other nodes read or the model returns."""
        own = {node.name for node in nodes}
        others = (node for node in self.nodes if node.name not in own)
        read = (atom for node in others for atom in node.eqn.invars)
        needed = set(variables((*read, *self.outvars)))
        return [var for node in nodes for var in node.eqn.outvars if var in needed]


def depth(path: str) -> int:
    """Return how many modules a path has; the path of the model has none."""
    return path.count("/") + 1 if path else 0


def within(scope: str, path: str) -> bool:
    """Return whether the module at `scope` is the one at `path`, or inside it."""
    return not path or scope == path or scope.startswith(f"{path}/")


def join_path(path: str, name: str) -> str:
    """Return the path of `name` in the module at `path`; "" is the model itself."""
    return "/".join(filter(None, (path, name)))


def trace_model(
    fun: Callable[..., Any],
    params: Any,
    args: Sequence[Any],
    root: str | None,
    param_path: Callable[[Any], str],
) -> ModelGraph:
    """Return the equations of `fun(params, *args)`.

    Args:
        fun: the model.
        params: a pytree of arrays or ShapeDtypeStructs.
        args: the other arguments, pytrees of arrays or ShapeDtypeStructs.
        root: the scope around the whole model, if there is one: the class name of a linen module.
        param_path: a function from the key path of a parameter to its name.
    """
    with assume_cudnn():
        jaxpr, shapes = jax.make_jaxpr(fun, return_shape=True)(params, *args)
    builder = _ModelGraphBuilder(root)
    invars = [Var(var.aval) for var in jaxpr.invars]
    outvars = builder.inline(jaxpr, invars, "", ())
    leaves, in_tree = jax.tree.flatten_with_path((params, *args))
    paths = [(var, path) for var, (path, _) in zip(invars, leaves, strict=True)]
    nodes = tuple(
        builder.nodes[n] for n, _ in needed(enumerate(node.eqn for node in builder.nodes), outvars)
    )
    live = {node.name for node in nodes}
    regions = (RematRegion(frozenset(names) & live, *rest) for names, *rest in builder.remat)
    return ModelGraph(
        nodes,
        {var: param_path(path[1:]) for var, path in paths if path[0].idx == 0},
        {var: _arg_path(path) for var, path in paths if path[0].idx > 0},
        tuple(invars),
        tuple(outvars),
        builder.constants,
        in_tree,
        jax.tree.structure(shapes),
        tuple(region for region in regions if region.nodes),
    )


def trace_in_scope(
    fun: Callable[..., Sequence[Any]], inputs: Sequence[Var], path: str, taken: Sequence[str]
) -> tuple[list[Node], list[Atom], dict[Var, Any]]:
    """Return the equations of `fun(*inputs)` as nodes, its results, and its constants.

    Each result is computed by a copy.

    Args:
        fun: a function of arrays that returns arrays.
        inputs: values of a model.
        path: the scope of the new nodes.
        taken: names of existing nodes, which new nodes do not get.
    """
    avals = [jax.ShapeDtypeStruct(aval_of(var).shape, aval_of(var).dtype) for var in inputs]
    with assume_cudnn():
        jaxpr = jax.make_jaxpr(lambda *values: list(map(copy_p.bind, fun(*values))))(*avals)
    builder = _ModelGraphBuilder(None, taken)
    outvars = builder.inline(jaxpr, inputs, path, ())
    return builder.nodes, outvars, builder.constants


def _arg_path(path: Any) -> str:
    inner = jax.tree_util.keystr(path[1:], simple=True, separator="/")
    return f"arg{path[0].idx - 1}/{inner}".removesuffix("/")


class _ModelGraphBuilder:
    """Collects the nodes of a model's graph; calls are inlined."""

    def __init__(self, root: str | None, taken: Sequence[str] = ()) -> None:
        self.root = root
        self.nodes: list[Node] = []
        self.constants: dict[Var, Any] = {}
        self.remat: list[tuple[set[str], Any, Any]] = []
        self._count: Counter[str] = Counter(name.partition(":")[0] for name in taken)

    def inline(
        self, jaxpr: Jaxpr, args: Sequence[Atom], stack: str, regions: tuple[set[str], ...]
    ) -> list[Atom]:
        """Append the equations of `jaxpr` to the nodes, and return its results.

        Args:
            jaxpr: the function that is inlined.
            args: its arguments.
            stack: the name stack around it.
            regions: for each `jax.checkpoint` around it, the set to which its nodes are added.
        """
        env: dict[Var, Atom] = dict(zip(jaxpr.invars, args, strict=True))
        for var, value in zip(jaxpr.constvars, jaxpr.consts, strict=True):
            env[var] = new = Var(var.aval)
            self.constants[new] = value

        def rename(atom: Atom) -> Atom:
            return atom if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            invars = [rename(atom) for atom in eqn.invars]
            scopes = join_path(stack, str(eqn.source_info.name_stack))
            called = called_jaxpr(eqn)
            if called is not None and not has_derivative_rule(eqn):
                inner = regions
                if eqn.primitive is remat_p:
                    names: set[str] = set()
                    self.remat.append((names, eqn.params["policy"], eqn.params["prevent_cse"]))
                    inner = (*regions, names)
                outvars = self.inline(called, invars, scopes, inner)
            else:
                outvars = [Var(var.aval) for var in eqn.outvars]
                self._append(
                    eqn.replace(invars=invars, outvars=list(outvars)), self._scope(scopes), regions
                )
            env.update(zip(eqn.outvars, outvars, strict=True))
        return [rename(atom) for atom in jaxpr.outvars]

    def _append(self, eqn: JaxprEqn, scope: str, regions: tuple[set[str], ...]) -> None:
        name = join_path(scope, eqn.primitive.name)
        count = self._count[name]
        self._count[name] += 1
        name = f"{name}:{count}" if count else name
        self.nodes.append(Node(name, scope, eqn))
        for region in regions:
            region.add(name)

    def _scope(self, stack: str) -> str:
        """Return the path of the module of a name stack.

        The path lacks the name of the whole model, names of methods (`Embed.attend`), and `vmap`s
        around scopes (`vmap(linear1)`).
        """
        while _VMAP.search(stack):
            stack = _VMAP.sub(r"\1", stack)
        parts = [part for part in stack.split("/") if part]
        marked = max((k for k, part in enumerate(parts) if part.startswith(MARK)), default=None)
        if marked is not None:
            return "/".join([*parts[marked].removeprefix(MARK).split("."), *parts[marked + 1 :]])
        parts = [_METHOD.sub("", part) for part in parts]
        return "/".join(parts[1:] if parts and parts[0] == self.root else parts)
