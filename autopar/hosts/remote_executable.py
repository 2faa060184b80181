"""The executable of a planned step on the hosts of a Ray cluster."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, override

import jax
import jax.numpy as jnp
import numpy as np

from autopar import report
from autopar.devices import Device
from autopar.hosts.arrays import DistributedArray
from autopar.hosts.driver import RayHosts
from autopar.hosts.job_export import export_job
from autopar.hosts.timelines import ExecutedInstruction, merged
from autopar.lowering.instructions import task_of
from autopar.lowering.job import Array
from autopar.lowering.pass_programs import of_first_pass
from autopar.lowering.planned import PlannedStep
from autopar.pipeline.partition import Task
from autopar.runtime.ambient_mesh import check_axes_are_auto, without_ambient_mesh
from autopar.runtime.executable import Executable
from simulator.engine.timeline import Timeline
from simulator.memory import MemoryUse
from simulator.program import Run


class RemoteExecutable(Executable):
    """A planned step that the workers of other hosts run; see `Executable`.

    A call returns handles (`DistributedArray`) before the step has run, and the next call takes
    them. So the driver may be several steps ahead of the workers. `in_shardings` and
    `out_shardings` are on meshes without devices.

    Attributes:
        hosts: the hosts.
        tasks: for each task an instruction that runs it.
    """

    tasks: Mapping[Task, Run]

    @without_ambient_mesh()
    def __init__(
        self,
        planned: PlannedStep,
        hosts: RayHosts,
        donated: frozenset[int] = frozenset(),
        plan_seconds: float = 0.0,
    ) -> None:
        """Export a planned step, and compile it on the workers.

        Args:
            planned: the traced step and its plan.
            hosts: the hosts.
            donated: numbers of the inputs whose memory the step may reuse.
            plan_seconds: seconds that tracing and planning took.

        Raises:
            ValueError: there are several stages, and the mesh of `jax.set_mesh` has explicit axes.
        """
        start = time.perf_counter()
        if len(planned.plan.stages) > 1:
            check_axes_are_auto()
        self.planned = planned
        self.hosts = hosts
        self.plan_seconds = plan_seconds
        self.description = export_job(planned, hosts.platform, donated)
        runs = {task_of(run): run for run in self.description.job.calls}
        self.tasks = {
            task: runs[task] for graph in planned.graphs for task in graph.tasks if task in runs
        }
        self._number = hosts.load(self.description.job, self)
        self.in_shardings = jax.tree.unflatten(
            self.step.in_tree, [array.sharding for array in self.description.inputs]
        )
        self.out_shardings = jax.tree.unflatten(
            self.step.out_tree, [array.sharding for array in self._output_arrays]
        )
        if self.step.preparation is not None:
            self._compute = jax.jit(self.step.preparation.compute)
        self._first_pass = planned.first_pass and RemoteExecutable(planned.first_pass, hosts)
        self.compile_seconds = time.perf_counter() - start

    # -- running

    @override
    def shard_args(self, *args: Any) -> tuple[Any, ...]:
        handles = [
            self._at(leaf, wanted)
            for leaf, wanted in zip(self.step.leaves(args), self.description.inputs, strict=True)
        ]
        return self.step.arguments.joined(handles)

    def __call__(self, *args: Any) -> Any:
        """Run the step on arguments that are in place; numpy arrays of a batch are sent there.

        Raises:
            ValueError: an argument is elsewhere or has another structure.
            HostsError: this step or an earlier one failed, or an argument's workers have ended.
        """
        leaves = self.step.leaves(args)
        for i, (leaf, wanted) in enumerate(zip(leaves, self.description.inputs, strict=True)):
            self._check(i, leaf, wanted)
        outputs = {
            o: array for o, array in enumerate(self.description.outputs) if isinstance(array, Array)
        }
        handles = self.hosts.run(self._number, self._inputs(leaves), outputs)
        for i in self.description.donated:
            if isinstance(leaves[i], DistributedArray):
                leaves[i].is_donated = True
        # Outputs without a handle are constants.
        results = [handles.get(o, output) for o, output in enumerate(self.description.outputs)]
        return self.step.result.joined(results)

    def _inputs(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the inputs of the job: the arguments, and what is computed from them."""
        given = [*leaves, *self._prepared(leaves)]
        if self.first_pass is not None:
            assert self.step.first_pass is not None
            read = self.first_pass.shard_args(*(given[i] for i in self.step.first_pass.reads))
            completed = zip(self.step.completed, self.first_pass(*read), strict=True)
            places = self.description.prepared
            given += [self._at(result, places[i - len(leaves)]) for i, result in completed]
        return given

    def _at(self, leaf: Any, wanted: Array) -> Any:
        """Return an array on the workers at a place."""
        return leaf if self._is_placed(leaf, wanted) else self.hosts.put(leaf, wanted)

    def _prepared(self, leaves: Sequence[Any]) -> list[jax.Array]:
        """Return the inputs that are computed from the arguments, in this process."""
        if self.step.preparation is None:
            return []
        return self._compute(*(jnp.asarray(leaves[i]) for i in self.step.preparation.reads))

    def _check(self, i: int, leaf: Any, wanted: Array) -> None:
        """Raise an error unless input `i` can be used as it is."""
        path = self.step.in_paths[i]
        if np.shape(leaf) != wanted.aval.shape:
            raise ValueError(
                f"{path} has shape {np.shape(leaf)}, expected {wanted.aval.shape}, with which the"
                " step was compiled"
            )
        if isinstance(leaf, DistributedArray):
            if not self._is_placed(leaf, wanted):
                raise ValueError(
                    f"{path} is on other devices than the plan says; pass what"
                    " executable.shard_args(...) returns"
                )
            leaf.check()
        elif i not in self.step.batch:
            raise ValueError(
                f"{path} is an array of this process, expected one on the workers; pass what"
                " executable.shard_args(...) returns"
            )

    def _is_placed(self, leaf: Any, wanted: Array) -> bool:
        """Return whether an argument is on the workers at its place."""
        return (
            isinstance(leaf, DistributedArray)
            and leaf.hosts is self.hosts
            and leaf.array.place == wanted.place
        )

    @override
    def sync(self) -> None:
        self.hosts.wait()

    # -- description

    @property
    def places(self) -> Sequence[Array]:
        """Type and place of each input."""
        return self.description.inputs

    def _device_ids(self, numbers: Sequence[int]) -> tuple[int, ...]:
        return tuple(numbers)

    @property
    @override
    def first_pass(self) -> "RemoteExecutable | None":
        return self._first_pass

    @property
    @override
    def present(self) -> Mapping[int, Device]:
        return {}

    @property
    @override
    def platform(self) -> str:
        return self.hosts.platform

    def _text(self, task: Task, status: report.TaskStatus) -> str:
        run = self.tasks[task]
        if status == "annotated":
            function = self.description.functions[run.task]
            return report.annotated(function.jitted, function.in_avals, self.hosts.platform)
        # Only the workers compile the program.
        devices = self.description.job.calls[run].devices
        return self.hosts.ask(devices, "program_text", self._number, run, status)[0]

    @override
    def get_stage_allocation_size(self) -> dict[Task, MemoryUse]:
        allocations: dict[str, MemoryUse] = {}
        for of_worker in self.hosts.ask(self.hosts.owner, "allocations", self._number):
            allocations |= of_worker
        return {task: allocations[run.task] for task, run in self.tasks.items()}

    # -- time

    def _dummy_inputs(self) -> list[Any]:
        """Return zeros: on the workers for states, in this process for batches."""
        return [
            np.zeros(array.shape, array.dtype)
            if i in self.step.batch and not array.impl
            else self.hosts.zeros(array)
            for i, array in enumerate(self.description.inputs)
        ]

    @override
    def execution_timeline(self) -> Timeline:
        """Run a step on zeros with every instruction timed, and return its timeline.

        Workers wait after each instruction but run concurrently, so tasks of different meshes
        overlap as they do in a step. A send lasts until the value may be fetched; the receiver's
        span lasts until it has fetched the value.
        """
        self.recorded()  # the first step is slower
        return merged(self.recorded(), self.program.meshes, self.memory)

    def recorded(self) -> list[list[ExecutedInstruction]]:
        """Return for each worker the instructions of a step on zeros, on this process's clock."""
        self.hosts.ask_all("record", [(self.plan.num_passes,)] * len(self.hosts.numbers))
        self(*self.step.arguments.joined(self._dummy_inputs()))
        recorded = self.hosts.recorded()
        return [_of_all_passes(row, self.planned) for row in recorded]


def _of_all_passes(
    recorded: Sequence[ExecutedInstruction], planned: PlannedStep
) -> list[ExecutedInstruction]:
    """Return recorded instructions as the program of all passes names them.

    Args:
        recorded: the instructions of a worker, in the order of execution on each mesh.
        planned: the step.
    """
    offsets: list[list[int]] = [[] for _ in planned.program.meshes]
    for offset, each in enumerate(_passes(planned)):
        for mesh, row in enumerate(each.program.instructions):
            offsets[mesh][:0] = [offset * len(planned.plan.stages)] * len(row)
    of_mesh = [iter(row) for row in offsets]
    renamed: list[ExecutedInstruction] = []
    for executed in recorded:
        instruction = of_first_pass(executed.instruction, next(of_mesh[executed.mesh]))
        renamed.append(replace(executed, instruction=instruction))
    return renamed


def _passes(planned: PlannedStep | None) -> Iterator[PlannedStep]:
    """Yield the passes of a step, the last one first."""
    while planned is not None:
        yield planned
        planned = planned.first_pass
