"""Handles: the methods with which a user writes directives for modules of a model."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import jax
from flax import linen as nn
from flax import nnx

from autopar.checks import checked, integer
from autopar.directives import definitions as d
from autopar.directives.definitions import Directive, DirectiveError, directive_names
from autopar.directives.model_graph import Node, within
from autopar.directives.pattern_matcher import Subgraph
from autopar.directives.pattern_search import find_pattern
from autopar.directives.replacements import as_function, common_module

if TYPE_CHECKING:
    from autopar.directives.scheduled_model import ModelSchedule

type Subgraphs = Subgraph | Sequence[Subgraph]
type Replacement = nn.Module | nnx.Module | Callable[..., Any]


class Handle:
    """One or several modules of a model. Each method adds a directive for each of the modules.

    Methods that add directives return the handle, so that calls can be chained, and raise
    DirectiveError if the directive does not apply to the model or contradicts another one.
    """

    def __init__(self, owner: "ModelSchedule", paths: tuple[str, ...]) -> None:
        self._owner = owner
        self.paths = paths

    def __getitem__(self, pattern: str) -> "Handle":
        """Return the modules inside that match a path.

        Args:
            pattern: a path with "/" or "." between names; `*` matches within one name.
        """
        prefixes = [f"{path}/" if path else "" for path in self.paths]
        paths = (path for prefix in prefixes for path in self._owner.modules.find(prefix + pattern))
        return Handle(self._owner, tuple(paths))

    def __repr__(self) -> str:
        return f"Handle({', '.join(path or '(model)' for path in self.paths)})"

    def __str__(self) -> str:
        return self.mod

    @property
    def mod(self) -> str:
        """The modules with their parameters and directives, and after a `trace` the equations."""
        text = self._owner.modules.text(self._owner.schedule.directives, self.paths)
        if self._owner.of_kind(d.Trace):
            text += "\n\n" + "\n".join(self._owner.equation_lines(self.paths))
        return text

    def named_schedules(self) -> "dict[str, Handle]":
        """Return a handle for each module and each module inside it, by path in the model."""
        modules = self._owner.modules.by_path
        inside = (path for path in modules if any(within(path, root) for root in self.paths))
        return {path: Handle(self._owner, (path,)) for path in inside}

    def list_primitives(self) -> tuple[str, ...]:
        """Return the names of the methods that schedule modules: directives, find, replace_all."""
        return (*directive_names(), "find", "replace_all")

    @property
    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the first module's own parameters, by name."""
        return dict(self._owner.modules.by_path[self.paths[0]].params)

    def shard(self, param: str, axis: int, mesh_axis: str | None = None) -> "Handle":
        """Split a parameter over a mesh axis.

        Flax stores the kernel of a Dense layer as (in, out). What torch users write as
        `("weight", axis=0)` is `("kernel", axis=1)`.

        Args:
            param: the name of a parameter of the module.
            axis: the array dim that is split; negative numbers count from the last.
            mesh_axis: the mesh axis; the last one by default.
        """
        for path in self.paths:
            rank = self._owner.modules.param(path, param).ndim
            axis = checked("axis", axis, integer(-rank), DirectiveError)
            dim = axis + rank if axis < 0 else axis
            self._owner.append(d.Shard(path, param, dim, self._owner.mesh_axis(mesh_axis)))
        return self

    def sync(
        self,
        mode: d.Mode,
        sync_op_or_fn: str | Callable[[Any], Any],
        axis: int | None = None,
        mesh_axis: str | None = None,
        backward: Literal["reduce_scatter", "scatter"] | None = None,
    ) -> "Handle":
        """Communicate inputs, outputs or input gradients of a module over a mesh axis.

        Gradients are right without a "bwd_post" sync. It decides where they are summed: once per
        input of the module, instead of once per use.

        Args:
            mode: "fwd_pre" for the module's inputs, "fwd_post" for its outputs, "bwd_post" for the
                gradients of its inputs.
            sync_op_or_fn: "all_reduce", "all_gather", "reduce_scatter", "scatter"; a change of
                layout of the last dims, "RS->SR" (R whole, S split); or a function from a device's
                value to the whole one, with collectives over the mesh axis. For gradients
                "all_reduce", or a function of the device's part of the sum. Functions are for
                backend="manual".
            axis: the array dim that is gathered or scattered.
            mesh_axis: the mesh axis; the last one by default.
            backward: what happens to the gradients of an all_gather. "reduce_scatter" sums and
                scatters them, because the readers compute on shards; the default before a module.
                "scatter" only scatters them; the default after a module.
        """
        op = sync_op_or_fn
        if not isinstance(op, str):
            op = self._owner.register_function(op)
        mesh_axis = self._owner.mesh_axis(mesh_axis)
        for path in self.paths:
            self._owner.append(d.Sync(path, mode, op, axis, mesh_axis, backward))
        return self

    def decompose(self) -> "Handle":
        """Let `find` see the product and the bias of a linear module as separate equations."""
        return self._append_each(d.Decompose)

    def trace(self, flatten: bool = True, leaf_modules: Iterable[str] = ()) -> "Handle":
        """Choose the equations that `find` and `print(sch.mod)` see.

        Args:
            flatten: whether they see equations of submodules.
            leaf_modules: submodules whose equations stay hidden.
        """
        leaves = tuple(name.replace(".", "/") for name in leaf_modules)
        for path in self.paths:
            self._owner.append(d.Trace(path, flatten, leaves))
        return self

    def find(
        self,
        pattern: str | Callable[..., Any] | None = None,
        where: Callable[[Node], bool] | None = None,
        like: Sequence[Any] | None = None,
    ) -> list[Subgraph]:
        """Return the matching subgraphs of visible equations, in the order in which they run.

        Args:
            pattern: a regular expression matches equations by name, and modules by path, each
                module as one subgraph unless equations in it match themselves. A function matches
                equations that compute the same. None matches every equation.
            where: a condition on the equations that may match.
            like: shapes and dtypes of the function's arguments, where they differ from those of its
                result.

        Raises:
            DirectiveError: `pattern` is no regular expression, or a function that can't be traced.
        """
        owner = self._owner
        nodes = [node for node in owner.visible_nodes(self.paths) if where is None or where(node)]
        if callable(pattern):
            return find_pattern(owner.graph, nodes, pattern, like)
        if like is not None:
            raise DirectiveError(
                f"find({pattern!r}, like=...): like= is for a function that is to be found; leave"
                " it out"
            )
        try:
            regex = re.compile(".*" if pattern is None else pattern)
        except re.error as error:
            raise DirectiveError(f"find({pattern!r}): no regular expression: {error}") from error
        matches = [[node] for node in nodes if regex.fullmatch(node.name)]
        if pattern is not None:
            matches += self._matching_modules(regex, {node.name for (node,) in matches}, where)
        position = {node.name: k for k, node in enumerate(owner.graph.nodes)}
        matches.sort(key=lambda nodes: position[nodes[0].name])
        return [owner.subgraph_of(nodes) for nodes in matches]

    def _matching_modules(
        self, regex: re.Pattern[str], taken: set[str], where: Callable[[Node], bool] | None
    ) -> Iterator[list[Node]]:
        """Yield the nodes of each visible module that matches, outermost first, without overlap."""
        owner = self._owner
        taken = taken | owner.claimed_nodes()
        for path in sorted(self.named_schedules(), key=lambda path: path.count("/")):
            nodes = owner.nodes_of(path)
            if path and nodes and regex.fullmatch(path) and owner.is_visible(path):
                names = {node.name for node in nodes}
                if names.isdisjoint(taken) and (where is None or all(map(where, nodes))):
                    taken |= names
                    yield nodes

    def subgraph(self) -> Subgraph:
        """Return all equations of the modules as one subgraph, to replace them together."""
        return self._owner.module_subgraph(*self.paths)

    def fuse(self, subgraph: Subgraphs, compiler: str = "xla", name: str = "fused") -> "Handle":
        """Run equations as one compiled function.

        Args:
            subgraph: one or several results of `find`; each becomes a function of its own.
            compiler: "xla", which is `jax.jit`.
            name: the name of the function, which is numbered.
        """
        owner = self._owner
        for number, region in enumerate(_as_list(subgraph, "fuse")):
            reads = owner.operand_names(region.nodes)
            owner.append(d.Fuse(self.paths[0], region.nodes, compiler, f"{name}_{number}", reads))
        return self

    def replace(
        self, new: Replacement, subgraph: Subgraphs | None = None, name: str | None = None
    ) -> "Handle":
        """Run a function or a module in place of modules, or of subgraphs.

        In place of a subgraph, the function is called with the values bound to the pattern's
        arguments, or with the values that the equations read, in the order of first use. In place
        of a module, it is called with a dict of the module's parameters, then with the values that
        the module reads. It returns the values that are used outside, in the order in which the
        equations compute them. A linen or nnx module gets the parameters among these values by
        name, and has none of its own.

        With backend="manual" a function is called with the shards of a device. A module, and a
        function that replaces equations among which a sync applies, is written for whole arrays;
        its equations are split like those of the model.

        Args:
            new: the function or module.
            subgraph: one or several results of `find`; by default all equations of each module.
            name: the name of the region.
        """
        owner = self._owner
        function = as_function(new)
        function_name = owner.register_function(function)
        region_name = name or getattr(function, "__name__", "function")
        if subgraph is not None:
            regions = _as_list(subgraph, "replace")
            for number, region in enumerate(regions):
                numbered = f"{region_name}_{number}" if len(regions) > 1 else region_name
                path = self.paths[0]
                is_module = function is not new
                if is_module:
                    path = self._module_of_params(region) or path
                self._replace(path, region, function_name, numbered, params_first=is_module)
            return self
        for path in self.paths:
            region = owner.module_subgraph(path)
            self._replace(path, region, function_name, region_name, params_first=True)
        return self

    def _module_of_params(self, region: Subgraph) -> str | None:
        """Return the innermost module with all parameters that `region` reads; None for none."""
        graph = self._owner.graph
        return common_module([name for name in region.inputs if graph.values[name] in graph.params])

    def _replace(
        self, path: str, region: Subgraph, function: str, name: str, params_first: bool
    ) -> None:
        reads = self._owner.operand_names(region.nodes)
        self._owner.append(
            d.Replace(path, region.nodes, region.inputs, function, name, params_first, reads)
        )

    def replace_all(
        self, type: type | str, make: Callable[["Handle"], Replacement] | nn.Module | nnx.Module
    ) -> "Handle":
        """Replace every module of a class; of two nested ones, the outer one.

        Args:
            type: the class, or its name.
            make: a module that replaces all of them, or a function from the handle of each module
                to its replacement, as `replace` takes it. To replace all of them by one function,
                use `lambda _: function`.

        Raises:
            DirectiveError: There is no such module, or `make` fails.
        """
        modules = [self._owner.modules.by_path[path] for path in self.named_schedules()]
        matched = [module.path for module in modules if module.is_a(type)]
        if not matched:
            known = sorted({module.type_name for module in modules if module.type_name})
            cls = repr(type) if isinstance(type, str) else type.__qualname__
            raise DirectiveError(
                f"no module of class {cls} inside; there are {', '.join(known) or 'none'}"
            )
        for path in matched:
            if any(path != other and within(path, other) for other in matched):
                continue
            handle = Handle(self._owner, (path,))
            is_module = isinstance(make, nn.Module | nnx.Module)
            handle.replace(make if is_module else _make_replacement(make, handle))
        return self

    def checkpoint(self, policy: d.Policy | Callable[..., bool] | None = None) -> "Handle":
        """Recompute a module in the backward pass, except for the values that a policy saves.

        Args:
            policy: the name of one of `jax.checkpoint_policies`; a tuple of the name of a policy
                factory and its arguments, ("save_only_these_names", "scores"); or a function, as
                `jax.checkpoint` takes it. None saves nothing.
        """
        name = self._owner.register_function(policy) if callable(policy) else policy
        for path in self.paths:
            self._owner.append(d.Checkpoint(path, name))
        return self

    def cut_pipeline_stage(self) -> "Handle":
        """End a pipeline stage after the module."""
        return self._append_each(d.CutPipelineStage)

    def fork_rng(self) -> "Handle":
        """Let each device draw the random numbers of a module for its own shards.

        A dropout of a split value then needs no mask of the whole value. Shards get different
        masks; a value that is whole gets the same mask on all devices.

        With backend="manual" the numbers differ from those of the model on one device, and only
        their distribution is the same. Without this directive they are the same numbers, drawn
        whole on every device. The other backends always draw the same numbers, each device its part
        of them; this directive does not change them.
        """
        return self._append_each(d.ForkRng)

    def annotate(self, param: str, **notes: str | int | float | bool) -> "Handle":
        """Attach notes to a parameter, for human readers of the schedule."""
        for path in self.paths:
            self._owner.append(d.Annotate(path, param, tuple(sorted(notes.items()))))
        return self

    def _append_each(self, directive: Callable[[str], Directive]) -> "Handle":
        for path in self.paths:
            self._owner.append(directive(path))
        return self


def _make_replacement(make: Callable[[Handle], Replacement], handle: Handle) -> Replacement:
    try:
        new = make(handle)
    except TypeError as error:
        raise DirectiveError(
            f"replace_all: {make} fails for {handle!r}: {error}. It is given the handle of each"
            " module, and returns its replacement; one function for all is `lambda _: function`"
        ) from error
    if not callable(new):
        raise DirectiveError(
            f"replace_all: {make} returns {new!r} for {handle!r}, expected a module or a function"
        )
    return new


def _as_list(subgraphs: Subgraphs, method: str) -> Sequence[Subgraph]:
    if isinstance(subgraphs, Subgraph):
        return [subgraphs]
    if not subgraphs:
        raise DirectiveError(
            f"{method}: no subgraph was given, perhaps because find had no match; sch.trace() and"
            " print(sch) show the equations that find sees"
        )
    return subgraphs
