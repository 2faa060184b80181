"""A planned step on other hosts: what `parallelize` gives there, to be called and asked about."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from autopar import inspect
from autopar.hosts.arrays import DistributedArray
from autopar.hosts.cluster import RayHosts
from autopar.hosts.job import Array
from autopar.hosts.preparing import Prepared, prepare_pipeline, prepare_step
from autopar.pipeline.planned import PlannedPipeline
from autopar.plan import Plan
from autopar.planned import PlannedStep
from autopar.trace import StepGraph
from autopar.util import benchmark_func
from simulator.program import Program


class RemoteExecutable:
    """One step, for arguments of one structure, shape and dtype, run by the workers of other hosts.

    Calls return before the step has run; what they return are handles (`DistributedArray`), which the next call takes. So the driver
    may be several steps ahead.

    Attributes:
        step: what was traced.
        plan: how it runs.
        program: the instructions.
        plan_seconds, compile_seconds: what tracing and planning, and exporting and compiling took.
    """

    def __init__(
        self, planned: PlannedStep, hosts: RayHosts, donated: frozenset[int] = frozenset(), plan_seconds: float = 0.0
    ) -> None:
        self.step: StepGraph = planned.step
        self.plan: Plan = planned.plan
        self.hosts, self.plan_seconds, self._donated = hosts, plan_seconds, donated
        start = time.perf_counter()
        prepare = prepare_pipeline if isinstance(planned, PlannedPipeline) else prepare_step
        self._prepared: Prepared = prepare(planned, hosts.platform, donated)  # pyright: ignore[reportArgumentType]
        self.planned = planned
        self.program: Program = self._prepared.program
        self._number = hosts.load(self._prepared.job)
        self.compile_seconds = time.perf_counter() - start

    # -- running

    def shard_args(self, *args: Any) -> tuple[Any, ...]:
        """`args` on the workers, as the plan wants them; what is in place already stays, and batches go with the step itself."""
        leaves, tree = jax.tree.flatten(args)
        placed = [self._place(i, leaf) for i, leaf in enumerate(leaves)]
        return jax.tree.unflatten(tree, placed)

    def _place(self, i: int, leaf: Any) -> Any:
        wanted = self._prepared.inputs[i]
        if _is_at(leaf, wanted):
            return leaf
        value = np.asarray(leaf)
        return value if i in self.step.batch else self.hosts.put(value, wanted)

    def __call__(self, *args: Any) -> Any:
        """Run the step on arguments that are in place; numpy arrays are sent where they should be.

        Raises:
            ValueError: they are elsewhere, or of another structure.
            HostsError: a step has failed, this one or one before.
        """
        leaves, tree = jax.tree.flatten(args)
        if tree != self.step.in_tree:
            raise ValueError(f"arguments of structure {tree}, expected {self.step.in_tree}")
        for i, (leaf, wanted) in enumerate(zip(leaves, self._prepared.inputs, strict=True)):
            if np.shape(leaf) != wanted.shape:
                raise ValueError(f"{self.step.in_paths[i]} has shape {np.shape(leaf)}, expected {wanted.shape}")
            if isinstance(leaf, DistributedArray):
                leaf.check()
                if not _is_at(leaf, wanted):
                    raise ValueError(f"{self.step.in_paths[i]} is not where the plan wants it; see shard_args")
            elif i not in self.step.batch:
                raise ValueError(f"{self.step.in_paths[i]} is not on the workers; see shard_args")
        outputs = {o: each for o, each in enumerate(self._prepared.outputs) if isinstance(each, Array)}
        made = self.hosts.run(self._number, leaves, outputs)
        for i in self._donated:
            if isinstance(leaves[i], DistributedArray):
                leaves[i].is_donated = True
        results = [made.get(o, each) for o, each in enumerate(self._prepared.outputs)]
        return jax.tree.unflatten(self.step.out_tree, results)

    def sync(self) -> None:
        """Wait until the workers have done everything they were asked."""
        self.hosts.wait()

    # -- what it is

    @property
    def in_shardings(self) -> Any:
        """A pytree like the arguments: where they should be, on meshes without devices."""
        return jax.tree.unflatten(self.step.in_tree, [each.place.abstract() for each in self._prepared.inputs])

    @property
    def places(self) -> Sequence[Array]:
        """For each input what and where it should be."""
        return self._prepared.inputs

    def get_input_placement_specs(self) -> Any:
        """A tuple like the arguments, with a `PlacementSpec` for every array."""
        avals = jax.tree.leaves(self.step.in_avals)
        return jax.tree.unflatten(self.step.in_tree, map(self._spec, avals, self._prepared.inputs))

    def get_output_placement_specs(self) -> Any:
        """A pytree like the result, with a `PlacementSpec` for every array; None for constants."""
        specs = [
            self._spec(jax.ShapeDtypeStruct(each.shape, each.dtype), each) if isinstance(each, Array) else None
            for each in self._prepared.outputs
        ]
        return jax.tree.unflatten(self.step.out_tree, specs)

    def _spec(self, aval: Any, array: Array) -> inspect.PlacementSpec:
        mesh = self._prepared.job.meshes.index(array.place.mesh.devices)
        return inspect.placed(aval, array.place.abstract(), mesh, array.place.mesh.devices)

    def get_stage_execution_info(self) -> list[inspect.StageInfo]:
        """For every stage of a pipeline its layers, devices and tasks, with the work of each."""
        if not isinstance(self.planned, PlannedPipeline):
            raise ValueError(f"the plan of {self.step.name} is for one mesh: it has no stages")
        return inspect.stage_infos(self.planned)

    # -- how long it takes

    def profile_with_dummy_inputs(self, warmup: int = 1, number: int = 3, repeat: int = 3) -> np.ndarray:
        """Seconds of a step on zeros, `repeat` times the mean over `number` steps; shape (repeat,)."""
        avals = jax.tree.leaves(self.step.in_avals)
        zeros = jax.tree.unflatten(self.step.in_tree, [np.zeros(aval.shape, aval.dtype) for aval in avals])
        leaves = jax.tree.leaves(self.shard_args(*zeros))

        def run() -> None:
            results = jax.tree.leaves(self(*jax.tree.unflatten(self.step.in_tree, leaves)))
            for output, i in self.step.carried.items():
                leaves[i] = results[output]

        return benchmark_func(run, self.sync, warmup, repeat, number)

    def dump_debug_info(self, folder: str | Path) -> tuple[Path, ...]:
        """Write the plan and the program to `folder`."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.plan.save(folder / "plan.json")
        (folder / "program.txt").write_text(f"{self.program}\n")
        return folder / "plan.json", folder / "program.txt"


def _is_at(leaf: Any, wanted: Array) -> bool:
    return isinstance(leaf, DistributedArray) and leaf.array.place == wanted.place
