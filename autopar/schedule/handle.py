"""What one calls on the modules of a model: each call becomes directives."""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from flax import linen as nn

from autopar.schedule import directives as d
from autopar.schedule.directives import Directive, ScheduleError, primitives
from autopar.schedule.graph import Node, within
from autopar.schedule.matcher import Subgraph
from autopar.schedule.matching import find_pattern

if TYPE_CHECKING:
    from autopar.schedule.model import ModelSchedule

type Found = Subgraph | Sequence[Subgraph]


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
        return self._owner.module(*self.paths)

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


def _several(found: Found) -> Sequence[Subgraph]:
    return [found] if isinstance(found, Subgraph) else found


def _applied(module: nn.Module) -> Callable[..., Any]:
    def apply(params: Any, *inputs: Any) -> Any:
        return module.apply({"params": params}, *inputs)

    apply.__module__, apply.__qualname__ = type(module).__module__, type(module).__qualname__
    apply.__name__ = type(module).__name__
    return apply
