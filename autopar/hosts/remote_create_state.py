"""Making a state on the hosts where a step wants it."""

import time
from typing import Any

import jax

from autopar.hosts.arrays import plain
from autopar.hosts.job_export import export_state
from autopar.hosts.remote_executable import RemoteExecutable
from autopar.ir.step_graph import StepGraph
from autopar.lowering.job import Array


class RemoteCreateState:
    """A function that returns a state, run by the workers: each mesh computes what it keeps.

    Attributes:
        step: what was traced.
        out_shardings: a pytree like the state: where the training step wants it, on meshes without devices.
    """

    def __init__(self, step: StepGraph, train_step: RemoteExecutable) -> None:
        self.step, self._train_step, self.hosts = step, train_step, train_step.hosts
        start = time.perf_counter()
        count = len(step.jaxpr.outvars)
        prepared = export_state(step, train_step.places[:count], self.hosts.platform)
        self._outputs = {
            o: each for o, each in enumerate(prepared.outputs) if isinstance(each, Array)
        }
        self.out_shardings: Any = jax.tree.unflatten(
            step.out_tree, [each.sharding for each in self._outputs.values()]
        )
        self._number = self.hosts.load(prepared.job, self)
        self.compile_seconds = time.perf_counter() - start

    def shard_args(self, *args: Any) -> tuple[Any, ...]:
        """`args` as they are: every mesh gets all of them."""
        return args

    def __call__(self, *args: Any) -> Any:
        """The state, as handles."""
        made = self.hosts.run(self._number, list(map(plain, self.step.leaves(args))), self._outputs)
        return jax.tree.unflatten(self.step.out_tree, [made[o] for o in range(len(made))])

    def get_output_placement_specs(self) -> Any:
        """A pytree like the state, with a `PlacementSpec` for every array: that of the training step."""
        specs = jax.tree.leaves(self._train_step.get_input_placement_specs())[: len(self._outputs)]
        return jax.tree.unflatten(self.step.out_tree, specs)
