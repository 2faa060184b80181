"""Propagate directives through a model: the layout of every value, with syncs where they are needed.

A sync before a module, or on its gradients, applies to what the module reads from outside, for that module alone. One after a
module applies to what the module hands out, or, where that is earlier, to a partial sum inside that something needs whole:
the product of a linear layer is completed before its bias is added.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import assert_never

import jax.numpy as jnp
from jax.extend.core import Literal, Var

from autopar.directives.definitions import (
    CutPipelineStage,
    DirectiveError,
    Fuse,
    Replace,
    Shard,
    Sync,
    describe,
)
from autopar.directives.equation_regions import Region, RegionNode
from autopar.directives.model_graph import ModelGraph, Node, joined, within
from autopar.directives.placed_model import (
    PlacedEquation,
    PlacedItem,
    PlacedModel,
    PlacedRegion,
    PlacedSync,
    StageBoundary,
    closed,
)
from autopar.directives.rng_forking import splits
from autopar.directives.syncs import NotApplicable, after
from autopar.directives.value_layouts import (
    EquationLayouts,
    LayoutError,
    ValueLayout,
    follow,
    layout_of,
    whole,
)
from autopar.ir.graph import Atom, aval_of
from autopar.ir.spec import LogicalMesh, Spec, axes_of


def place(
    graph: ModelGraph,
    units: Sequence[Node | RegionNode],
    shards: Sequence[Shard],
    syncs: Sequence[Sync],
    cuts: Sequence[CutPipelineStage],
    draws: Sequence[Node],
    mesh: LogicalMesh,
    batch_axis: str | None = None,
    lenient: bool = False,
) -> PlacedModel:
    """Follow every value of a model from its parameters to its results.

    Args:
        draws: nodes whose random numbers devices draw for their own shards.
        batch_axis: the mesh axis that the first dim of the model's other arguments is split over.
        lenient: the schedule may leave things open, for somebody else to decide: no sync is missing.

    Raises:
        DirectiveError: a sync is missing or has nothing to do, or something can't be computed where it is.
        SyncInside: a sync is due inside of what a function stands in for.
    """

    def placer(forked: Mapping[Var, Spec]) -> _Placer:
        return _Placer(graph, shards, syncs, cuts, forked, mesh, batch_axis, lenient)

    first = placer({})
    placed = first.place(units)
    forked = splits(graph, draws, first.followed, mesh) if draws else {}
    return placer(forked).place(units) if forked else placed


@dataclass
class SyncInside(Exception):
    """A sync is due inside of what a function stands in for."""

    region: Replace


@dataclass
class _Frame:
    """A region that is being placed."""

    opaque: bool
    items: list[PlacedItem] = field(default_factory=list)
    made: set[Var] = field(default_factory=set)
    read: dict[Var, Var] = field(default_factory=dict)
    wanted: dict[Var, ValueLayout] = field(default_factory=dict)


class _Placer:
    def __init__(
        self,
        graph: ModelGraph,
        shards: Sequence[Shard],
        syncs: Sequence[Sync],
        cuts: Sequence[CutPipelineStage],
        forked: Mapping[Var, Spec],
        mesh: LogicalMesh,
        batch_axis: str | None,
        lenient: bool,
    ) -> None:
        self.graph, self.forked, self.mesh, self.lenient = graph, forked, mesh, lenient
        self.followed: dict[str, EquationLayouts] = {}
        depth = sorted(
            range(len(syncs)), key=lambda k: syncs[k].path.count("/") + bool(syncs[k].path)
        )
        self.syncs = dict(enumerate(syncs))
        self.leaving = [
            k for k in reversed(depth) if syncs[k].mode == "fwd_post"
        ]  # the innermost module first
        self.entering = [k for k in depth if syncs[k].mode != "fwd_post"]
        self.layouts = {
            var: _initial(graph, var, shards, mesh, batch_axis) for var in graph.value_names
        }
        self.home: dict[Var, str | None] = {v: node.scope for v, node in graph.producer.items()}
        self.fixed = {*graph.params, *graph.constants}
        self.latest: dict[Var, Var] = {}
        self.entered: dict[tuple[int, Var], Var] = {}
        self.names = dict(graph.value_names)
        self.done: set[int] = set()
        self.passed: dict[int, str] = {}
        self.frames = [_Frame(opaque=False)]
        self.cut_after = {[n.name for n in graph.nodes if n.within(cut.path)][-1] for cut in cuts}

    def place(self, units: Sequence[Node | RegionNode]) -> PlacedModel:
        for unit in units:
            self._unit(unit)
            if self.cut_after.intersection(
                node.name for node in (unit.nodes if isinstance(unit, RegionNode) else (unit,))
            ):
                self.frames[0].items.append(StageBoundary())
        outvars = tuple(self._read(atom, None) for atom in self.graph.outvars)
        results = tuple(layout_of(atom, self.layouts) for atom in outvars)
        for atom, layout in zip(outvars, results, strict=True):
            if not self.lenient:
                self._check_result(atom, layout)
        for k, sync in self.syncs.items():
            if k not in self.done:
                why = self.passed.get(k, "no value passes there")
                raise DirectiveError(
                    f"{describe(sync)} of {sync.path or 'the model'} has nothing to do: {why}"
                )
        items = closed(self.frames[0].items, {atom for atom in outvars if isinstance(atom, Var)})
        return PlacedModel(
            self.graph,
            items,
            tuple(self.layouts[var] for var in self.graph.invars),
            outvars,
            results,
        )

    # -- what runs

    def _unit(self, unit: Node | RegionNode) -> None:
        match unit:
            case Node():
                self._compute(unit)
            case RegionNode(region, inside):
                frame = _Frame(opaque=isinstance(region, Fuse | Replace))
                self.frames.append(frame)
                for each in inside:
                    self._unit(each)
                self.frames.pop()
                self.frames[-1].items.append(self._group(region, frame))
            case _:
                assert_never(unit)

    def _group(self, region: Region, frame: _Frame) -> PlacedRegion:
        """The region; what it reads and makes for others is told when everything is placed."""
        if not isinstance(region, Replace):
            return PlacedRegion(region, tuple(frame.items), (), ())
        if any(isinstance(item, PlacedSync) for item in frame.items):
            raise SyncInside(region)
        inputs = [frame.read[self.graph.values[name]] for name in region.inputs]
        wanted = tuple((self.layouts[var], frame.wanted[var]) for var in inputs)
        outputs = self.graph.outputs_of([self.graph.by_name[name] for name in region.nodes])
        return PlacedRegion(region, tuple(frame.items), tuple(inputs), tuple(outputs), wanted)

    def _compute(self, node: Node) -> None:
        atoms = [self._read(atom, node.scope) for atom in node.eqn.invars]
        layouts = [layout_of(atom, self.layouts) for atom in atoms]
        while True:
            try:
                followed = self.followed[node.name] = follow(node.eqn, layouts, self.mesh)
                break
            except LayoutError as error:
                atom = atoms[error.operand]
                assert isinstance(atom, Var)
                completed = self._complete(atom, node.scope) if error.partial else None
                if completed is not None:
                    atoms = [completed if each is atom else each for each in atoms]
                    layouts = [layout_of(each, self.layouts) for each in atoms]
                elif self.lenient:
                    layouts[error.operand] = whole(aval_of(atom).ndim)
                else:
                    raise self._unplaceable(node, atom, error) from error
        for frame in self.frames:
            for original, atom, layout in zip(
                node.eqn.invars, atoms, followed.operands, strict=True
            ):
                if isinstance(original, Var) and isinstance(atom, Var):
                    frame.read.setdefault(original, atom)
                    frame.wanted.setdefault(atom, layout)
            frame.made.update(node.eqn.outvars)
        self.layouts.update(zip(node.eqn.outvars, followed.results, strict=True))
        forked = self.forked.get(node.eqn.outvars[0]) if node.eqn.outvars else None
        if forked is not None:
            self.layouts[node.eqn.outvars[0]] = ValueLayout(forked, varying=axes_of(forked))
        self.frames[-1].items.append(
            PlacedEquation(node.scope, node.eqn.replace(invars=atoms), tuple(layouts), forked)
        )

    # -- syncs

    def _read(self, atom: Atom, scope: str | None) -> Atom:
        """`atom` as a module, or the world outside, sees it."""
        if isinstance(atom, Literal):
            return atom
        var = atom
        while var in self.latest:
            var = self.latest[var]
        for k in self.leaving:
            if _inside(self.home.get(var), self.syncs[k].path) and not _inside(
                scope, self.syncs[k].path
            ):
                var = self._leave(k, var)
        if var not in self.fixed:
            for k in self.entering:
                if _inside(scope, self.syncs[k].path) and not _inside(
                    self.home.get(var), self.syncs[k].path
                ):
                    var = self._enter(k, var)
        return var

    def _leave(self, k: int, var: Var) -> Var:
        synced = self._sync(k, var)
        if synced is not var:
            self.latest[var] = synced
            path = self.syncs[k].path
            self.home[synced] = path.rpartition("/")[0] if path else None
        return synced

    def _enter(self, k: int, var: Var) -> Var:
        if (k, var) not in self.entered:
            self.entered[k, var] = synced = self._sync(k, var)
            if synced is not var:
                self.home[synced] = self.syncs[k].path
        return self.entered[k, var]

    def _complete(self, var: Var, scope: str) -> Var | None:
        """A partial sum made whole by the sync of a module that both its maker and its reader are in."""
        for k in self.leaving:
            path = self.syncs[k].path
            if _inside(self.home.get(var), path) and _inside(scope, path):
                synced = self._sync(k, var)
                if synced is not var:
                    self.latest[var] = synced
                    self.home[synced] = self.home.get(var)
                    return synced
        return None

    def _sync(self, k: int, var: Var) -> Var:
        """`var` after a sync, or as it is when the sync is not for such values."""
        sync, layout = self.syncs[k], self.layouts[var]
        if self.mesh.sizes[sync.mesh_axis] == 1:
            self.done.add(k)
            return var
        if not jnp.issubdtype(aval_of(var).dtype, jnp.inexact) and sync.mode == "bwd_post":
            return var
        try:
            made = after(sync, layout)
        except NotApplicable as error:
            self.passed[k] = f"{self.names[var]} passes, but {error}"
            return var
        self._check_divides(sync, var, made)
        result = Var(var.aval)
        name = f"{sync.path or 'model'}/{sync.mode}/{sync.mesh_axis}/{self.names[var]}"
        self.names[result], self.layouts[result] = self.names[var], made
        self.done.add(k)
        level = len(self.frames) - 1
        while self.frames[level].opaque and var not in self.frames[level].made:
            level -= 1
        for frame in self.frames[: level + 1]:
            frame.made.add(result)
        self.frames[level].items.append(PlacedSync(sync, name, var, result, layout, made))
        return result

    # -- what can go wrong

    def _check_divides(self, sync: Sync, var: Var, layout: ValueLayout) -> None:
        for dim, (size, axes) in enumerate(zip(aval_of(var).shape, layout.dims, strict=True)):
            if size % self.mesh.ways(axes):
                raise DirectiveError(
                    f"{describe(sync)} of {sync.path or 'the model'}: dim {dim} of {self.names[var]} has size {size}, which"
                    f" {self.mesh.ways(axes)} devices can't split evenly"
                )

    def _check_result(self, atom: Atom, layout: ValueLayout) -> None:
        if incomplete := layout.partial or layout.largest:
            raise DirectiveError(self._missing(atom, incomplete, "is handed out by the model"))
        if extra := layout.varying - layout.split:
            raise DirectiveError(
                f"{self._called(atom)}, a result of the model, is whole, but its gradients are split over {', '.join(sorted(extra))}: "
                "the all_gather before it wants backward='scatter', or a bwd_post sync stands where nothing is split"
            )

    def _unplaceable(self, node: Node, atom: Var, error: LayoutError) -> DirectiveError:
        if error.partial:
            return DirectiveError(
                self._missing(atom, error.partial, f"goes into {node.name}, which needs it whole")
            )
        return DirectiveError(
            f"{self._called(atom)}, which is {self.layouts[atom]}, goes into {node.name}: it {error.reason}.\n"
            f"Gather it before ({_example(node.scope, 'fwd_pre', 'all_gather')}), or shard other parameters"
        )

    def _missing(self, atom: Atom, axes: Iterable[str], use: str) -> str:
        home = self.home.get(atom) if isinstance(atom, Var) else None
        axis = min(axes)
        kind = "maximum" if isinstance(atom, Var) and axis in self.layouts[atom].largest else "sum"
        return (
            f"{self._called(atom)} is a partial {kind} over {axis!r} and {use}: a sync is missing.\n"
            f"Add one: {_example(home or '', 'fwd_post', 'all_reduce', axis)}"
        )

    def _called(self, atom: Atom) -> str:
        return self.names[atom] if isinstance(atom, Var) else str(atom)


def _example(path: str, mode: str, op: str, mesh_axis: str | None = None) -> str:
    module = f"sch[{path!r}]" if path else "sch"
    return f"{module}.sync({mode!r}, {op!r}" + (f", mesh_axis={mesh_axis!r})" if mesh_axis else ")")


def _inside(scope: str | None, path: str) -> bool:
    """Whether a module's scope is within `path`; None is outside of the whole model."""
    return scope is not None and within(scope, path)


def _initial(
    graph: ModelGraph, var: Var, shards: Sequence[Shard], mesh: LogicalMesh, batch_axis: str | None
) -> ValueLayout:
    """Where a parameter or argument is (of anything else it is told later)."""
    shape = aval_of(var).shape
    dims: list[tuple[str, ...]] = [()] * len(shape)
    if var in graph.params:
        for each in shards:
            if (
                graph.params[var] == joined(each.path, each.param)
                and mesh.sizes[each.mesh_axis] > 1
            ):
                dims[each.axis] = (each.mesh_axis,)
    elif var in graph.args and batch_axis is not None and shape and mesh.sizes[batch_axis] > 1:
        if shape[0] % mesh.sizes[batch_axis]:
            raise DirectiveError(
                f"{graph.args[var]} has shape {shape}: its first dim can't be split evenly over the"
                f" {mesh.sizes[batch_axis]} devices of {batch_axis!r}"
            )
        dims[0] = (batch_axis,)
    return ValueLayout(tuple(dims), varying=frozenset(axis for axes in dims for axis in axes))
