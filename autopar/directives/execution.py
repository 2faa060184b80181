"""Execute a placed model: its items in order, on one of three machines that differ in what a value is.

On `ShardExecutor` it is what one device has, inside `jax.shard_map`, and syncs are collectives. On `ConstrainedExecutor` and `NamedExecutor` it is the
whole array, and where a sync puts it is a constraint to XLA's partitioner, or a name that the planner has a pin for.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, assert_never

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Literal, Var
from jax.sharding import NamedSharding

from autopar.directives.checkpoint_policies import policy_of
from autopar.directives.compilers import compiler
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
from autopar.directives.replacements import Functions, call
from autopar.directives.shard_execution import draw_shards, run_eqn, shard
from autopar.directives.syncs import OPS, apply
from autopar.directives.value_layouts import LayoutError, ValueLayout
from autopar.ir.graph import read
from autopar.ir.spec import AnyMesh, LogicalMesh, partition_spec
from autopar.layering.layers import mark_pipeline_boundary


class Executor(Protocol):
    """What values are, and so what computing and synchronising them means."""

    def compute(self, item: PlacedEquation, operands: Sequence[Any]) -> list[Any]:
        """The results of an equation."""
        ...

    def sync(self, item: PlacedSync, value: Any) -> Any:
        """`value`, synchronised."""
        ...

    def prepare(self, value: Any, have: ValueLayout, want: ValueLayout) -> Any:
        """`value` as a function in place of equations wants it."""
        ...


@dataclass(frozen=True, slots=True)
class ShardExecutor:
    """Values are one device's part; the mesh axes are manual."""

    mesh: LogicalMesh
    functions: Functions

    def compute(self, item: PlacedEquation, operands: Sequence[Any]) -> list[Any]:
        if item.forked is not None:
            return draw_shards(item.eqn, item.forked, operands, self.mesh)
        try:
            return run_eqn(item.eqn, item.operands, operands, self.mesh)
        except LayoutError as error:
            at = f"{item.eqn.primitive.name} in {item.scope or 'the model'}"
            raise DirectiveError(f"{at} can't run on shards: an operand {error.reason}") from error

    def sync(self, item: PlacedSync, value: Any) -> Any:
        return apply(item.sync, item.before, value, self.mesh, self.functions)

    def prepare(self, value: Any, have: ValueLayout, want: ValueLayout) -> Any:
        return shard(value, have.dims, want.dims, self.mesh)


@dataclass(frozen=True, slots=True)
class _WholeArrayExecutor:
    def compute(self, item: PlacedEquation, operands: Sequence[Any]) -> list[Any]:
        eqn = item.eqn
        with eqn.ctx.manager:
            result = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
        return list(result) if eqn.primitive.multiple_results else [result]

    def prepare(self, value: Any, have: ValueLayout, want: ValueLayout) -> Any:
        return value


@dataclass(frozen=True, slots=True)
class ConstrainedExecutor(_WholeArrayExecutor):
    """Values are whole arrays; XLA is told where those that are synchronised go."""

    mesh: AnyMesh

    def sync(self, item: PlacedSync, value: Any) -> Any:
        if item.sync.mode == "bwd_post":
            return value  # XLA completes gradients by itself
        sharding = NamedSharding(self.mesh, partition_spec(item.after.dims))
        return jax.lax.with_sharding_constraint(value, sharding)


@dataclass(frozen=True, slots=True)
class NamedExecutor(_WholeArrayExecutor):
    """Values are whole arrays; those that are synchronised have the names that `pins` speaks of."""

    def sync(self, item: PlacedSync, value: Any) -> Any:
        return value if item.sync.mode == "bwd_post" else checkpoint_name(value, item.name)


def check_functions(items: Iterable[PlacedItem]) -> None:
    """Raise DirectiveError for a sync that only shards can run."""
    for item in items:
        if isinstance(item, PlacedRegion):
            check_functions(item.items)
        elif isinstance(item, PlacedSync) and item.sync.op not in OPS and "->" not in item.sync.op:
            raise DirectiveError(
                f"{item.sync.op}, a sync function, runs on shards: build with backend='manual'"
            )


def run_model(
    placed: PlacedModel, machine: Executor, functions: Functions, leaves: Sequence[Any]
) -> list[Any]:
    """The results of the model, from its parameters and arguments as a flat list."""
    graph = placed.graph
    env: dict[Var, Any] = {**graph.constants, **dict(zip(graph.invars, leaves, strict=True))}
    _Interpreter(graph, machine, functions).all(placed.items, env)
    return [read(atom, env) for atom in placed.outvars]


@dataclass(frozen=True, slots=True)
class _Interpreter:
    graph: ModelGraph
    machine: Executor
    functions: Functions

    def all(self, items: Iterable[PlacedItem], env: dict[Var, Any]) -> None:
        for item in items:
            match item:
                case PlacedEquation(scope, eqn):
                    operands = [
                        atom.val if isinstance(atom, Literal) else env[atom] for atom in eqn.invars
                    ]
                    with jax.named_scope(scope) if scope else nullcontext():
                        results = self.machine.compute(item, operands)
                    env.update(zip(eqn.outvars, results, strict=True))
                case PlacedSync():
                    env[item.result] = self.machine.sync(item, env[item.source])
                case PlacedRegion(region, _, inputs, outputs):
                    values = [env[var] for var in inputs]
                    match region:
                        case Replace():
                            results = self._replaced(item, region, values)
                        case Fuse():
                            inside = self._inside(item)
                            inside.__name__ = inside.__qualname__ = region.name
                            results = compiler(region.compiler)(inside)(*values)
                        case Checkpoint():
                            policy = policy_of(region.policy, self.functions)
                            results = jax.checkpoint(self._inside(item), policy=policy)(*values)
                        case RematRegion():
                            # What goes in is not what the model's own jax.checkpoint got: the marks, one per input, don't fit.
                            again = region.prevent_cse is not False
                            results = jax.checkpoint(
                                self._inside(item), policy=region.policy, prevent_cse=again
                            )(*values)
                        case _:
                            assert_never(region)
                    env.update(zip(outputs, results, strict=True))
                case StageBoundary():
                    mark_pipeline_boundary()
                case _:
                    assert_never(item)

    def _inside(self, group: PlacedRegion) -> Callable[..., list[Any]]:
        def region(*values: Any) -> list[Any]:
            env = {**self.graph.constants, **dict(zip(group.inputs, values, strict=True))}
            self.all(group.items, env)
            return [env[var] for var in group.outputs]

        return region

    def _replaced(self, group: PlacedRegion, region: Replace, values: Sequence[Any]) -> list[Any]:
        """What the user's function makes of its inputs."""
        pairs = zip(values, group.wanted, strict=True)
        given = [self.machine.prepare(value, have, want) for value, (have, want) in pairs]
        return call(self.graph, region, self.functions, given)
