"""`create_schedule`: a model together with the directives that are written for it."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from flax import linen as nn
from flax import nnx
from jax.extend.core import Literal, Var

from autopar.checks import short_repr
from autopar.devices import Devices, planned_mesh
from autopar.directives import definitions as d
from autopar.directives import nnx_scopes
from autopar.directives.broadcasts import look_through_broadcasts
from autopar.directives.definitions import Directive, DirectiveError, DirectiveSchedule
from autopar.directives.directive_checks import check_directive
from autopar.directives.equation_regions import (
    GraphItem,
    Region,
    RegionNode,
    arrange_regions,
    recomputable_parts,
)
from autopar.directives.handle import Handle
from autopar.directives.model_graph import Node, join_path, trace_model, within
from autopar.directives.module_tree import ModuleTree, classes_of
from autopar.directives.pattern_matcher import Subgraph
from autopar.directives.placed_model import PlacedModel
from autopar.directives.propagation import LayoutDecisions, SyncInsideReplacement, place_model
from autopar.directives.replacements import (
    ModuleFunction,
    as_function,
    inline_replacement,
    inline_replacement_for_sync,
)
from autopar.directives.rng_forking import random_draws
from autopar.ir.graph import Atom
from autopar.ir.spec import AnyMesh, LogicalMesh
from autopar.tracing.argument_arrays import abstract


def create_schedule(
    model: nn.Module | nnx.Module | Callable[..., Any],
    params: Any,
    example_args: Sequence[Any],
    mesh: Devices = None,
    schedule: DirectiveSchedule | None = None,
    functions: dict[str, Callable[..., Any]] | None = None,
    updates: bool = False,
) -> "ModelSchedule":
    """Return a schedule for a model, to which directives are added.

    Args:
        model: a linen or nnx module, or a function of (params, *args), whose `jax.named_scope`s can
            be indexed like modules.
        params: the first argument of `model.apply`, or `nnx.state(model)`; arrays or
            ShapeDtypeStructs.
        example_args: the other arguments; arrays or ShapeDtypeStructs.
        mesh: where to run, see `autopar.devices.Devices`; one axis "x" over all devices by default.
            An abstract mesh, `jax.sharding.AbstractMesh((8,), ("x",))`, is enough to plan and to
            predict for devices that this process does not have.
        schedule: directives to begin with.
        functions: the functions and modules that `schedule` names.
        updates: for an nnx module that changes its state when called: return (result, state that is
            no parameter, after the call) instead of the result.

    Raises:
        DirectiveError: A directive of `schedule` does not apply to this model; or an nnx module
            changes its state, and the change would be lost.
    """
    if updates and not isinstance(model, nnx.Module):
        raise DirectiveError(
            "updates=True is for nnx modules; others return what they change, linen's by"
            " apply(mutable=...)"
        )
    if not isinstance(example_args, list | tuple):
        raise DirectiveError(
            f"example_args is of type {type(example_args).__name__}, expected a list or a tuple of"
            " the model's arguments"
        )
    params, args = jax.tree.map(abstract, (params, tuple(example_args)))
    match model:
        case nn.Module():
            fun, classes = model.apply, classes_of(model.apply, params, args)
        case nnx.Module():
            fun, classes = nnx_scopes.as_function(model, updates), nnx_scopes.classes(model)
        case _:
            fun, classes = model, classes_of(model, params, args)
    empty = ModelSchedule(fun, classes, params, args, planned_mesh(mesh))
    empty.functions.update(
        {name: as_function(function) for name, function in (functions or {}).items()}
    )
    return empty.replay(schedule, empty.args) if schedule is not None else empty


class ModelSchedule(Handle):
    """A model and its directives so far; also a handle for the whole model.

    `create_schedule` makes one.

    Attributes:
        fun: the model as a function of (params, *args).
        classes: the classes of its modules by path.
        params: shapes and dtypes of the parameters.
        args: shapes and dtypes of the example arguments.
        mesh: where the model runs.
        graph: the forward pass of the model for the example arguments.
        modules: the module tree of the model.
        functions: the functions that directives name.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        classes: dict[str, type],
        params: Any,
        args: tuple[Any, ...],
        mesh: AnyMesh,
    ) -> None:
        super().__init__(self, ("",))
        self.fun = fun
        self.classes = classes
        self.params = params
        self.args = args
        self.mesh = mesh
        self.functions: dict[str, Callable[..., Any]] = {}
        self._directives: list[Directive] = []
        root = classes[""].__name__ if "" in classes else None
        self.graph = trace_model(fun, self.params, self.args, root, self._param_path)
        leaves = jax.tree.leaves(self.params)
        avals = dict(zip(self.graph.params.values(), leaves, strict=True))
        self.modules = ModuleTree.of(self.graph, classes, avals)

    def _param_path(self, path: Any) -> str:
        """Return the name of a parameter, such as `linear1/kernel`, from its key path.

        The name lacks linen's collection at the beginning and nnx's `value` at the end.
        """
        if isinstance(self.params, dict) and "params" in self.params:
            path = path[1:]
        elif isinstance(self.params, nnx.State):
            path = path[:-1]
        return jax.tree_util.keystr(path, simple=True, separator="/")

    @property
    def schedule(self) -> DirectiveSchedule:
        """The directives so far, as a value."""
        return DirectiveSchedule(tuple(self._directives))

    @property
    def logical_mesh(self) -> LogicalMesh:
        """Axes and sizes of the mesh, without devices."""
        return LogicalMesh(self.mesh.axis_sizes, self.mesh.axis_names)

    # -- for handles

    def append(self, directive: Directive) -> None:
        """Add a directive.

        Raises:
            DirectiveError: The directive does not apply to this model or contradicts another one.
        """
        check_directive(self, directive)
        self._directives.append(directive)

    def mesh_axis(self, name: str | None) -> str:
        """Return `name`, or the last axis of the mesh for None."""
        return self.mesh.axis_names[-1] if name is None else name

    def register_function(self, function: Callable[..., Any]) -> str:
        """Add a function of the user to `functions`, and return the name that directives use.

        Raises:
            DirectiveError: It can't be called.
        """
        if not callable(function):
            raise DirectiveError(f"{short_repr(function)} can't be called, expected a function")
        base = f"{function.__module__}:{getattr(function, '__qualname__', type(function).__name__)}"
        name = base
        number = 1
        while self.functions.get(name, function) is not function:
            number += 1
            name = f"{base}:{number}"
        self.functions[name] = function
        return name

    def of_kind[T](self, kind: type[T]) -> list[T]:
        """Return the directives of a class."""
        return [directive for directive in self._directives if isinstance(directive, kind)]

    def claimed_nodes(self) -> set[str]:
        """Return the names of the nodes that are fused or replaced already."""
        directives = (*self.of_kind(d.Fuse), *self.of_kind(d.Replace))
        return {name for directive in directives for name in directive.nodes}

    def visible_nodes(self, paths: Sequence[str]) -> list[Node]:
        """Return the nodes in the modules at `paths` that `find` sees."""
        hidden = self._hidden_modules()
        claimed = self.claimed_nodes()
        nodes = [node for node in self.nodes_of(*paths) if node.name not in claimed]
        for trace in self.of_kind(d.Trace):
            if not trace.flatten:
                nodes = [n for n in nodes if n.scope == trace.path or not n.within(trace.path)]
        return [node for node in nodes if not any(node.within(path) for path in hidden)]

    def is_visible(self, path: str) -> bool:
        """Return whether `find` sees the module at `path`, which no module around it hides."""
        parent = path.rpartition("/")[0]
        if any(within(parent, hidden) for hidden in self._hidden_modules()):
            return False
        not_flat = [trace.path for trace in self.of_kind(d.Trace) if not trace.flatten]
        return not any(parent != module and within(parent, module) for module in not_flat)

    def _hidden_modules(self) -> set[str]:
        """Return the modules that `find` sees as one: linear ones, and leaves of a trace."""
        hidden = {path for path, module in self.modules.by_path.items() if module.is_linear}
        hidden -= {directive.path for directive in self.of_kind(d.Decompose)}
        return hidden.union(
            join_path(trace.path, leaf)
            for trace in self.of_kind(d.Trace)
            for leaf in trace.leaf_modules
        )

    def subgraph_of(self, nodes: Sequence[Node]) -> Subgraph:
        """Return nodes as a subgraph, with the values that they read as inputs."""
        inputs = (self.graph.value_names[var] for var in self.graph.inputs_of(nodes))
        return Subgraph(tuple(node.name for node in nodes), tuple(inputs))

    def operand_names(self, names: Sequence[str]) -> d.Reads:
        """Return the operands of each named node, by all names that lead to the same value.

        These are the name of the operand itself and those behind broadcasts, because whether there
        is a broadcast may depend on whether the batch size is one. Literals are left out: they may
        depend on the batch size, too.
        """
        nodes = [self.graph.by_name[name] for name in names]
        operands = (map(self._aliases, node.eqn.invars) for node in nodes)
        return tuple(tuple(filter(None, aliases)) for aliases in operands)

    def _aliases(self, atom: Atom) -> tuple[str, ...]:
        view = look_through_broadcasts(self.graph, atom)
        if not isinstance(view.source, Var):
            return ()
        return (*(node.name for node in view.nodes), self.graph.value_names[view.source])

    def module_subgraph(self, *paths: str) -> Subgraph:
        """Return all equations of the modules at `paths` as one subgraph."""
        return self.subgraph_of(self.nodes_of(*paths))

    def nodes_of(self, *paths: str) -> list[Node]:
        """Return all nodes in the modules at `paths`."""
        return [node for node in self.graph.nodes if any(node.within(path) for path in paths)]

    # -- for `build`

    def arranged_nodes(self) -> tuple[GraphItem, ...]:
        """Return the nodes, grouped into regions by the directives."""
        regions: list[tuple[Region, frozenset[str]]] = []
        for remat in self.graph.remat_regions:
            regions.append((remat, remat.nodes))
        for checkpoint in self.of_kind(d.Checkpoint):
            parts = recomputable_parts(self.graph, self.nodes_of(checkpoint.path))
            regions += [(checkpoint, part) for part in parts]
        for directive in (*self.of_kind(d.Fuse), *self.of_kind(d.Replace)):
            regions.append((directive, frozenset(directive.nodes)))
        return arrange_regions(self.graph, regions)

    def place(self, batch_axis: str | None = None, lenient: bool = False) -> PlacedModel:
        """Return the model with the layout of every value.

        Args:
            batch_axis: the mesh axis that splits the first dim of the arguments.
            lenient: whether syncs may be missing, because the planner adds communication.

        Raises:
            DirectiveError: The directives do not fit together.
        """
        graph = self.graph
        items = self.arranged_nodes()
        for region in self.of_kind(d.Replace):
            if isinstance(self.functions[region.function], ModuleFunction):
                graph, items = inline_replacement(graph, items, region, self.functions)
        decisions = LayoutDecisions(
            self.of_kind(d.Shard),
            self.of_kind(d.Sync),
            self.of_kind(d.CutPipelineStage),
            self.logical_mesh,
            batch_axis,
            lenient,
        )
        forked = random_draws(self.nodes_of(*(rng.path for rng in self.of_kind(d.ForkRng))))
        while True:
            draws = [node for node in forked if node.name in graph.by_name]
            try:
                return place_model(graph, items, decisions, draws)
            except SyncInsideReplacement as inside:
                region = inside.region
                graph, items = inline_replacement_for_sync(graph, items, region, self.functions)

    def for_args(self, args: Sequence[Any]) -> "ModelSchedule":
        """Return the same schedule for arguments of the shapes of `args`."""
        avals = jax.tree.map(abstract, tuple(args))
        if avals == self.args:
            return self
        return self.replay(self.schedule, avals)

    def on_mesh(self, mesh: AnyMesh) -> "ModelSchedule":
        """Return the same schedule on other devices.

        Raises:
            DirectiveError: `mesh` does not have the axes and sizes of the schedule's mesh.
        """
        if dict(mesh.shape) != dict(self.mesh.shape):
            raise DirectiveError(
                f"the schedule is for a mesh of axes {dict(self.mesh.shape)}, not"
                f" {dict(mesh.shape)}"
            )
        return self.replay(self.schedule, self.args, mesh)

    def replay(
        self, schedule: DirectiveSchedule, args: tuple[Any, ...], mesh: AnyMesh | None = None
    ) -> "ModelSchedule":
        """Return another schedule for the same model.

        Args:
            schedule: the directives.
            args: shapes and dtypes of the model's arguments.
            mesh: where to run; the same mesh by default.

        Raises:
            DirectiveError: A directive does not apply to the model.
        """
        replayed = ModelSchedule(self.fun, self.classes, self.params, args, mesh or self.mesh)
        replayed.functions.update(self.functions)
        for directive in schedule.directives:
            replayed.append(directive)
        return replayed

    # -- as text

    def equation_lines(self, paths: Sequence[str]) -> Iterator[str]:
        """Yield the visible equations of the modules at `paths` as text.

        A module whose equations are hidden, and a region that runs as one function, is one line.
        """
        visible = {node.name for node in self.visible_nodes(("",))}
        names = self.graph.value_names
        hidden_scopes: set[str] = set()
        for item in self._without_remat(self.arranged_nodes()):
            nodes = item.nodes if isinstance(item, RegionNode) else (item,)
            if not any(node.within(path) for node in nodes for path in paths):
                continue
            if isinstance(item, RegionNode) and isinstance(item.region, d.Fuse | d.Replace):
                inputs = ", ".join(names[var] for var in self.graph.inputs_of(nodes))
                result = names[self.graph.outputs_of(nodes)[0]]
                yield f"{result} = {item.region.name}({inputs})"
                continue
            for node in nodes:
                if node.name in visible:
                    operands = ", ".join(map(self._operand_text, node.eqn.invars))
                    yield f"{node.name} = {node.eqn.primitive.name}({operands})"
                elif node.scope not in hidden_scopes:
                    hidden_scopes.add(node.scope)
                    yield f"{node.scope or 'model'}(...)"

    def _without_remat(self, items: Sequence[GraphItem]) -> Iterator[GraphItem]:
        """Yield nodes and regions that run as one function; recomputed regions are expanded."""
        for item in items:
            if isinstance(item, RegionNode) and not isinstance(item.region, d.Fuse | d.Replace):
                yield from self._without_remat(item.inside)
            else:
                yield item

    def _operand_text(self, atom: Atom) -> str:
        return str(atom.val) if isinstance(atom, Literal) else self.graph.value_names[atom]
