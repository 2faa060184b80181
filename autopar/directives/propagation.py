"""Layout propagation through a model: directives become layouts of all values, and syncs.

A sync before a module, or on its gradients, applies to the values that the module reads from
outside, for that module only. A sync after a module applies to the values that leave the module,
or, where that is earlier, to a partial sum inside that an equation needs whole: the product of a
linear layer is completed before its bias is added.
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
from autopar.directives.equation_regions import GraphItem, Region, RegionNode, nodes_in
from autopar.directives.model_graph import ModelGraph, Node, depth, join_path, within
from autopar.directives.placed_model import (
    PlacedEquation,
    PlacedItem,
    PlacedModel,
    PlacedRegion,
    PlacedSync,
    StageBoundary,
    close_regions,
)
from autopar.directives.rng_forking import draw_specs
from autopar.directives.syncs import NotApplicableError, layout_after
from autopar.directives.value_layouts import (
    EquationLayouts,
    LayoutError,
    ValueLayout,
    layout_of,
    propagate,
    whole_layout,
)
from autopar.ir.graph import Atom, aval_of, variables
from autopar.ir.spec import LogicalMesh, Spec, axes_of


@dataclass(frozen=True, slots=True)
class LayoutDecisions:
    """Everything that decides the layouts of a model.

    Attributes:
        shards: directives that split parameters.
        syncs: directives that communicate.
        cuts: directives that end pipeline stages.
        mesh: the mesh over which values are split.
        batch_axis: the mesh axis that splits the first dim of the arguments that are no parameters.
        lenient: whether syncs may be missing, because the planner adds communication. A value that
            can't stay split is then taken whole.
    """

    shards: Sequence[Shard]
    syncs: Sequence[Sync]
    cuts: Sequence[CutPipelineStage]
    mesh: LogicalMesh
    batch_axis: str | None = None
    lenient: bool = False


def place_model(
    graph: ModelGraph,
    items: Sequence[GraphItem],
    decisions: LayoutDecisions,
    draws: Sequence[Node],
) -> PlacedModel:
    """Return the model with the layout of every value, from its parameters to its results.

    Args:
        graph: the model.
        items: its nodes, arranged by region.
        decisions: what decides the layouts.
        draws: nodes whose random numbers each device draws for its own shards.

    Raises:
        DirectiveError: A sync is missing or never applies, or an equation can't run on its
            operands.
        SyncInsideReplacement: A sync applies inside a replacement, which has to be inlined.
    """
    first = _Propagator(graph, decisions, {})
    placed = first.place(items)
    if draws:
        forked = draw_specs(graph, draws, first.equation_layouts, decisions.mesh)
        if forked:
            return _Propagator(graph, decisions, forked).place(items)
    return placed


@dataclass
class SyncInsideReplacement(Exception):
    """A sync applies to a value inside the equations that `region` replaces."""

    region: Replace


@dataclass
class _Frame:
    """A region that is being placed.

    Attributes:
        opaque: whether syncs of its inputs have to run before the region.
        items: what the region contains so far.
        defined: the values computed in it.
        read: the value after syncs for each value that the region reads.
        wanted: the layout in which each value is first read.
    """

    opaque: bool
    items: list[PlacedItem] = field(default_factory=list)
    defined: set[Var] = field(default_factory=set)
    read: dict[Var, Var] = field(default_factory=dict)
    wanted: dict[Var, ValueLayout] = field(default_factory=dict)


class _Propagator:
    """One pass over a model.

    Attributes:
        syncs: sync directives by number.
        leaving: the numbers of syncs after modules, the innermost module first.
        entering: the numbers of the other syncs, the outermost module first.
        home: the scope of the module in which each value is; None is outside the model.
        unsynced: values that no sync changes when they enter a module: parameters and constants.
        latest: the value after a sync for each value that has left a module.
        entered: the value after a sync for each value that has entered a module.
        applied: the numbers of the syncs that applied to some value.
        not_applicable: why a sync did not apply to the last value that it met.
        frames: the stack of regions around the current node; the first is the whole model.
        cut_after: the names of the nodes after which a pipeline stage ends.
    """

    def __init__(
        self, graph: ModelGraph, decisions: LayoutDecisions, forked: Mapping[Var, Spec]
    ) -> None:
        self.graph = graph
        self.forked = forked
        self.mesh = decisions.mesh
        self.lenient = decisions.lenient
        self.equation_layouts: dict[str, EquationLayouts] = {}
        self.syncs = dict(enumerate(decisions.syncs))
        outermost_first = sorted(self.syncs, key=lambda k: depth(self.syncs[k].path))
        self.leaving = [k for k in reversed(outermost_first) if self.syncs[k].mode == "fwd_post"]
        self.entering = [k for k in outermost_first if self.syncs[k].mode != "fwd_post"]
        self.layouts = {var: _initial_layout(graph, var, decisions) for var in graph.value_names}
        self.home: dict[Var, str | None] = {v: node.scope for v, node in graph.producer.items()}
        self.unsynced = {*graph.params, *graph.constants}
        self.latest: dict[Var, Var] = {}
        self.entered: dict[tuple[int, Var], Var] = {}
        self.names = dict(graph.value_names)
        self.applied: set[int] = set()
        self.not_applicable: dict[int, str] = {}
        self.frames = [_Frame(opaque=False)]
        self.cut_after = {
            [node.name for node in graph.nodes if node.within(cut.path)][-1]
            for cut in decisions.cuts
        }

    def place(self, items: Sequence[GraphItem]) -> PlacedModel:
        """Return the placed model; arguments and errors as for `place_model`."""
        for item in items:
            self._place_item(item)
            if self.cut_after.intersection(node.name for node in nodes_in([item])):
                self.frames[0].items.append(StageBoundary())
        outvars = tuple(self._read(atom, None) for atom in self.graph.outvars)
        results = tuple(layout_of(atom, self.layouts) for atom in outvars)
        if not self.lenient:
            for atom, layout in zip(outvars, results, strict=True):
                self._check_result(atom, layout)
        for k, sync in self.syncs.items():
            if k not in self.applied:
                reason = self.not_applicable.get(k, "no value passes there")
                raise DirectiveError(
                    f"{describe(sync)} of {sync.path or 'the model'} has nothing to do: {reason}"
                )
        used = set(variables(outvars))
        return PlacedModel(
            self.graph,
            close_regions(self.frames[0].items, used),
            tuple(self.layouts[var] for var in self.graph.invars),
            outvars,
            results,
        )

    # -- nodes and regions

    def _place_item(self, item: GraphItem) -> None:
        match item:
            case Node():
                self._place_equation(item)
            case RegionNode(region, inside):
                frame = _Frame(opaque=isinstance(region, Fuse | Replace))
                self.frames.append(frame)
                for inner in inside:
                    self._place_item(inner)
                self.frames.pop()
                self.frames[-1].items.append(self._placed_region(region, frame))
            case _:
                assert_never(item)

    def _placed_region(self, region: Region, frame: _Frame) -> PlacedRegion:
        """Return the region; `close_regions` adds its inputs and outputs unless it is replaced."""
        if not isinstance(region, Replace):
            return PlacedRegion(region, tuple(frame.items), (), ())
        if any(isinstance(item, PlacedSync) for item in frame.items):
            raise SyncInsideReplacement(region)
        inputs = [frame.read[self.graph.values[name]] for name in region.inputs]
        wanted = tuple((self.layouts[var], frame.wanted[var]) for var in inputs)
        outputs = self.graph.outputs_of([self.graph.by_name[name] for name in region.nodes])
        made = tuple(self.layouts[var] for var in outputs)
        return PlacedRegion(region, tuple(frame.items), tuple(inputs), tuple(outputs), wanted, made)

    def _place_equation(self, node: Node) -> None:
        atoms, layouts, propagated = self._propagate(node)
        for frame in self.frames:
            operands = zip(node.eqn.invars, atoms, propagated.operands, strict=True)
            for original, atom, layout in operands:
                if isinstance(original, Var) and isinstance(atom, Var):
                    frame.read.setdefault(original, atom)
                    frame.wanted.setdefault(atom, layout)
            frame.defined.update(node.eqn.outvars)
        self.layouts.update(zip(node.eqn.outvars, propagated.results, strict=True))
        forked = self.forked.get(node.eqn.outvars[0]) if node.eqn.outvars else None
        if forked is not None:
            self.layouts[node.eqn.outvars[0]] = ValueLayout(forked, varying=axes_of(forked))
        eqn = node.eqn.replace(invars=atoms)
        self.frames[-1].items.append(PlacedEquation(node.scope, eqn, tuple(layouts), forked))

    def _propagate(self, node: Node) -> tuple[list[Atom], list[ValueLayout], EquationLayouts]:
        """Return the operands of a node after syncs, their layouts, and the node's layouts."""
        atoms = [self._read(atom, node.scope) for atom in node.eqn.invars]
        layouts = [layout_of(atom, self.layouts) for atom in atoms]
        while True:
            try:
                propagated = propagate(node.eqn, layouts, self.mesh)
            except LayoutError as error:
                operand = atoms[error.operand]
                assert isinstance(operand, Var)
                completed = self._complete(operand, node.scope) if error.partial else None
                if completed is not None:
                    atoms = [completed if atom is operand else atom for atom in atoms]
                    layouts = [layout_of(atom, self.layouts) for atom in atoms]
                elif self.lenient:
                    layouts[error.operand] = whole_layout(aval_of(operand).ndim)
                else:
                    raise self._unplaceable(node, operand, error) from error
            else:
                self.equation_layouts[node.name] = propagated
                return atoms, layouts, propagated

    # -- syncs

    def _read(self, atom: Atom, scope: str | None) -> Atom:
        """Return `atom` as a reader in `scope` sees it, after the syncs on the way there.

        The scope None is outside the model.
        """
        if isinstance(atom, Literal):
            return atom
        var = atom
        while var in self.latest:
            var = self.latest[var]
        for k in self.leaving:
            path = self.syncs[k].path
            if _inside(self.home.get(var), path) and not _inside(scope, path):
                var = self._leave(k, var)
        if var not in self.unsynced:
            for k in self.entering:
                path = self.syncs[k].path
                if _inside(scope, path) and not _inside(self.home.get(var), path):
                    var = self._enter(k, var)
        return var

    def _leave(self, k: int, var: Var) -> Var:
        """Return `var` after it has left the module of sync `k`."""
        synced = self._sync(k, var)
        if synced is not var:
            self.latest[var] = synced
            path = self.syncs[k].path
            self.home[synced] = path.rpartition("/")[0] if path else None
        return synced

    def _enter(self, k: int, var: Var) -> Var:
        """Return `var` after it has entered the module of sync `k`."""
        if (k, var) not in self.entered:
            synced = self._sync(k, var)
            self.entered[k, var] = synced
            if synced is not var:
                self.home[synced] = self.syncs[k].path
        return self.entered[k, var]

    def _complete(self, var: Var, scope: str) -> Var | None:
        """Return a partial sum completed by the sync of a module that contains producer and reader.

        None if there is no such sync.
        """
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
        """Return `var` after sync `k`, or `var` itself if the sync does not apply to it."""
        sync = self.syncs[k]
        before = self.layouts[var]
        if self.mesh.sizes[sync.mesh_axis] == 1:
            self.applied.add(k)
            return var
        if not jnp.issubdtype(aval_of(var).dtype, jnp.inexact) and sync.mode == "bwd_post":
            return var
        try:
            after = layout_after(sync, before)
        except NotApplicableError as error:
            self.not_applicable[k] = f"{self.names[var]} passes, but {error}"
            return var
        self._check_divides(sync, var, after)
        result = Var(var.aval)
        name = f"{sync.path or 'model'}/{sync.mode}/{sync.mesh_axis}/{self.names[var]}"
        self.names[result] = self.names[var]
        self.layouts[result] = after
        self.applied.add(k)
        # The sync of an input of an opaque region runs before the region.
        level = len(self.frames) - 1
        while self.frames[level].opaque and var not in self.frames[level].defined:
            level -= 1
        for frame in self.frames[: level + 1]:
            frame.defined.add(result)
        self.frames[level].items.append(PlacedSync(sync, name, var, result, before, after))
        return result

    # -- errors

    def _check_divides(self, sync: Sync, var: Var, layout: ValueLayout) -> None:
        for dim, (size, axes) in enumerate(zip(aval_of(var).shape, layout.dims, strict=True)):
            if size % self.mesh.ways(axes):
                raise DirectiveError(
                    f"{describe(sync)} of {sync.path or 'the model'}: dim {dim} of"
                    f" {self.names[var]} has size {size}, which {self.mesh.ways(axes)} devices"
                    " can't split evenly"
                )

    def _check_result(self, atom: Atom, layout: ValueLayout) -> None:
        incomplete = layout.partial or layout.partial_max
        if incomplete:
            raise DirectiveError(self._missing_sync(atom, incomplete, "is returned by the model"))
        extra = layout.varying - layout.split
        if extra:
            raise DirectiveError(
                f"{self._name(atom)}, a result of the model, is whole, but its gradients are split"
                f" over {', '.join(sorted(extra))}: the all_gather before it wants"
                " backward='scatter', or a bwd_post sync stands where nothing is split"
            )

    def _unplaceable(self, node: Node, operand: Var, error: LayoutError) -> DirectiveError:
        if error.partial:
            use = f"goes into {node.name}, which needs it whole"
            return DirectiveError(self._missing_sync(operand, error.partial, use))
        return DirectiveError(
            f"{self._name(operand)}, which is {self.layouts[operand]}, goes into {node.name}: it"
            f" {error.reason}.\nGather it before ({_example(node.scope, 'fwd_pre', 'all_gather')}),"
            " or shard other parameters"
        )

    def _missing_sync(self, atom: Atom, axes: Iterable[str], use: str) -> str:
        home = self.home.get(atom) if isinstance(atom, Var) else None
        axis = min(axes)
        is_max = isinstance(atom, Var) and axis in self.layouts[atom].partial_max
        return (
            f"{self._name(atom)} is a partial {'maximum' if is_max else 'sum'} over {axis!r} and"
            f" {use}: a sync is missing.\n"
            f"Add one: {_example(home or '', 'fwd_post', 'all_reduce', axis)}"
        )

    def _name(self, atom: Atom) -> str:
        return self.names[atom] if isinstance(atom, Var) else str(atom)


