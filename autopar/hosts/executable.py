"""A planned step on other hosts: what `parallelize` gives there, to be called and asked about."""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from autopar import report
from autopar.hosts.arrays import DistributedArray
from autopar.hosts.driver import RayHosts
from autopar.hosts.job import Array
from autopar.hosts.job_export import Prepared, prepare_pipeline, prepare_step
from autopar.hosts.timelines import Note, merged
from autopar.lower import WHOLE_STEP
from autopar.pipeline.instructions import task_of
from autopar.pipeline.partition import Task
from autopar.pipeline.planned import PlannedPipeline
from autopar.plan import Plan
from autopar.planned import PlannedStep
from autopar.runtime.inspected import InspectedPipeline
from autopar.trace import StepGraph
from autopar.util import benchmark_func
from simulator.memory import MemoryUse
from simulator.program import Program, Run
from simulator.timeline import Timeline


def remote_executable(
    planned: PlannedStep, hosts: RayHosts, donated: frozenset[int] = frozenset(), plan_seconds: float = 0.0
) -> "RemoteExecutable":
    """A planned step, exported and compiled on its workers.

    Args:
        donated: numbers of the inputs whose memory the step may reuse.
    """
    start = time.perf_counter()
    if isinstance(planned, PlannedPipeline):
        return RemotePipeline(planned, prepare_pipeline(planned, hosts.platform, donated), hosts, plan_seconds, start)
    return RemoteStep(planned, prepare_step(planned, hosts.platform, donated), hosts, plan_seconds, start)


class RemoteExecutable(ABC):
    """One step, for arguments of one structure, shape and dtype, run by the workers of other hosts.

    Calls return before the step has run; what they return are handles (`DistributedArray`), which the next call takes. So the driver
    may be several steps ahead.

    Attributes:
        step: what was traced.
        plan: how it runs.
        program: the instructions.
        in_shardings, out_shardings: pytrees like the arguments and the result, on meshes without devices.
        plan_seconds, compile_seconds: what tracing and planning, and exporting and compiling took.
    """

    def __init__(
        self, planned: PlannedStep, prepared: Prepared, hosts: RayHosts, plan_seconds: float, start: float
    ) -> None:
        """Have the workers compile what was prepared, since `start`."""
        self.step: StepGraph = planned.step
        self.plan: Plan = planned.plan
        self.program: Program = prepared.program
        self.hosts, self.plan_seconds, self._prepared = hosts, plan_seconds, prepared
        self._number = hosts.load(prepared.job, self)
        self.in_shardings: Any = jax.tree.unflatten(self.step.in_tree, [each.sharding for each in prepared.inputs])
        self.out_shardings: Any = jax.tree.unflatten(self.step.out_tree, [each.sharding for each in self._made])
        self.compile_seconds = time.perf_counter() - start

    # -- running

    def shard_args(self, *args: Any) -> tuple[Any, ...]:
        """`args` on the workers, as the plan wants them; what is in place already stays."""
        leaves, tree = jax.tree.flatten(args)
        placed = [
            leaf if self._has(leaf, wanted) else self.hosts.put(leaf, wanted)
            for leaf, wanted in zip(leaves, self._prepared.inputs, strict=True)
        ]
        return jax.tree.unflatten(tree, placed)

    def __call__(self, *args: Any) -> Any:
        """Run the step on arguments that are in place; numpy arrays are sent where they should be.

        Raises:
            ValueError: they are elsewhere, or of another structure.
            HostsError: a step has failed, this one or one before, or the workers that had an argument have ended.
        """
        leaves = self.step.leaves(args)
        for i, (leaf, wanted) in enumerate(zip(leaves, self._prepared.inputs, strict=True)):
            if np.shape(leaf) != wanted.aval.shape:
                raise ValueError(f"{self.step.in_paths[i]} has shape {np.shape(leaf)}, expected {wanted.aval.shape}")
            if isinstance(leaf, DistributedArray):
                if not self._has(leaf, wanted):
                    raise ValueError(f"{self.step.in_paths[i]} is not where the plan wants it; see shard_args")
                leaf.check()
            elif i not in self.step.batch:
                raise ValueError(f"{self.step.in_paths[i]} is not on the workers; see shard_args")
        outputs = {o: each for o, each in enumerate(self._prepared.outputs) if isinstance(each, Array)}
        made = self.hosts.run(self._number, leaves, outputs)
        for i in self._prepared.donated:
            if isinstance(leaves[i], DistributedArray):
                leaves[i].is_donated = True
        results = [made.get(o, each) for o, each in enumerate(self._prepared.outputs)]
        return jax.tree.unflatten(self.step.out_tree, results)

    def _has(self, leaf: Any, wanted: Array) -> bool:
        """Whether the workers have an argument where it should be."""
        return isinstance(leaf, DistributedArray) and leaf.hosts is self.hosts and leaf.array.place == wanted.place

    def sync(self) -> None:
        """Wait until the workers have done everything they were asked."""
        self.hosts.wait()

    # -- what it is

    @property
    def places(self) -> Sequence[Array]:
        """For each input what and where it should be."""
        return self._prepared.inputs

    def get_input_placement_specs(self) -> Any:
        """A tuple like the arguments, with a `PlacementSpec` for every array."""
        avals = jax.tree.leaves(self.step.in_avals)
        return jax.tree.unflatten(self.step.in_tree, map(self._spec, avals, self._prepared.inputs))

    def get_output_placement_specs(self) -> Any:
        """A pytree like the result, with a `PlacementSpec` for every array."""
        return jax.tree.unflatten(self.step.out_tree, [self._spec(each.aval, each) for each in self._made])

    def _spec(self, aval: Any, array: Array) -> report.PlacementSpec:
        mesh = self._prepared.job.meshes.index(array.place.mesh.devices)
        return report.placed(aval, array.sharding, mesh, array.place.mesh.devices)

    @cached_property
    def _made(self) -> list[Array]:
        """What and where the outputs are; constants count as copies on the first mesh, as in one process."""
        mesh = self._prepared.inputs[0].place.mesh
        return [
            each if isinstance(each, Array) else Array.of(f"out{o}", jax.typeof(each), mesh, ((),) * np.ndim(each))
            for o, each in enumerate(self._prepared.outputs)
        ]

    # -- what it needs

    @abstractmethod
    def _memory(self) -> tuple[MemoryUse, ...]:
        """For each mesh the bytes on one device, by the compiler's buffer assignment."""

    def _program(self, run: Run, status: report.Status) -> str:
        """The program of a task; what only its compiler knows is asked of the workers that run it."""
        if status == "annotated":
            return report.annotated(*self._prepared.functions[run.task], self.hosts.platform)
        devices = self._prepared.job.calls[run].devices
        return self.hosts.ask(devices, "program_text", self._number, run, status)[0]

    def _allocations(self) -> dict[str, MemoryUse]:
        """Bytes on one device for each task."""
        found: dict[str, MemoryUse] = {}
        for of_worker in self.hosts.ask(self.hosts.owner, "allocations", self._number):
            found |= of_worker
        return found

    # -- how long it takes

    def profile_with_dummy_inputs(self, warmup: int = 1, number: int = 3, repeat: int = 3) -> np.ndarray:
        """Seconds of a step on zeros, `repeat` times the mean over `number` steps; shape (repeat,)."""
        leaves = self._dummy_inputs()

        def run() -> None:
            results = jax.tree.leaves(self(*jax.tree.unflatten(self.step.in_tree, leaves)))
            for output, i in self.step.carried.items():
                leaves[i] = results[output]

        return benchmark_func(run, self.sync, warmup, repeat, number)

    def _dummy_inputs(self) -> list[Any]:
        """Zeros, made where the step wants them; batches here."""
        return [
            np.zeros(each.shape, each.dtype) if i in self.step.batch and not each.impl else self.hosts.zeros(each)
            for i, each in enumerate(self._prepared.inputs)
        ]

    def dump_stage_execution_trace(self, file: str | Path) -> Timeline:
        """Run a step on zeros with every instruction timed; write it for Perfetto, in the form of a simulated step, and return it.

        Workers wait after each instruction, and run at the same time: what overlaps there does so in the timeline. A send lasts
        until the value may be fetched; who receives it waits for it and fetches it.
        """
        self.recorded()  # the first time is slower
        timeline = merged(self.recorded(), self.program.meshes, self._memory())
        timeline.save_chrome_trace(file)
        return timeline

    def recorded(self) -> list[list[Note]]:
        """What each worker has done in a step on zeros, and when by the clock of this process."""
        self.hosts.ask(self.hosts.owner, "record")
        self(*jax.tree.unflatten(self.step.in_tree, self._dummy_inputs()))
        return self.hosts.recorded()


