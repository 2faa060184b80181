"""Interpreters of a placed model.

The items of a placed model run in order on an executor, which says what a value is. For
`ShardExecutor` it is one device's shard inside `jax.shard_map`, and syncs are collectives. For
`ConstrainedExecutor` and `NamedExecutor` it is the whole array: a sync is a sharding constraint for
XLA's partitioner, or a `checkpoint_name` that a pin of the planner matches.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, assert_never

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Var
from jax.sharding import NamedSharding

from autopar.directives.checkpoint_policies import policy_of
from autopar.directives.definitions import Checkpoint, DirectiveError, Fuse, Replace
from autopar.directives.model_graph import ModelGraph, RematRegion
from autopar.directives.placed_model import (
    PlacedEquation,
    PlacedItem,
    PlacedModel,
    PlacedRegion,
    PlacedSync,
    StageBoundary,
)
from autopar.directives.replacements import Functions, call_replacement, check_results
from autopar.directives.shard_execution import draw_shards, run_eqn, slice_shard
from autopar.directives.syncs import OPS, apply_sync
from autopar.directives.value_layouts import LayoutError, ValueLayout
from autopar.ir.evaluate import bind
from autopar.ir.graph import aval_of, read
from autopar.ir.spec import AnyMesh, LogicalMesh, local_shape, partition_spec
from autopar.layering.layer_options import mark_pipeline_boundary


class Executor(Protocol):
    """What a value is, and so what equations and syncs do with it."""

    def compute(self, item: PlacedEquation, operands: Sequence[Any]) -> list[Any]:
        """Return the results of an equation."""
        ...

    def sync(self, item: PlacedSync, value: Any) -> Any:
        """Return `value` after a sync."""
        ...

    def prepare(self, value: Any, have: ValueLayout, want: ValueLayout) -> Any:
        """Return `value`, which is laid out as `have`, as a replacement reads it."""
        ...

    def shape(self, var: Var, layout: ValueLayout) -> tuple[int, ...]:
        """Return the shape of a value of the model, which is laid out as `layout`."""
        ...


@dataclass(frozen=True, slots=True)
class ShardExecutor:
    """Values are the shards of one device; all mesh axes are manual."""

    mesh: LogicalMesh
    functions: Functions

    def compute(self, item: PlacedEquation, operands: Sequence[Any]) -> list[Any]:
        """Return this device's shards of the results."""
        if item.forked is not None:
            return draw_shards(item.eqn, item.forked, operands, self.mesh)
        try:
            return run_eqn(item.eqn, item.operands, operands, self.mesh)
        except LayoutError as error:
            where = f"{item.eqn.primitive.name} in {item.scope or 'the model'}"
            raise DirectiveError(
                f"{where} can't run on shards: an operand {error.reason}"
            ) from error

    def sync(self, item: PlacedSync, value: Any) -> Any:
        """Return `value` after the collective of the sync."""
        return apply_sync(item.sync, item.before, value, self.mesh, self.functions)

    def prepare(self, value: Any, have: ValueLayout, want: ValueLayout) -> Any:
        """Return this device's part along the dims that `want` splits."""
        return slice_shard(value, have.dims, want.dims, self.mesh)

    def shape(self, var: Var, layout: ValueLayout) -> tuple[int, ...]:
        """Return the shape of a shard."""
        return local_shape(aval_of(var).shape, layout.dims, self.mesh)


@dataclass(frozen=True, slots=True)
class _WholeArrayExecutor:
    """Runs equations as they were traced, on whole arrays."""

    def compute(self, item: PlacedEquation, operands: Sequence[Any]) -> list[Any]:
        """Return the results of the equation, as it was traced."""
        with item.eqn.ctx.manager:
            return bind(item.eqn, operands)

    def prepare(self, value: Any, have: ValueLayout, want: ValueLayout) -> Any:
        """Return `value` unchanged."""
        return value

    def shape(self, var: Var, layout: ValueLayout) -> tuple[int, ...]:
        """Return the shape of the whole array."""
        return aval_of(var).shape


