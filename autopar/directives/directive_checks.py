"""Checks that a directive applies to a model and agrees with earlier directives."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, assert_never

from autopar.directives.checkpoint_policies import policy_of
from autopar.directives.definitions import (
    Annotate,
    Checkpoint,
    CutPipelineStage,
    Decompose,
    Directive,
    DirectiveError,
    ForkRng,
    Fuse,
    Replace,
    Shard,
    Sync,
    Trace,
    describe,
)
from autopar.directives.model_graph import join_path
from autopar.directives.replacements import ModuleFunction, check_replacement
from autopar.directives.rng_forking import random_draws
from autopar.directives.syncs import check_sync

if TYPE_CHECKING:
    from autopar.directives.scheduled_model import ModelSchedule


def check_directive(model: "ModelSchedule", directive: Directive) -> None:
    """Raise DirectiveError unless `directive` can be added to the schedule of `model`."""
    if directive.path not in model.modules.by_path:
        # Raises an error that names similar paths.
        model.modules.find(directive.path)
    match directive:
        case Shard():
            _check_shard(model, directive)
        case Sync():
            _check_mesh_axis(model, directive)
            check_sync(directive, model.functions)
            _check_no_duplicate(model, directive, ("path", "mode", "mesh_axis"))
        case Decompose(path):
            if not model.modules.by_path[path].is_linear:
                raise DirectiveError(
                    f"{path or 'the model'} has no kernel and bias of its own: only such modules"
                    " can be decomposed"
                )
        case Trace(path, _, leaves):
            for leaf in leaves:
                model.modules.find(join_path(path, leaf))
        case Fuse() | Replace():
            _check_region(model, directive)
        case Checkpoint(_, policy):
            policy_of(policy, model.functions)
            _check_no_duplicate(model, directive, ("path",))
        case CutPipelineStage(path):
            _check_no_duplicate(model, directive, ("path",))
            if not model.module_subgraph(path).nodes:
                raise DirectiveError(
                    f"{path} has no equations, so that no stage can end after it; cut after a"
                    " module that computes something"
                )
        case ForkRng(path):
            _check_no_duplicate(model, directive, ("path",))
            if not random_draws(model.nodes_of(path)):
                raise DirectiveError(
                    f"{path or 'the model'} draws no random numbers: put fork_rng on what has"
                    " dropout, that is not deterministic"
                )
        case Annotate(path, param):
            model.modules.param(path, param)
        case _:
            assert_never(directive)


def _check_mesh_axis(model: "ModelSchedule", directive: Shard | Sync) -> None:
    if directive.mesh_axis not in model.mesh.axis_names:
        raise DirectiveError(
            f"{describe(directive)}: {directive.mesh_axis!r} is no axis of the mesh, which has"
            f" {', '.join(map(repr, model.mesh.axis_names))}"
        )


def _check_shard(model: "ModelSchedule", directive: Shard) -> None:
    _check_mesh_axis(model, directive)
    shape = model.modules.param(directive.path, directive.param).shape
    name = join_path(directive.path, directive.param)
    if not 0 <= directive.axis < len(shape):
        raise DirectiveError(f"{name} has shape {shape}: it has no axis {directive.axis} to shard")
    ways = model.mesh.shape[directive.mesh_axis]
    if shape[directive.axis] % ways:
        raise DirectiveError(
            f"{name} has shape {shape}: axis {directive.axis} can't be split evenly over the {ways}"
            f" devices of mesh axis {directive.mesh_axis!r}; shard another axis, or over fewer"
            " devices"
        )
    for other in model.of_kind(Shard):
        same_param = (other.path, other.param) == (directive.path, directive.param)
        if same_param and (other.axis == directive.axis or other.mesh_axis == directive.mesh_axis):
            raise DirectiveError(
                f"{name} is sharded twice: {describe(other)} and {describe(directive)}; keep one"
            )


def _check_region(model: "ModelSchedule", directive: Fuse | Replace) -> None:
    unknown = [name for name in directive.nodes if name not in model.graph.by_name]
    if unknown or not directive.nodes:
        raise DirectiveError(
            f"{describe(directive)}: the model has no {', '.join(unknown[:3]) or 'equations there'}"
            "; find what is to be fused or replaced in this model"
        )
    claimed = model.claimed_nodes().intersection(directive.nodes)
    if claimed:
        raise DirectiveError(
            f"{describe(directive)}: {', '.join(sorted(claimed)[:3])} is fused or replaced already;"
            " keep one"
        )
    _check_reads(model, directive)
    if isinstance(directive, Fuse):
        if directive.compiler != "xla":
            raise DirectiveError(
                f"{describe(directive)}: compiler {directive.compiler!r}, expected 'xla'"
            )
    else:
        _check_function(model, directive)


def _check_reads(model: "ModelSchedule", directive: Fuse | Replace) -> None:
    """Raise DirectiveError if a node reads other values than in the model of the schedule."""
    reads_here = model.operand_names(directive.nodes)
    for name, written, here in zip(directive.nodes, directive.reads, reads_here, strict=False):
        if len(written) != len(here) or any(
            set(left).isdisjoint(right) for left, right in zip(written, here, strict=True)
        ):
            raise DirectiveError(
                f"{describe(directive)}: {name} reads {_operands(here)} in this model, and"
                f" {_operands(written)} in the one that the schedule was written for; find what is"
                " to be fused or replaced in this one"
            )


def _operands(operands: Sequence[Sequence[str]]) -> str:
    return " and ".join(names[-1] for names in operands) or "nothing"


def _check_function(model: "ModelSchedule", directive: Replace) -> None:
    if directive.function not in model.functions:
        raise DirectiveError(
            f"{describe(directive)}: function {directive.function!r} is not known here; give it by"
            " functions={name: function}"
        )
    nodes = [model.graph.by_name[name] for name in directive.nodes]
    read = {model.graph.value_names[var] for var in model.graph.inputs_of(nodes)}
    foreign = set(directive.inputs) - read
    if foreign:
        raise DirectiveError(
            f"{describe(directive)}: what is replaced does not read {', '.join(sorted(foreign))}"
        )
    if isinstance(model.functions[directive.function], ModuleFunction):
        check_replacement(model.graph, directive, model.functions)


def _check_no_duplicate(
    model: "ModelSchedule",
    directive: Sync | Checkpoint | CutPipelineStage | ForkRng,
    keys: tuple[str, ...],
) -> None:
    """Raise DirectiveError if an earlier directive has the same class and the same `keys`."""
    for other in model.of_kind(type(directive)):
        if all(getattr(other, key) == getattr(directive, key) for key in keys):
            raise DirectiveError(
                f"{directive.path or 'the model'} has {describe(other)} already, now"
                f" {describe(directive)}; keep one"
            )
