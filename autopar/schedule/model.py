"""`create_schedule`: a model with the schedule that is being written for it."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import jax
from flax import linen as nn
from flax import nnx
from jax.sharding import Mesh

from autopar.devices import Devices, device_mesh
from autopar.schedule import directives as d
from autopar.schedule import nnx_scopes
from autopar.schedule.checks import check
from autopar.schedule.directives import Directive, Schedule, ScheduleError, primitives
from autopar.schedule.graph import Node, trace_model, within
from autopar.schedule.matching import Subgraph, find_pattern
from autopar.schedule.placing import Placed, place
from autopar.schedule.regions import Region, Unit, arrange
from autopar.schedule.tree import Modules, classes_of
from autopar.sharding.spec import LogicalMesh
from autopar.trace import abstract

type Found = Subgraph | Sequence[Subgraph]


def create_schedule(
    model: nn.Module | nnx.Module | Callable[..., Any],
    params: Any,
    example_args: Sequence[Any],
    mesh: Devices = None,
    schedule: Schedule | None = None,
    functions: dict[str, Callable[..., Any]] | None = None,
) -> "ModelSchedule":
    """An empty schedule for a model, to which directives are added, or one that is replayed on it.

    Args:
        model: a linen or nnx module, or a function of (params, *args), whose `jax.named_scope`s can be indexed like modules.
        params: what `model.apply` takes first, or `nnx.state(model)`; arrays or ShapeDtypeStructs. So are `example_args`, a sequence.
        mesh: where to run, see `autopar.devices.Devices`; one axis "x" over all devices by default. To predict for a cluster that is
            not here: `autopar.target.target_mesh(cluster, (8,), ("x",))`.
        schedule: directives to begin with.
        functions: those that `schedule` names.

    Raises:
        ScheduleError: a directive of `schedule` is not for this model.
    """
    params, args = jax.tree.map(abstract, (params, tuple(example_args)))
    match model:
        case nn.Module():
            fun, classes = model.apply, classes_of(model.apply, params, args)
        case nnx.Module():
            fun, classes = nnx_scopes.as_function(model), nnx_scopes.classes(model)
        case _:
            fun, classes = model, classes_of(model, params, args)
    made = ModelSchedule(fun, classes, params, args, device_mesh(mesh))
    made.functions.update(functions or {})
    return made.replayed(schedule, made.args) if schedule is not None else made


class Handle:
    """One or several modules of a model; what is called on it becomes a directive for each of them."""

    def __init__(self, owner: "ModelSchedule", paths: tuple[str, ...]) -> None:
        self._owner = owner
        self.paths = paths

    def __getitem__(self, pattern: str) -> "Handle":
        """The modules inside at a path, with "/" or "." between names, or at all that match one with `*`."""
        prefixes = [f"{path}/" if path else "" for path in self.paths]
        return Handle(self._owner, tuple(p for each in prefixes for p in self._owner.modules.find(each + pattern)))

    def __repr__(self) -> str:
        return f"Handle({', '.join(path or '(model)' for path in self.paths)})"

    def shard(self, param: str, axis: int, mesh_axis: str | None = None) -> "Handle":
        """Split a parameter along its dim `axis` over a mesh axis, the last one by default.

        Flax keeps the kernel of a Dense layer as (in, out): what torch users write as `("weight", axis=0)` is `("kernel", axis=1)`.
        """
        for path in self.paths:
            rank = self._owner.modules.param(path, param).ndim
            at = axis + rank if axis < 0 else axis
            self._owner.append(d.Shard(path, param, at, self._owner.mesh_axis(mesh_axis)))
        return self

    def sync(
        self,
        mode: d.Mode,
        sync_op_or_fn: str | Callable[[Any], Any],
        axis: int | None = None,
        mesh_axis: str | None = None,
        backward: Literal["reduce_scatter", "scatter"] | None = None,
    ) -> "Handle":
        """Put together, or apart, what a module takes ("fwd_pre"), gives ("fwd_post"), or the gradients of what it takes ("bwd_post").

        Gradients are right without a bwd_post, too: it says where they are added up, once for all that reads the value inside.

        Args:
            sync_op_or_fn: "all_reduce", "all_gather", "reduce_scatter", "scatter"; a change of layout of the last dims, "RS->SR"
                (R whole, S split); or a function from a device's value to the whole one, with collectives over the mesh axis.
            axis: the array dim that is gathered or scattered.
            backward: whether gradients of an all_gather are added up and scattered ("reduce_scatter": what follows computes on
                shards; the default before a module) or only scattered ("scatter", the default after one).
        """
        op = sync_op_or_fn if isinstance(sync_op_or_fn, str) else self._owner.name_of(sync_op_or_fn)
        for path in self.paths:
            self._owner.append(d.Sync(path, mode, op, axis, self._owner.mesh_axis(mesh_axis), backward))
        return self

    def decompose(self) -> "Handle":
        """Let `find` see the product and the bias of a linear module apart."""
        return self._each(d.Decompose)

    def trace(self, flatten: bool = True, leaf_modules: Iterable[str] = ()) -> "Handle":
        """Say which equations `find` and `print(sch.mod)` see: those of submodules too if `flatten`, but not of `leaf_modules`."""
        for path in self.paths:
            self._owner.append(d.Trace(path, flatten, tuple(name.replace(".", "/") for name in leaf_modules)))
        return self

    def find(
        self,
        pattern: str | Callable[..., Any] | None = None,
        where: Callable[[Node], bool] | None = None,
        like: Sequence[Any] | None = None,
    ) -> list[Subgraph]:
        """Equations: those whose name matches a regular expression, or `where` holds, or that compute what a function does.

        Args:
            like: shapes and dtypes of the function's arguments, where they differ from that of its result.
        """
        nodes = self._owner.visible(self.paths)
        if callable(pattern):
            return find_pattern(self._owner.graph, nodes, pattern, like)
        wanted = re.compile(pattern if pattern is not None else ".*")
        found = [n for n in nodes if wanted.fullmatch(n.name) and (where is None or where(n))]
        return [self._owner.region([node]) for node in found]

    def subgraph(self) -> Subgraph:
        """All equations of the modules, as one: what projects queries, keys and values, say, to be replaced together."""
        nodes = self._owner.graph.nodes
        return self._owner.region([node for node in nodes if any(node.within(path) for path in self.paths)])

    def fuse(self, subgraph: Found, compiler: str = "xla", name: str = "fused") -> "Handle":
        """Run equations as one compiled function: a region of its own in the program, with its name."""
        for number, each in enumerate(_several(subgraph)):
            self._owner.append(d.Fuse(self.paths[0], each.nodes, compiler, f"{name}_{number}"))
        return self

    def replace(
        self, new: nn.Module | Callable[..., Any], subgraph: Found | None = None, name: str | None = None
    ) -> "Handle":
        """Run a function in place of the equations of a subgraph, or of a whole module.

        Args:
            new: called with what stands for the pattern's arguments, or what the subgraph reads, in order of first use; for a whole
                module with a dict of its parameters and then what it reads. A linen module is applied to them. With
                backend="manual" these are a device's shards. Returns what is used outside, in the order in which it was made.
        """
        function = _applied(new) if isinstance(new, nn.Module) else new
        label, owner = self._owner.name_of(function), self._owner
        whole = subgraph is None
        for path in self.paths if whole else self.paths[:1]:
            regions = [owner.module(path)] if whole else _several(subgraph)
            for number, each in enumerate(regions):
                called = name or getattr(function, "__name__", "function")
                called = f"{called}_{number}" if len(regions) > 1 else called
                owner.append(d.Replace(path, each.nodes, each.inputs, label, called, whole))
        return self

    def replace_all(self, type_name: str, new: nn.Module | Callable[..., Any]) -> "Handle":
        """Replace every module inside of a class, given by its name."""
        modules = self._owner.modules.by_path
        inside = [p for p, m in modules.items() if m.type_name == type_name and any(within(p, at) for at in self.paths)]
        if not inside:
            known = sorted({module.type_name for module in modules.values() if module.type_name})
            raise ScheduleError(f"no module of class {type_name!r} inside; there are {', '.join(known) or 'none'}")
        Handle(self._owner, tuple(inside)).replace(new)
        return self

    def checkpoint(self, policy: str | None = None) -> "Handle":
        """Recompute a module in the backward pass, but for what a policy, by name of `jax.checkpoint_policies`, keeps."""
        for path in self.paths:
            self._owner.append(d.Checkpoint(path, policy))
        return self

    def cut_pipeline_stage(self) -> "Handle":
        """End a pipeline stage after the module."""
        return self._each(d.CutPipelineStage)

    def annotate(self, param: str, **notes: str | int | float | bool) -> "Handle":
        """Note something about a parameter, for whoever reads the schedule."""
        for path in self.paths:
            self._owner.append(d.Annotate(path, param, tuple(sorted(notes.items()))))
        return self

    def _each(self, directive: Callable[[str], Directive]) -> "Handle":
        for path in self.paths:
            self._owner.append(directive(path))
        return self


class ModelSchedule(Handle):
    """A model and the directives for it so far; a handle for the whole model. See `create_schedule`.

    Attributes:
        graph: the model's forward pass, for the example arguments.
        modules: its tree.
        functions: those that directives name.
    """

    def __init__(
        self, fun: Callable[..., Any], classes: dict[str, str], params: Any, args: tuple[Any, ...], mesh: Mesh
    ) -> None:
        super().__init__(self, ("",))
        self.fun, self.classes, self.params, self.args, self.mesh = fun, classes, params, args, mesh
        self.functions: dict[str, Callable[..., Any]] = {}
        self._directives: list[Directive] = []
        self.graph = trace_model(fun, self.params, self.args, classes.get(""), self._param_path)
        leaves = jax.tree.leaves(self.params)
        self.modules = Modules.of(self.graph, classes, dict(zip(self.graph.params.values(), leaves, strict=True)))

    def _param_path(self, path: Any) -> str:
        """`linear1/kernel`, without the collection that linen puts first and the `value` that nnx puts last."""
        if isinstance(self.params, dict) and "params" in self.params:
            path = path[1:]
        elif isinstance(self.params, nnx.State):
            path = path[:-1]
        return jax.tree_util.keystr(path, simple=True, separator="/")

    @property
    def schedule(self) -> Schedule:
        """The directives so far, as a value."""
        return Schedule(tuple(self._directives))

    @property
    def logical_mesh(self) -> LogicalMesh:
        return LogicalMesh(self.mesh.devices.shape, self.mesh.axis_names)

    @property
    def mod(self) -> str:
        """The modules with their parameters and directives, and once there is a `trace`, the equations."""
        text = self.modules.text(self._directives)
        if any(isinstance(each, d.Trace) for each in self._directives):
            text += "\n\n" + "\n".join(self._lines())
        return text

    def named_schedules(self) -> dict[str, Handle]:
        """A handle for each module, by path."""
        return {path: Handle(self, (path,)) for path in self.modules.by_path}

    def list_primitives(self) -> tuple[str, ...]:
        """The names of the directives there are."""
        return primitives()

    # -- for handles

    def append(self, directive: Directive) -> None:
        """Add a directive. Raises ScheduleError when it is not for this model or contradicts another."""
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
        return {name for each in (*self.of_kind(d.Fuse), *self.of_kind(d.Replace)) for name in each.nodes}

    def visible(self, paths: Sequence[str]) -> list[Node]:
        """The nodes of modules that `find` sees."""
        hidden = {path for path, module in self.modules.by_path.items() if module.is_linear}
        hidden -= {each.path for each in self.of_kind(d.Decompose)}
        nodes = [n for n in self.graph.nodes if any(n.within(p) for p in paths) and n.name not in self.claimed()]
        for trace in self.of_kind(d.Trace):
            hidden.update("/".join(filter(None, (trace.path, leaf))) for leaf in trace.leaf_modules)
            if not trace.flatten:
                nodes = [n for n in nodes if n.scope == trace.path or not n.within(trace.path)]
        return [node for node in nodes if not any(node.within(path) for path in hidden)]

    def region(self, nodes: Sequence[Node]) -> Subgraph:
        names = (self.graph.value_names[var] for var in self.graph.inputs_of(nodes))
        return Subgraph(tuple(node.name for node in nodes), tuple(names))

    def module(self, path: str) -> Subgraph:
        """All equations of a module."""
        return self.region([node for node in self.graph.nodes if node.within(path)])

    # -- what runs

    def units(self) -> tuple[Node | Unit, ...]:
        """The equations, in regions."""
        regions: list[tuple[Region, frozenset[str]]] = [(each, each.nodes) for each in self.graph.recomputed]
        regions += [(each, frozenset(self.module(each.path).nodes)) for each in self.of_kind(d.Checkpoint)]
        regions += [(each, frozenset(each.nodes)) for each in (*self.of_kind(d.Fuse), *self.of_kind(d.Replace))]
        return arrange(self.graph, regions)

    def placed(self, batch_axis: str | None = None, lenient: bool = False) -> Placed:
        """Every value where the directives put it; see `place`. Raises ScheduleError where they don't fit together."""
        return place(
            self.graph,
            self.units(),
            self.of_kind(d.Shard),
            self.of_kind(d.Sync),
            self.of_kind(d.CutPipelineStage),
            self.logical_mesh,
            batch_axis,
            lenient,
        )

    def for_args(self, args: Sequence[Any]) -> "ModelSchedule":
        """The same schedule for arguments of other shapes."""
        avals = jax.tree.map(abstract, tuple(args))
        if avals == self.args:
            return self
        return self.replayed(self.schedule, avals)

    def replayed(self, schedule: Schedule, args: tuple[Any, ...]) -> "ModelSchedule":
        """Another schedule for the same model, for arguments of the given shapes."""
        made = ModelSchedule(self.fun, self.classes, self.params, args, self.mesh)
        made.functions.update(self.functions)
        for directive in schedule.directives:
            made.append(directive)
        return made

    def _lines(self) -> Iterator[str]:
        """The equations that are seen, those of a hidden module or a region in one line."""
        seen = {node.name for node in self.visible(("",))}
        names, shown = self.graph.value_names, set[str]()
        for unit in self.units():
            nodes = unit.nodes if isinstance(unit, Unit) else (unit,)
            inputs = [names[var] for var in self.graph.inputs_of(nodes)]
            if isinstance(unit, Unit) and isinstance(unit.region, d.Fuse | d.Replace):
                yield f"{names[self.graph.outputs_of(nodes)[0]]} = {unit.region.name}({', '.join(inputs)})"
                continue
            for node in nodes:
                if node.name in seen:
                    yield f"{node.name} = {node.eqn.primitive.name}({', '.join(map(self._name, node.eqn.invars))})"
                elif node.scope not in shown:
                    shown.add(node.scope)
                    yield f"{node.scope or 'model'}(...)"

    def _name(self, atom: Any) -> str:
        return str(atom.val) if hasattr(atom, "val") else self.graph.value_names[atom]


def _several(found: Found) -> Sequence[Subgraph]:
    return [found] if isinstance(found, Subgraph) else found


def _applied(module: nn.Module) -> Callable[..., Any]:
    def apply(params: Any, *inputs: Any) -> Any:
        return module.apply({"params": params}, *inputs)

    apply.__module__, apply.__qualname__ = type(module).__module__, type(module).__qualname__
    apply.__name__ = type(module).__name__
    return apply
