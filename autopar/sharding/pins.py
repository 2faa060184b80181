"""Where inputs may be: what the options leave free, and what the user pins."""

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import jax
from jax.extend.core.primitives import name_p
from jax.sharding import PartitionSpec

from autopar.ir.graph import aval_of
from autopar.ir.spec import (
    LogicalMesh,
    Spec,
    Specs,
    all_specs,
    axes_of,
    divides,
    from_partition_spec,
    partition_spec,
    spec_problem,
)
from autopar.ir.step_graph import StepGraph
from autopar.sharding.dataflow import InputRole
from autopar.sharding.options import Freedom, ShardingOptions


class ShardingError(ValueError):
    """The options can't hold for this step on this mesh."""


def input_specs(
    role: InputRole,
    path: str,
    shape: Sequence[int],
    mesh: LogicalMesh,
    options: ShardingOptions,
    num_micro_batches: int = 1,
) -> list[Spec]:
    """Return the specs that `options` allow an input, the least sharded first.

    Args:
        role: what the input is to the step.
        path: what the user calls it.
        shape: its shape; of a batch input that of one microbatch.
        mesh: the devices.
        options: limits on what the planner may choose.
        num_micro_batches: parts that the batch is cut into.

    Raises:
        ShardingError: the batch can't be divided as `options` want it.
    """
    specs = all_specs(shape, mesh)
    if role == "batch" and options.data_parallel:
        wanted = (tuple(a for a in mesh.axis_names if mesh.sizes[a] > 1), *((),) * (len(shape) - 1))
        _check_batch(path, shape, wanted, mesh, num_micro_batches)
        return [wanted]
    if role == "batch" and options.batch_axis is not None:
        wanted = ((options.batch_axis,), *((),) * (len(shape) - 1))
        _check_batch(path, shape, wanted, mesh, num_micro_batches)
        if mesh.sizes[options.batch_axis] > 1:
            specs = [spec for spec in specs if options.batch_axis in spec[0]]
    freedom: Freedom = "any"
    if role == "parameter":
        freedom = options.parameters
    elif role == "state":
        freedom = options.optimizer_state
    elif role == "other" and options.data_parallel:
        freedom = "replicated"
    if freedom == "replicated":
        return specs[:1]
    if freedom == "sharded":
        most = max(mesh.ways(axes_of(spec)) for spec in specs)
        return [spec for spec in specs if mesh.ways(axes_of(spec)) == most]
    return specs


def check_batch_axis(options: ShardingOptions, mesh: LogicalMesh) -> None:
    """Raise ShardingError unless the axis that the batch is wanted on is there."""
    if options.batch_axis is not None and options.batch_axis not in mesh.sizes:
        raise ShardingError(
            f"batch_axis={options.batch_axis!r} is no axis of the mesh, which has {mesh.axis_names}"
        )


def _check_batch(
    path: str, shape: Sequence[int], wanted: Spec, mesh: LogicalMesh, num_micro_batches: int
) -> None:
    if divides(shape, wanted, mesh):
        return
    ways = mesh.ways(axes_of(wanted))
    whole = (shape[0] * num_micro_batches, *shape[1:])
    if num_micro_batches == 1:
        raise ShardingError(
            f"batch input {path} has shape {whole}: its first dim must divide evenly over {ways} devices; pad the batch or use a mesh"
            " of another size"
        )
    raise ShardingError(
        f"batch input {path} has shape {whole}: in {num_micro_batches} microbatches of {shape[0]} examples, which must divide evenly"
        f" over {ways} devices; use fewer microbatches, pad the batch or use a mesh of another size"
    )


