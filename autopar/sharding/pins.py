"""Specs that inputs may have: those that the options allow, restricted by the user's pins."""

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import jax
from jax.extend.core.primitives import name_p
from jax.sharding import PartitionSpec

from autopar.ir.array_cuts import path_of_array
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
    replicated,
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
        role: role of the input.
        path: path of the input.
        shape: its shape; for a batch input the shape in one microbatch.
        mesh: the logical mesh.
        options: what a sharding may do.
        num_micro_batches: number of microbatches.

    Raises:
        ShardingError: the batch can't be sharded evenly as `options` require.
    """
    specs = all_specs(shape, mesh)
    if role == "batch" and options.data_parallel:
        wanted = (mesh.nontrivial_axes, *replicated(len(shape) - 1))
        _check_batch(path, shape, wanted, mesh, num_micro_batches)
        return [wanted]
    if role == "batch" and options.batch_axis is not None:
        wanted = ((options.batch_axis,), *replicated(len(shape) - 1))
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
    """Check that the mesh has the axis that shards the batch.

    Raises:
        ShardingError: it has no such axis.
    """
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
            f"batch input {path} has shape {whole}: its first dim must divide evenly over {ways}"
            " devices; pad the batch or use a mesh of another size"
        )
    raise ShardingError(
        f"batch input {path} has shape {whole}: in {num_micro_batches} microbatches of {shape[0]}"
        f" examples, which must divide evenly over {ways} devices; use fewer microbatches, pad the"
        " batch or use a mesh of another size"
    )


def specs_by_path(
    specs: Any, tree: Any, paths: Sequence[str], name: str
) -> dict[str, PartitionSpec]:
    """Return specs by path from a pytree of specs that is a prefix of `tree`.

    Args:
        specs: the pytree; None gives no spec.
        tree: structure of the arguments or results.
        paths: path of each leaf.
        name: the user's name of the pytree, for errors.

    Raises:
        ShardingError: it is no prefix of `tree`, or has leaves that are no PartitionSpecs.
    """

    def is_leaf(x: Any) -> bool:
        return x is None or isinstance(x, PartitionSpec)

    try:
        leaves = jax.tree.leaves(
            jax.tree.broadcast(specs, tree.unflatten(paths), is_leaf=is_leaf), is_leaf=is_leaf
        )
    except ValueError as error:
        raise ShardingError(
            f"{name} is {specs!r}: {str(error).splitlines()[0]}\nExpected PartitionSpecs in the"
            f" structure of {paths}, or in a prefix of it, and None where there is no spec"
        ) from error
    for spec in leaves:
        if not is_leaf(spec):
            raise ShardingError(
                f"{name} holds {spec!r}, expected a jax.sharding.PartitionSpec or None"
            )
    return {path: spec for path, spec in zip(paths, leaves, strict=True) if spec is not None}


def check_patterns(patterns: Iterable[str], step: StepGraph) -> None:
    """Check that each pattern of a pin matches an input, a result or a named value of the step.

    Raises:
        ShardingError: a pattern matches nothing.
    """
    names = _shapes(step) if patterns else ()
    for pattern in patterns:
        if not _matching(pattern, names):
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3)
            raise ShardingError(
                f"pin {pattern!r} matches no input, result or named value of {step.name};"
                f" near it are {', '.join(near) or 'none'}"
            )


def _shapes(step: StepGraph) -> dict[str, tuple[int, ...]]:
    """Return the shapes of inputs, results and named values by name."""
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
    """Return the names that a pattern matches; the name of an array matches all of its pieces."""
    if pattern in names:
        return [pattern]
    return [name for name in names if fnmatchcase(path_of_array(name), pattern)]


class Pins:
    """The user's specs of inputs, outputs and named values, by pattern.

    A pattern need not match in each stage of a pipeline; `check_patterns` checks the whole step. On
    one device there are no pins.

    Raises:
        ShardingError: a pattern names an unknown axis, or its spec does not divide a value evenly,
            or two patterns give one value different specs.
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
                        f"{name} is pinned to {partition_spec(self._pinned[name])} by one pattern"
                        f" and to {partition} by {pattern!r}; keep one"
                    )

    def find(self, name: str) -> Spec | None:
        """Return the spec that `name` is pinned to, or None."""
        return self._pinned.get(name)

    def restrict(self, path: str, allowed: Specs) -> Specs:
        """Return the allowed specs of an input that its pin allows, too.

        Raises:
            ShardingError: there are none.
        """
        pinned = self.find(path)
        if pinned is None:
            return allowed
        if pinned not in allowed:
            raise ShardingError(
                f"{path} is pinned to {partition_spec(pinned)}, which the method's own choices for"
                " it rule out; drop the pin or use ShardParallel"
            )
        return (pinned,)


def _checked(name: str, partition: PartitionSpec, shape: Sequence[int], mesh: LogicalMesh) -> Spec:
    if reason := spec_problem(partition, shape, mesh.sizes):
        raise ShardingError(f"{name} is pinned to {partition}: {reason}")
    spec = from_partition_spec(partition, len(shape))
    return tuple(tuple(axis for axis in axes if mesh.sizes[axis] > 1) for axes in spec)
