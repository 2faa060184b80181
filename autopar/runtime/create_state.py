"""Making a state on the devices where a step wants it."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Literal
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.ir import graph
from autopar.ir.evaluate import as_is, evaluate
from autopar.ir.spec import AnyMesh
from autopar.ir.step_graph import StepGraph
from autopar.lowering.shardwise import shardwise


class CreateStateExecutable:
    """A function that returns a state, compiled for every mesh that holds a part of it.

    Each mesh computes what it keeps, and the compiler partitions that as it is kept.

    Attributes:
        step: what was traced.
        out_shardings: a pytree like the state: where the training step wants it.
    """

    def __init__(
        self, step: StepGraph, out_shardings: Sequence[NamedSharding], placement: Sequence[Any]
    ) -> None:
        self.step = step
        self._placement = tuple(placement)
        self.out_shardings: Any = jax.tree.unflatten(step.out_tree, out_shardings)
        start = time.perf_counter()
        meshes = dict.fromkeys(s.mesh for s in out_shardings if isinstance(s.mesh, Mesh))
        self._parts = {
            mesh: [o for o, s in enumerate(out_shardings) if s.mesh == mesh] for mesh in meshes
        }
        avals = jax.tree.leaves(step.in_avals)
        self._compiled = {
            mesh: self._jitted(outputs, mesh, [out_shardings[o] for o in outputs])
            .lower(*avals)
            .compile()
            for mesh, outputs in self._parts.items()
        }
        self.compile_seconds = time.perf_counter() - start

    def _jitted(
        self, outputs: Sequence[int], mesh: Mesh, shardings: list[NamedSharding]
    ) -> jax.stages.Wrapped:
        everywhere = NamedSharding(mesh, PartitionSpec())
        return jax.jit(
            part_of_state(self.step, outputs, mesh),
            in_shardings=everywhere,
            out_shardings=shardings,
        )

    def shard_args(self, *args: Any) -> tuple[Any, ...]:
        """`args` as they are: every mesh gets all of them."""
        return args

    def __call__(self, *args: Any) -> Any:
        """The state."""
        leaves = self.step.leaves(args)
        values: dict[int, jax.Array] = {}
        for mesh, outputs in self._parts.items():
            here = jax.device_put(leaves, NamedSharding(mesh, PartitionSpec()))
            values.update(zip(outputs, self._compiled[mesh](*here), strict=True))
        return jax.tree.unflatten(self.step.out_tree, [values[o] for o in range(len(values))])

    def get_output_placement_specs(self) -> Any:
        """A pytree like the state, with a `PlacementSpec` for every array: that of the training step."""
        return jax.tree.unflatten(self.step.out_tree, self._placement)


def part_of_state(
    step: StepGraph, outputs: Sequence[int], mesh: AnyMesh
) -> Callable[..., list[jax.Array]]:
    """A function of the arguments' leaves that computes some of the outputs on `mesh`, and nothing else."""
    jaxpr = step.jaxpr
    wanted = [jaxpr.outvars[o] for o in outputs]
    eqns = graph.needed(enumerate(jaxpr.eqns), wanted)

    def run(*args: Any) -> list[jax.Array]:
        env = dict(zip((*jaxpr.invars, *jaxpr.constvars), (*args, *jaxpr.consts), strict=True))
        evaluate(eqns, env, as_is, as_is, shardwise(mesh))
        values = (atom.val if isinstance(atom, Literal) else env[atom] for atom in wanted)
        return [
            jax.lax.convert_element_type(v, graph.aval_of(a).dtype)
            for v, a in zip(values, wanted, strict=True)
        ]

    return run


def state_avals(step: StepGraph) -> Any:
    """The state that a traced function makes, as ShapeDtypeStructs."""
    avals = map(graph.aval_of, step.jaxpr.outvars)
    return jax.tree.unflatten(
        step.out_tree, [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    )