def specs_by_path(
    specs: Any, tree: Any, paths: Sequence[str], name: str
) -> dict[str, PartitionSpec]:
    """The specs that a pytree gives, a prefix of `tree`, whose leaves have the given paths; None gives none.

    Raises:
        ShardingError: it is no such prefix, or holds something else; `name` is what the user calls it.
    """

    def is_leaf(x: Any) -> bool:
        return x is None or isinstance(x, PartitionSpec)

    try:
        each = jax.tree.leaves(
            jax.tree.broadcast(specs, tree.unflatten(paths), is_leaf=is_leaf), is_leaf=is_leaf
        )
    except ValueError as error:
        raise ShardingError(
            f"{name} is {specs!r}: {str(error).splitlines()[0]}\nExpected PartitionSpecs in the structure of {paths}, or in a prefix"
            " of it, and None where there is no spec"
        ) from error
    for spec in each:
        if not is_leaf(spec):
            raise ShardingError(
                f"{name} holds {spec!r}, expected a jax.sharding.PartitionSpec or None"
            )
    return {path: spec for path, spec in zip(paths, each, strict=True) if spec is not None}


def check_patterns(patterns: Iterable[str], step: StepGraph) -> None:
    """Raise ShardingError unless each pattern of a pin matches something in the step."""
    names = _shapes(step) if patterns else ()
    for pattern in patterns:
        if not _matching(pattern, names):
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3)
            raise ShardingError(
                f"pin {pattern!r} matches no input, result or named value of {step.name}; near it are {', '.join(near) or 'none'}"
            )


def _shapes(step: StepGraph) -> dict[str, tuple[int, ...]]:
    """What can be pinned, by its name: inputs, results and named values."""
    shapes = {
        path: aval_of(var).shape for path, var in zip(step.in_paths, step.jaxpr.invars, strict=True)
    }
    for path, atom in zip(step.out_paths, step.jaxpr.outvars, strict=True):
        shapes[f"result/{path}".removesuffix("/")] = aval_of(atom).shape
    for eqn in step.jaxpr.eqns:
        if eqn.primitive is name_p:
            shapes[eqn.params["name"]] = aval_of(eqn.outvars[0]).shape
    return shapes


def _matching(pattern: str, names: Collection[str]) -> list[str]:
    return [pattern] if pattern in names else [name for name in names if fnmatchcase(name, pattern)]


class Pins:
    """The user's own specs of inputs, outputs and named values, by pattern.

    The step may be one stage of several: `check_patterns` sees whether a pattern matches anything in all of them. On one device there is
    nothing to pin.

    Raises:
        ShardingError: a pattern names an unknown axis, or does not divide what it matches; two patterns want different specs of the
            same value.
    """

    def __init__(
        self, patterns: Mapping[str, PartitionSpec], step: StepGraph, mesh: LogicalMesh
    ) -> None:
        self._pinned: dict[str, Spec] = {}
        if not patterns or mesh.num_devices == 1:
            return
        shapes = _shapes(step)
        for pattern, partition in patterns.items():
            for name in _matching(pattern, shapes):
                spec = _checked(name, partition, shapes[name], mesh)
                if self._pinned.setdefault(name, spec) != spec:
                    raise ShardingError(
                        f"{name} is pinned to {partition_spec(self._pinned[name])} by one pattern and to {partition} by"
                        f" {pattern!r}; keep one"
                    )

    def find(self, name: str) -> Spec | None:
        """What `name` is pinned to, if it is."""
        return self._pinned.get(name)

    def restrict(self, path: str, allowed: Specs) -> Specs:
        """Of the specs allowed for an input, those that its pin allows."""
        pinned = self.find(path)
        if pinned is None:
            return allowed
        if pinned not in allowed:
            raise ShardingError(
                f"{path} is pinned to {partition_spec(pinned)}, which the method's own choices for it rule out; drop the pin or"
                " use ShardParallel"
            )
        return (pinned,)


def _checked(name: str, partition: PartitionSpec, shape: Sequence[int], mesh: LogicalMesh) -> Spec:
    if reason := spec_problem(partition, shape, mesh.sizes):
        raise ShardingError(f"{name} is pinned to {partition}: {reason}")
    spec = from_partition_spec(partition, len(shape))
    return tuple(tuple(axis for axis in axes if mesh.sizes[axis] > 1) for axes in spec)