@dataclass(frozen=True, slots=True)
class ConstrainedExecutor(_WholeArrayExecutor):
    """Values are whole arrays; syncs are sharding constraints."""

    mesh: AnyMesh

    def sync(self, item: PlacedSync, value: Any) -> Any:
        """Return `value` with the sharding that it has after the sync."""
        if item.sync.mode == "bwd_post":
            return value  # the partitioner completes gradients itself
        sharding = NamedSharding(self.mesh, partition_spec(item.after.dims))
        return jax.lax.with_sharding_constraint(value, sharding)


@dataclass(frozen=True, slots=True)
class NamedExecutor(_WholeArrayExecutor):
    """Values are whole arrays; syncs name them, so that the planner's pins can refer to them."""

    def sync(self, item: PlacedSync, value: Any) -> Any:
        """Return `value` with the name of the sync."""
        return value if item.sync.mode == "bwd_post" else checkpoint_name(value, item.name)


def check_functions(items: Iterable[PlacedItem]) -> None:
    """Raise DirectiveError for a sync by a function of the user, which only shards can run."""
    for item in items:
        if isinstance(item, PlacedRegion):
            check_functions(item.items)
        elif isinstance(item, PlacedSync) and item.sync.op not in OPS and "->" not in item.sync.op:
            raise DirectiveError(
                f"{item.sync.op}, a sync function, runs on shards: build with backend='manual'"
            )


def run_model(
    placed: PlacedModel, executor: Executor, functions: Functions, leaves: Sequence[Any]
) -> list[Any]:
    """Return the results of the model.

    Args:
        placed: the model.
        executor: what runs its equations and syncs.
        functions: the user's functions that directives name.
        leaves: parameters and arguments, flat.
    """
    graph = placed.graph
    env: dict[Var, Any] = {**graph.constants, **dict(zip(graph.invars, leaves, strict=True))}
    _Interpreter(graph, executor, functions).run(placed.items, env)
    return [read(atom, env) for atom in placed.outvars]


@dataclass(frozen=True, slots=True)
class _Interpreter:
    """Runs the items of a placed model with an executor."""

    graph: ModelGraph
    executor: Executor
    functions: Functions

    def run(self, items: Iterable[PlacedItem], env: dict[Var, Any]) -> None:
        """Run `items` and add their results to `env`."""
        for item in items:
            match item:
                case PlacedEquation(scope, eqn):
                    operands = [read(atom, env) for atom in eqn.invars]
                    with jax.named_scope(scope) if scope else nullcontext():
                        results = self.executor.compute(item, operands)
                    env.update(zip(eqn.outvars, results, strict=True))
                case PlacedSync():
                    env[item.result] = self.executor.sync(item, env[item.source])
                case PlacedRegion():
                    results = self._run_region(item, [env[var] for var in item.inputs])
                    env.update(zip(item.outputs, results, strict=True))
                case StageBoundary():
                    mark_pipeline_boundary()
                case _:
                    assert_never(item)

    def _run_region(self, item: PlacedRegion, values: Sequence[Any]) -> list[Any]:
        """Return the outputs of a region, given its inputs."""
        match item.region:
            case Replace() as region:
                pairs = zip(values, item.wanted, strict=True)
                inputs = [self.executor.prepare(value, *layouts) for value, layouts in pairs]
                results = call_replacement(self.graph, region, self.functions, inputs)
                shapes = list(map(self.executor.shape, item.outputs, item.made))
                check_results(self.graph, region, results, shapes)
                return results
            case Fuse(name=name):
                function = self._as_function(item)
                function.__name__ = function.__qualname__ = name
                return jax.jit(function)(*values)
            case Checkpoint(policy=policy):
                saved = policy_of(policy, self.functions)
                return jax.checkpoint(self._as_function(item), policy=saved)(*values)
            case RematRegion(policy=policy, prevent_cse=prevent_cse):
                # The model's own jax.checkpoint had other inputs. A `prevent_cse` per input
                # does not fit these.
                return jax.checkpoint(
                    self._as_function(item), policy=policy, prevent_cse=prevent_cse is not False
                )(*values)
            case _:
                assert_never(item.region)

    def _as_function(self, item: PlacedRegion) -> Callable[..., list[Any]]:
        def region(*values: Any) -> list[Any]:
            env = {**self.graph.constants, **dict(zip(item.inputs, values, strict=True))}
            self.run(item.items, env)
            return [env[var] for var in item.outputs]

        return region
