"""A planned step on other hosts: what `parallelize` gives there, to be called and asked about."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from autopar import report
from autopar.hosts.arrays import DistributedArray
from autopar.hosts.driver import RayHosts
from autopar.hosts.job_export import export_job
from autopar.hosts.timelines import Note, merged
from autopar.lowering.instructions import task_of
from autopar.lowering.job import Array
from autopar.lowering.planned import PlannedStep
from autopar.pipeline.partition import Task
from autopar.runtime.executable import Executable
from simulator.engine.timeline import Timeline
from simulator.memory import MemoryUse
from simulator.program import Run


class RemoteExecutable(Executable):
    """One step, run by the workers of other hosts; see `Executable`.

    Calls return before the step has run; what they return are handles (`DistributedArray`), which the next call takes. So the driver
    may be several steps ahead. `in_shardings` and `out_shardings` are on meshes without devices.

    Attributes:
        hosts: the hosts that it runs on.
        tasks: for each task an instruction that runs it.
    """

    tasks: Mapping[Task, Run]

    def __init__(
        self,
        planned: PlannedStep,
        hosts: RayHosts,
        donated: frozenset[int] = frozenset(),
        plan_seconds: float = 0.0,
    ) -> None:
        """Export a planned step and have the workers compile it.

        Args:
            donated: numbers of the inputs whose memory the step may reuse.
        """
        start = time.perf_counter()
        self.planned, self.hosts, self.plan_seconds = planned, hosts, plan_seconds
        self.description = export_job(planned, hosts.platform, donated)
        runs = {task_of(run): run for run in self.description.job.calls}
        self.tasks = {t: runs[t] for graph in planned.graphs for t in graph.tasks if t in runs}
        self._number = hosts.load(self.description.job, self)
        self.in_shardings = jax.tree.unflatten(
            self.step.in_tree, [each.sharding for each in self.description.inputs]
        )
        self.out_shardings = jax.tree.unflatten(
            self.step.out_tree, [each.sharding for each in self._made]
        )
        self.compile_seconds = time.perf_counter() - start

    # -- running

    def shard_args(self, *args: Any) -> tuple[Any, ...]:
        leaves, tree = jax.tree.flatten(args)
        placed = [
            leaf if self._has(leaf, wanted) else self.hosts.put(leaf, wanted)
            for leaf, wanted in zip(leaves, self.description.inputs, strict=True)
        ]
        return jax.tree.unflatten(tree, placed)

    def __call__(self, *args: Any) -> Any:
        """Run the step on arguments that are in place; numpy arrays are sent where they should be.

        Raises:
            ValueError: they are elsewhere, or of another structure.
            HostsError: a step has failed, this one or one before, or the workers that had an argument have ended.
        """
        leaves = self.step.leaves(args)
        for i, (leaf, wanted) in enumerate(zip(leaves, self.description.inputs, strict=True)):
            if np.shape(leaf) != wanted.aval.shape:
                raise ValueError(
                    f"{self.step.in_paths[i]} has shape {np.shape(leaf)}, expected {wanted.aval.shape}"
                )
            if isinstance(leaf, DistributedArray):
                if not self._has(leaf, wanted):
                    raise ValueError(
                        f"{self.step.in_paths[i]} is not where the plan wants it; see shard_args"
                    )
                leaf.check()
            elif i not in self.step.batch:
                raise ValueError(f"{self.step.in_paths[i]} is not on the workers; see shard_args")
        outputs = {
            o: each for o, each in enumerate(self.description.outputs) if isinstance(each, Array)
        }
        made = self.hosts.run(self._number, leaves, outputs)
        for i in self.description.donated:
            if isinstance(leaves[i], DistributedArray):
                leaves[i].is_donated = True
        results = [made.get(o, each) for o, each in enumerate(self.description.outputs)]
        return jax.tree.unflatten(self.step.out_tree, results)

    def _has(self, leaf: Any, wanted: Array) -> bool:
        """Whether the workers have an argument where it should be."""
        return (
            isinstance(leaf, DistributedArray)
            and leaf.hosts is self.hosts
            and leaf.array.place == wanted.place
        )

    def sync(self) -> None:
        self.hosts.wait()

    # -- what it is

    @property
    def places(self) -> Sequence[Array]:
        """For each input what and where it should be."""
        return self.description.inputs

    def _device_ids(self, numbers: Sequence[int]) -> tuple[int, ...]:
        return tuple(numbers)

    # -- what it needs

    @property
    def platform(self) -> str:
        return self.hosts.platform

    def _text(self, task: Task, status: report.TaskStatus) -> str:
        run = self.tasks[task]
        if status == "annotated":
            function = self.description.functions[run.task]
            return report.annotated(function.jitted, function.in_avals, self.hosts.platform)
        devices = self.description.job.calls[run].devices  # only their compiler knows
        return self.hosts.ask(devices, "program_text", self._number, run, status)[0]

    def get_stage_allocation_size(self) -> dict[Task, MemoryUse]:
        found: dict[str, MemoryUse] = {}
        for of_worker in self.hosts.ask(self.hosts.owner, "allocations", self._number):
            found |= of_worker
        return {task: found[run.task] for task, run in self.tasks.items()}

    # -- how long it takes

    def _dummy_inputs(self) -> list[Any]:
        """Zeros, made where the step wants them; batches here."""
        return [
            np.zeros(each.shape, each.dtype)
            if i in self.step.batch and not each.impl
            else self.hosts.zeros(each)
            for i, each in enumerate(self.description.inputs)
        ]

    def execution_timeline(self) -> Timeline:
        """Run a step on zeros with every instruction timed, and return it in the form of a simulated step.

        Workers wait after each instruction, and run at the same time: what overlaps there does so in the timeline. A send lasts
        until the value may be fetched; who receives it waits for it and fetches it.
        """
        self.recorded()  # the first time is slower
        return merged(self.recorded(), self.program.meshes, self.memory)

    def recorded(self) -> list[list[Note]]:
        """What each worker has done in a step on zeros, and when by the clock of this process."""
        self.hosts.ask(self.hosts.owner, "record")
        self(*jax.tree.unflatten(self.step.in_tree, self._dummy_inputs()))
        return self.hosts.recorded()
