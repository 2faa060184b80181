"""What one calls on the modules of a model: each call becomes directives."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import jax
from flax import linen as nn
from flax import nnx

from autopar.directives import definitions as d
from autopar.directives.definitions import Directive, DirectiveError, primitives
from autopar.directives.model_graph import Node, within
from autopar.directives.pattern_matcher import Subgraph
from autopar.directives.pattern_search import find_pattern
from autopar.directives.replacements import as_function, common_module

if TYPE_CHECKING:
    from autopar.directives.scheduled_model import ModelSchedule

type Found = Subgraph | Sequence[Subgraph]
type Replacement = nn.Module | nnx.Module | Callable[..., Any]


class Handle:
    """One or several modules of a model; what is called on it becomes a directive for each of them."""

    def __init__(self, owner: "ModelSchedule", paths: tuple[str, ...]) -> None:
        self._owner = owner
        self.paths = paths

    def __getitem__(self, pattern: str) -> "Handle":
        """The modules inside at a path, with "/" or "." between names, or at all that match one with `*`."""
        prefixes = [f"{path}/" if path else "" for path in self.paths]
        return Handle(
            self._owner,
            tuple(p for each in prefixes for p in self._owner.modules.find(each + pattern)),
        )

    def __repr__(self) -> str:
        return f"Handle({', '.join(path or '(model)' for path in self.paths)})"

    def __str__(self) -> str:
        return self.mod

    @property
    def mod(self) -> str:
        """The modules with their parameters and directives, and once there is a `trace`, the equations."""
        text = self._owner.modules.text(self._owner.schedule.directives, self.paths)
        if self._owner.of_kind(d.Trace):
            text += "\n\n" + "\n".join(self._owner.lines(self.paths))
        return text

    def named_schedules(self) -> "dict[str, Handle]":
        """A handle for each module, and each inside it, by path in the model."""
        inside = (p for p in self._owner.modules.by_path if any(within(p, at) for at in self.paths))
        return {path: Handle(self._owner, (path,)) for path in inside}

    def list_primitives(self) -> tuple[str, ...]:
        """The names of what can be called here to schedule modules: directives, and what finds and makes several."""
        return (*primitives(), "find", "replace_all")

    @property
    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the module's own parameters, by name; of the first, if there are several modules."""
        return dict(self._owner.modules.by_path[self.paths[0]].params)

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
                (R whole, S split); or a function from a device's value, of gradients its part of a sum, to the whole one, with
                collectives over the mesh axis. Of gradients "all_reduce", or a function; functions are for backend="manual".
            axis: the array dim that is gathered or scattered.
            backward: whether gradients of an all_gather are added up and scattered ("reduce_scatter": what follows computes on
                shards; the default before a module) or only scattered ("scatter", the default after one).
        """
        op = sync_op_or_fn if isinstance(sync_op_or_fn, str) else self._owner.name_of(sync_op_or_fn)
        for path in self.paths:
            self._owner.append(
                d.Sync(path, mode, op, axis, self._owner.mesh_axis(mesh_axis), backward)
            )
        return self

    def decompose(self) -> "Handle":
        """Let `find` see the product and the bias of a linear module apart."""
        return self._each(d.Decompose)

    def trace(self, flatten: bool = True, leaf_modules: Iterable[str] = ()) -> "Handle":
        """Say which equations `find` and `print(sch.mod)` see: those of submodules too if `flatten`, but not of `leaf_modules`."""
        for path in self.paths:
            self._owner.append(
                d.Trace(path, flatten, tuple(name.replace(".", "/") for name in leaf_modules))
            )
        return self

    def find(
        self,
        pattern: str | Callable[..., Any] | None = None,
        where: Callable[[Node], bool] | None = None,
        like: Sequence[Any] | None = None,
    ) -> list[Subgraph]:
        """Equations whose name matches a regular expression, and modules whose path does; or that compute what a function does.

        Args:
            pattern: a module that a regular expression matches is found as one, unless equations in it are matched themselves. Without
                a pattern all equations are found.
            where: only among equations for which this holds.
            like: shapes and dtypes of the function's arguments, where they differ from that of its result.
        """
        owner = self._owner
        nodes = [node for node in owner.visible(self.paths) if where is None or where(node)]
        if callable(pattern):
            return find_pattern(owner.graph, nodes, pattern, like)
        if like is not None:
            raise DirectiveError(
                f"find({pattern!r}, like=...): like= is for a function that is to be found; leave it out"
            )
        try:
            wanted = re.compile(".*" if pattern is None else pattern)
        except re.error as error:
            raise DirectiveError(f"find({pattern!r}): no regular expression: {error}") from error
        found = [[node] for node in nodes if wanted.fullmatch(node.name)]
        if pattern is not None:
            found += self._modules(wanted, {node.name for (node,) in found}, where)
        position = {node.name: k for k, node in enumerate(owner.graph.nodes)}
        return [
            owner.region(each) for each in sorted(found, key=lambda each: position[each[0].name])
        ]

    def _modules(
        self, wanted: re.Pattern[str], taken: set[str], where: Callable[[Node], bool] | None
    ) -> Iterator[list[Node]]:
        """The equations of modules whose path is wanted, the outermost first, that are seen, or seen as one; none twice."""
        owner = self._owner
        taken = taken | owner.claimed()
        for path in sorted(self.named_schedules(), key=lambda path: path.count("/")):
            nodes = owner.nodes_of(path)
            if path and nodes and wanted.fullmatch(path) and owner.shows(path):
                names = {node.name for node in nodes}
                if names.isdisjoint(taken) and (where is None or all(map(where, nodes))):
                    taken |= names
                    yield nodes

    def subgraph(self) -> Subgraph:
        """All equations of the modules, as one: what projects queries, keys and values, say, to be replaced together."""
        return self._owner.module(*self.paths)

    def fuse(self, subgraph: Found, compiler: str = "xla", name: str = "fused") -> "Handle":
        """Run equations as one compiled function: a region of its own in the program, with its name."""
        for number, each in enumerate(_several(subgraph, "fuse")):
            self._owner.append(
                d.Fuse(
                    self.paths[0],
                    each.nodes,
                    compiler,
                    f"{name}_{number}",
                    self._owner.reads(each.nodes),
                )
            )
        return self

    def replace(
        self, new: Replacement, subgraph: Found | None = None, name: str | None = None
    ) -> "Handle":
        """Run a function, or a module, in place of the equations of a subgraph, or of a whole module.

        Args:
            new: called with what stands for the pattern's arguments, or what the subgraph reads, in order of first use; for a whole
                module with a dict of its parameters and then what it reads. Returns what is used outside, in the order in which it
                was made. A module, linen or nnx, gets the parameters that are among these by name, and brings none of its own.
                With backend="manual" a function is called with a device's shards. A module, and a function in which a sync is due, are
                of whole arrays: their equations are split like those of the model.
        """
        function, owner = as_function(new), self._owner
        label, called = owner.name_of(function), name or getattr(function, "__name__", "function")
        for path in self.paths if subgraph is None else self.paths[:1]:
            regions = [owner.module(path)] if subgraph is None else _several(subgraph, "replace")
            for number, each in enumerate(regions):
                at, params_first = path, subgraph is None
                if function is not new and subgraph is not None:
                    params = [
                        name
                        for name in each.inputs
                        if owner.graph.values[name] in owner.graph.params
                    ]
                    at, params_first = common_module(params) or path, True
                numbered = f"{called}_{number}" if len(regions) > 1 else called
                reads = owner.reads(each.nodes)
                owner.append(
                    d.Replace(at, each.nodes, each.inputs, label, numbered, params_first, reads)
                )
        return self

    def replace_all(
        self, type: type | str, make: Callable[["Handle"], Replacement] | nn.Module | nnx.Module
    ) -> "Handle":
        """Replace every module inside of a class, given as such or by its name; of two inside one another, the outer one.

        Args:
            make: a module, for all of them; or a function from the handle of each to what stands in for it, as `replace` takes it.
                One function for all is `lambda _: function`.
        """
        modules = [self._owner.modules.by_path[path] for path in self.named_schedules()]
        matched = [module.path for module in modules if module.is_a(type)]
        if not matched:
            known = sorted({module.type_name for module in modules if module.type_name})
            called = repr(type) if isinstance(type, str) else type.__qualname__
            raise DirectiveError(
                f"no module of class {called} inside; there are {', '.join(known) or 'none'}"
            )
        for path in matched:
            if not any(path != other and within(path, other) for other in matched):
                handle = Handle(self._owner, (path,))
                handle.replace(
                    make if isinstance(make, nn.Module | nnx.Module) else _made(make, handle)
                )
        return self

    def checkpoint(self, policy: d.Policy | Callable[..., bool] | None = None) -> "Handle":
        """Recompute a module in the backward pass, but for what a policy keeps.

        Args:
            policy: the name of one of `jax.checkpoint_policies`; a tuple of the name of what makes one and its arguments,
                ("save_only_these_names", "scores"); or a function, as `jax.checkpoint` takes it. None keeps nothing.
        """
        named = self._owner.name_of(policy) if callable(policy) else policy
        for path in self.paths:
            self._owner.append(d.Checkpoint(path, named))
        return self

    def cut_pipeline_stage(self) -> "Handle":
        """End a pipeline stage after the module."""
        return self._each(d.CutPipelineStage)

    def fork_rng(self) -> "Handle":
        """Let each device draw the random numbers of a module for its own shards: dropout of split values without the whole mask.

        Shards get masks that differ, values that are whole get the same one everywhere. With backend="manual" the numbers are then not
        those of the model on one device, and equal to it only in distribution; without this directive they are the same numbers, drawn
        whole on every device. The other backends draw the same numbers, too, each device its part of them: nothing changes for those.
        """
        return self._each(d.ForkRng)

    def annotate(self, param: str, **notes: str | int | float | bool) -> "Handle":
        """Note something about a parameter, for whoever reads the schedule."""
        for path in self.paths:
            self._owner.append(d.Annotate(path, param, tuple(sorted(notes.items()))))
        return self

    def _each(self, directive: Callable[[str], Directive]) -> "Handle":
        for path in self.paths:
            self._owner.append(directive(path))
        return self


def _made(make: Callable[[Handle], Replacement], handle: Handle) -> Replacement:
    try:
        new = make(handle)
    except TypeError as error:
        raise DirectiveError(
            f"replace_all: {make} fails for {handle!r}: {error}. It is given the handle of each module, and returns what stands in for"
            " it; one function for all is `lambda _: function`"
        ) from error
    if not callable(new):
        raise DirectiveError(
            f"replace_all: {make} returns {new!r} for {handle!r}, expected a module or a function"
        )
    return new


def _several(found: Found, what: str) -> Sequence[Subgraph]:
    if not isinstance(found, Subgraph) and not found:
        raise DirectiveError(
            f"{what}: no subgraph was given, as of a find without a match; sch.trace() and print(sch) show what there is to find"
        )
    return [found] if isinstance(found, Subgraph) else found