class RemoteStep(RemoteExecutable):
    """A step that is not cut, on the hosts of one mesh."""

    @property
    def memory(self) -> MemoryUse:
        """Bytes on one device, by the compiler's buffer assignment."""
        return self._allocations()[WHOLE_STEP.task]

    def _memory(self) -> tuple[MemoryUse, ...]:
        return (self.memory,)

    def get_total_allocation_size(self) -> int:
        """Bytes that one device needs to run the step."""
        return self.memory.total

    def get_hlo_text(self, status: report.Status = "optimized") -> str:
        """The program: "traced", "annotated" with shardings, "partitioned" for one device, or "optimized" as it runs."""
        match status:
            case "traced":
                return report.traced(self, self.hosts.platform)
            case "annotated" | "partitioned" | "optimized":
                return self._program(WHOLE_STEP, status)
            case other:
                raise report.unknown_status(other)

    def dump_debug_info(self, folder: str | Path, name: str | None = None) -> tuple[Path, ...]:
        """Write plan, reasons, placements, reshardings, programs and memory to `folder`; see `autopar.report.DEBUG_FILES`."""
        return report.dump_debug_info(self, folder, name)


class RemotePipeline(RemoteExecutable, InspectedPipeline):
    """A pipeline, its stages on hosts of their own or together on some.

    Attributes:
        tasks: for each task an instruction that runs it.
    """

    def __init__(
        self, planned: PlannedPipeline, prepared: Prepared, hosts: RayHosts, plan_seconds: float, start: float
    ) -> None:
        super().__init__(planned, prepared, hosts, plan_seconds, start)
        self.planned = planned
        runs = {task_of(run): run for run in prepared.job.calls}
        self.tasks = {t: runs[t] for graph in planned.graphs for t in graph.tasks if t in runs}

    def get_stage_allocation_size(self) -> dict[Task, MemoryUse]:
        """Bytes on one device for each task, by the compiler's buffer assignment."""
        found = self._allocations()
        return {task: found[run.task] for task, run in self.tasks.items()}

    def _memory(self) -> tuple[MemoryUse, ...]:
        return self.memory

    def _text(self, task: Task, status: report.Status) -> str:
        return self._program(self.tasks[task], status)