def _example(path: str, mode: str, op: str, mesh_axis: str | None = None) -> str:
    module = f"sch[{path!r}]" if path else "sch"
    return f"{module}.sync({mode!r}, {op!r}" + (f", mesh_axis={mesh_axis!r})" if mesh_axis else ")")


def _inside(scope: str | None, path: str) -> bool:
    """Return whether `scope` is within the module at `path`; None is outside the model."""
    return scope is not None and within(scope, path)


def _initial_layout(graph: ModelGraph, var: Var, decisions: LayoutDecisions) -> ValueLayout:
    """Return the layout of a parameter or argument; all other values are whole for now."""
    mesh = decisions.mesh
    batch_axis = decisions.batch_axis
    shape = aval_of(var).shape
    dims: list[tuple[str, ...]] = [()] * len(shape)
    if var in graph.params:
        for shard in decisions.shards:
            param = join_path(shard.path, shard.param)
            if param == graph.params[var] and mesh.sizes[shard.mesh_axis] > 1:
                dims[shard.axis] = (shard.mesh_axis,)
    elif var in graph.args and batch_axis is not None and shape and mesh.sizes[batch_axis] > 1:
        if shape[0] % mesh.sizes[batch_axis]:
            raise DirectiveError(
                f"{graph.args[var]} has shape {shape}: its first dim can't be split evenly over the"
                f" {mesh.sizes[batch_axis]} devices of {batch_axis!r}"
            )
        dims[0] = (batch_axis,)
    return ValueLayout(tuple(dims), varying=axes_of(tuple(dims)))
