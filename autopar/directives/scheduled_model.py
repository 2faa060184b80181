"""`create_schedule`: a model with the schedule that is being written for it."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from flax import linen as nn
from flax import nnx
from jax.extend.core import Var

from autopar.devices import Devices, planned_mesh
from autopar.directives import definitions as d
from autopar.directives import nnx_scopes
from autopar.directives.broadcasts import look_through
from autopar.directives.definitions import Directive, DirectiveError, DirectiveSchedule
from autopar.directives.directive_checks import check
from autopar.directives.equation_regions import Region, RegionNode, arrange
from autopar.directives.handle import Handle
from autopar.directives.model_graph import Node, joined, trace_model, within
from autopar.directives.module_tree import ModuleTree, classes_of
from autopar.directives.pattern_matcher import Subgraph
from autopar.directives.placed_model import PlacedModel
from autopar.directives.propagation import SyncInside, place
from autopar.directives.replacements import ModuleFunction, as_function, unfolded, unfolded_for_sync
from autopar.directives.rng_forking import draws_of
from autopar.ir.graph import Atom
from autopar.ir.spec import AnyMesh, LogicalMesh
from autopar.tracing.trace import abstract


def create_schedule(
    model: nn.Module | nnx.Module | Callable[..., Any],
    params: Any,
    example_args: Sequence[Any],
    mesh: Devices = None,
    schedule: DirectiveSchedule | None = None,
    functions: dict[str, Callable[..., Any]] | None = None,
    updates: bool = False,
) -> "ModelSchedule":
    """An empty schedule for a model, to which directives are added, or one that is replayed on it.

    Args:
        model: a linen or nnx module, or a function of (params, *args), whose `jax.named_scope`s can be indexed like modules.
        params: what `model.apply` takes first, or `nnx.state(model)`; arrays or ShapeDtypeStructs. So are `example_args`, a sequence.
        mesh: where to run, see `autopar.devices.Devices`; one axis "x" over all devices by default. An abstract mesh is enough to plan
            and to predict for a cluster that is not here: `jax.sharding.AbstractMesh((8,), ("x",))`.
        schedule: directives to begin with.
        functions: those that `schedule` names, and modules that it names.
        updates: of an nnx module that changes its state when called: return what is no parameter as it is then beside the result.

    Raises:
        DirectiveError: a directive of `schedule` is not for this model; or an nnx module changes its state, and the change would be lost.
    """
    if updates and not isinstance(model, nnx.Module):
        raise DirectiveError(
            "updates=True is for nnx modules; others return what they change, linen's by apply(mutable=...)"
        )
    params, args = jax.tree.map(abstract, (params, tuple(example_args)))
    match model:
        case nn.Module():
            fun, classes = model.apply, classes_of(model.apply, params, args)
        case nnx.Module():
            fun, classes = nnx_scopes.as_function(model, updates), nnx_scopes.classes(model)
        case _:
            fun, classes = model, classes_of(model, params, args)
    made = ModelSchedule(fun, classes, params, args, planned_mesh(mesh))
    made.functions.update(
        {name: as_function(function) for name, function in (functions or {}).items()}
    )
    return made.replayed(schedule, made.args) if schedule is not None else made


class ModelSchedule(Handle):
    """A model and the directives for it so far; a handle for the whole model. See `create_schedule`.

    Attributes:
        graph: the model's forward pass, for the example arguments.
        modules: its tree.
        functions: those that directives name.
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
        self.fun, self.classes, self.params, self.args, self.mesh = fun, classes, params, args, mesh
        self.functions: dict[str, Callable[..., Any]] = {}
        self._directives: list[Directive] = []
        self.graph = trace_model(
            fun,
            self.params,
            self.args,
            root.__name__ if (root := classes.get("")) else None,
            self._param_path,
        )
        leaves = jax.tree.leaves(self.params)
        self.modules = ModuleTree.of(
            self.graph, classes, dict(zip(self.graph.params.values(), leaves, strict=True))
        )

    def _param_path(self, path: Any) -> str:
        """`linear1/kernel`, without the collection that linen puts first and the `value` that nnx puts last."""
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
        return LogicalMesh(self.mesh.axis_sizes, self.mesh.axis_names)

    # -- for handles

    def append(self, directive: Directive) -> None:
        """Add a directive. Raises DirectiveError when it is not for this model or contradicts another."""
        check(self, directive)
        self._directives.append(directive)

    def mesh_axis(self, name: str | None) -> str:
        return self.mesh.axis_names[-1] if name is None else name

    def name_of(self, function: Callable[..., Any]) -> str:
        """What directives call a function of the user."""
        base = f"{function.__module__}:{getattr(function, '__qualname__', type(function).__name__)}"
        name, number = base, 1
        while self.functions.get(name, function) is not function:
            number += 1
            name = f"{base}:{number}"
        self.functions[name] = function
        return name

    def of_kind[T](self, kind: type[T]) -> list[T]:
        """The directives of a kind."""
        return [each for each in self._directives if isinstance(each, kind)]

    def claimed(self) -> set[str]:
        """Nodes that are fused or replaced already."""
        return {
            name
            for each in (*self.of_kind(d.Fuse), *self.of_kind(d.Replace))
            for name in each.nodes
        }

    def visible(self, paths: Sequence[str]) -> list[Node]:
        """The nodes of modules that `find` sees."""
        hidden, claimed = self._hidden(), self.claimed()
        nodes = [
            n for n in self.graph.nodes if any(n.within(p) for p in paths) and n.name not in claimed
        ]
        for trace in self.of_kind(d.Trace):
            if not trace.flatten:
                nodes = [n for n in nodes if n.scope == trace.path or not n.within(trace.path)]
        return [node for node in nodes if not any(node.within(path) for path in hidden)]

    def shows(self, path: str) -> bool:
        """Whether `find` sees a module: it is inside none that is one thing."""
        parent = path.rpartition("/")[0]
        closed = [each.path for each in self.of_kind(d.Trace) if not each.flatten]
        return not any(within(parent, each) for each in self._hidden()) and not any(
            parent != each and within(parent, each) for each in closed
        )

    def _hidden(self) -> set[str]:
        """The modules that are one thing."""
        hidden = {path for path, module in self.modules.by_path.items() if module.is_linear}
        hidden -= {each.path for each in self.of_kind(d.Decompose)}
        return hidden.union(
            joined(t.path, leaf) for t in self.of_kind(d.Trace) for leaf in t.leaf_modules
        )

    def region(self, nodes: Sequence[Node]) -> Subgraph:
        names = (self.graph.value_names[var] for var in self.graph.inputs_of(nodes))
        return Subgraph(tuple(node.name for node in nodes), tuple(names))

    def reads(self, names: Sequence[str]) -> d.Reads:
        """What each of some nodes reads, for each operand the names that the value has as it is and behind broadcasts.

        Which of these there are depends on the batch, where that may be one. So may numbers, which are left out.
        """
        operands = (map(self._aliases, self.graph.by_name[name].eqn.invars) for name in names)
        return tuple(tuple(aliases for aliases in each if aliases) for each in operands)

    def _aliases(self, atom: Atom) -> tuple[str, ...]:
        seen = look_through(self.graph, atom)
        names = self.graph.value_names
        return (
            (*(node.name for node in seen.nodes), names[seen.source])
            if isinstance(seen.source, Var)
            else ()
        )

    def module(self, *paths: str) -> Subgraph:
        """All equations of a module, or of several."""
        return self.region(self.nodes_of(*paths))

    def nodes_of(self, *paths: str) -> list[Node]:
        """The equations of modules and of what is inside them."""
        return [node for node in self.graph.nodes if any(node.within(path) for path in paths)]

    # -- what runs

    def units(self) -> tuple[Node | RegionNode, ...]:
        """The equations, in regions."""
        regions: list[tuple[Region, frozenset[str]]] = [
            (each, each.nodes) for each in self.graph.recomputed
        ]
        regions += [
            (each, frozenset(self.module(each.path).nodes)) for each in self.of_kind(d.Checkpoint)
        ]
        regions += [
            (each, frozenset(each.nodes))
            for each in (*self.of_kind(d.Fuse), *self.of_kind(d.Replace))
        ]
        return arrange(self.graph, regions)

    def placed(self, batch_axis: str | None = None, lenient: bool = False) -> PlacedModel:
        """Every value where the directives put it; see `place`. Raises DirectiveError where they don't fit together."""
        graph, units = self.graph, self.units()
        for region in self.of_kind(d.Replace):
            if isinstance(self.functions[region.function], ModuleFunction):
                graph, units = unfolded(graph, units, region, self.functions)
        while True:
            try:
                return place(
                    graph,
                    units,
                    self.of_kind(d.Shard),
                    self.of_kind(d.Sync),
                    self.of_kind(d.CutPipelineStage),
                    [node for node in self._forked() if node.name in graph.by_name],
                    self.logical_mesh,
                    batch_axis,
                    lenient,
                )
            except SyncInside as inside:
                graph, units = unfolded_for_sync(graph, units, inside.region, self.functions)

    def _forked(self) -> list[Node]:
        """What draws random numbers that each device draws for its own shards."""
        return draws_of(self.nodes_of(*(each.path for each in self.of_kind(d.ForkRng))))

    def for_args(self, args: Sequence[Any]) -> "ModelSchedule":
        """The same schedule for arguments of other shapes."""
        avals = jax.tree.map(abstract, tuple(args))
        if avals == self.args:
            return self
        return self.replayed(self.schedule, avals)

    def on(self, mesh: AnyMesh) -> "ModelSchedule":
        """The same schedule on other devices. Raises DirectiveError unless the mesh has the axes that the schedule is for."""
        if dict(mesh.shape) != dict(self.mesh.shape):
            raise DirectiveError(
                f"the schedule is for a mesh of axes {dict(self.mesh.shape)}, not {dict(mesh.shape)}"
            )
        return self.replayed(self.schedule, self.args, mesh)

    def replayed(
        self, schedule: DirectiveSchedule, args: tuple[Any, ...], mesh: AnyMesh | None = None
    ) -> "ModelSchedule":
        """Another schedule for the same model, for arguments of the given shapes, on the same mesh unless another is given."""
        made = ModelSchedule(self.fun, self.classes, self.params, args, mesh or self.mesh)
        made.functions.update(self.functions)
        for directive in schedule.directives:
            made.append(directive)
        return made

    def lines(self, paths: Sequence[str]) -> Iterator[str]:
        """The equations of modules that are seen, those of a hidden module or a region in one line."""
        seen = {node.name for node in self.visible(("",))}
        names, shown = self.graph.value_names, set[str]()
        for unit in self._fused_or_not(self.units()):
            nodes = unit.nodes if isinstance(unit, RegionNode) else (unit,)
            if not any(node.within(path) for node in nodes for path in paths):
                continue
            if isinstance(unit, RegionNode) and isinstance(unit.region, d.Fuse | d.Replace):
                inputs = [names[var] for var in self.graph.inputs_of(nodes)]
                yield f"{names[self.graph.outputs_of(nodes)[0]]} = {unit.region.name}({', '.join(inputs)})"
                continue
            for node in nodes:
                if node.name in seen:
                    yield f"{node.name} = {node.eqn.primitive.name}({', '.join(map(self._name, node.eqn.invars))})"
                elif node.scope not in shown:
                    shown.add(node.scope)
                    yield f"{node.scope or 'model'}(...)"

    def _fused_or_not(self, units: Sequence[Node | RegionNode]) -> Iterator[Node | RegionNode]:
        """Equations, and those that run as one function, also where they are recomputed."""
        for unit in units:
            if isinstance(unit, RegionNode) and not isinstance(unit.region, d.Fuse | d.Replace):
                yield from self._fused_or_not(unit.inside)
            else:
                yield unit

    def _name(self, atom: Any) -> str:
        return str(atom.val) if hasattr(atom, "val") else self.graph.value_names[atom]
