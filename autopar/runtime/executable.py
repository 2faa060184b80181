"""The executable of a planned step, which `parallelize` compiles."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack

import jax
import numpy as np

from autopar import report
from autopar.checks import checked, integer
from autopar.devices import Device
from autopar.ir.graph import aval_of
from autopar.ir.step_graph import StepGraph
from autopar.lowering.job import Array
from autopar.lowering.job_description import JobDescription, mesh_of
from autopar.lowering.pass_programs import in_two_passes, peaks_of_passes
from autopar.lowering.planned import PlannedStep
from autopar.lowering.program_memory import MeshMemory
from autopar.pipeline.partition import Task
from autopar.plan import Plan
from autopar.planning.method_planning import any_cluster
from autopar.prediction.predicting import ProgramOptions, program_of
from autopar.util import benchmark_func
from simulator.engine.breakdown import prediction_of
from simulator.engine.prediction import Prediction
from simulator.engine.simulation import simulate as simulate_program
from simulator.engine.timeline import Timeline
from simulator.hardware.heterogeneous import AnyCluster
from simulator.memory import MemoryUse
from simulator.program import Program


class Executable(ABC):
    """One step, planned and compiled for arguments of one structure, shape and dtype.

    Attributes:
        planned: the traced step and its plan.
        description: the step's job, and the types and places of its inputs and outputs.
        tasks: the compiled form of each task of a stage.
        in_shardings: a pytree like the arguments with their shardings. An array in pieces has a
            tuple of shardings, one per piece.
        out_shardings: a pytree like the result with its shardings.
        plan_seconds: seconds of tracing and planning.
        compile_seconds: seconds of compiling.
        hosts: the hosts of a Ray cluster that run the step; None for this process.
    """

    planned: PlannedStep
    description: JobDescription
    tasks: Mapping[Task, Any]
    in_shardings: Any
    out_shardings: Any
    plan_seconds: float
    compile_seconds: float
    hosts: Any = None

    @property
    def placed_by(self) -> "Executable":
        """The step whose plan places the values: this one."""
        return self

    @property
    @abstractmethod
    def first_pass(self) -> "Executable | None":
        """The pass over the microbatches that each call runs first; None if there is none.

        Its tasks and their programs are its own.
        """

    @property
    @abstractmethod
    def present(self) -> Mapping[int, Device]:
        """The devices of this process that run the step, by their number in the plan."""

    @property
    def step(self) -> StepGraph:
        """The traced step."""
        return self.planned.step

    @property
    def plan(self) -> Plan:
        """The plan that the step runs by."""
        return self.planned.plan

    @property
    def program(self) -> Program:
        """The plan as instructions for each mesh, with the instructions of earlier passes."""
        if self.first_pass is None:
            return self.planned.program
        return in_two_passes(self.planned, self.first_pass.program, self.planned.program)

    # -- running

    @abstractmethod
    def shard_args(self, *args: Any) -> tuple[Any, ...]:
        """Return `args` on the devices, sharded as the plan says; placed arrays are not copied."""

    @abstractmethod
    def __call__(self, *args: Any) -> Any:
        """Run the step on arguments that are sharded as the plan says.

        Raises:
            ValueError: an argument is elsewhere, or the arguments have another structure.
        """

    @abstractmethod
    def sync(self) -> None:
        """Wait until the devices are idle."""

    # -- placement

    @abstractmethod
    def _device_ids(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """Return the ids in `PlacementSpec` of devices that the plan numbers so."""

    def get_input_placement_specs(self) -> Any:
        """Return a tuple like the arguments, with a `PlacementSpec` for every array.

        An array in pieces on several meshes has a `JoinedPlacement`.
        """
        avals = jax.tree.leaves(self.step.in_avals)
        specs = list(map(self._placement, avals, self.description.inputs))
        return self.step.arguments.joined(specs, report.JoinedPlacement)

    def get_output_placement_specs(self) -> Any:
        """Return a pytree like the result, with a `PlacementSpec` for every array."""
        specs = []
        for array, atom in zip(self._output_arrays, self.step.jaxpr.outvars, strict=True):
            aval = aval_of(atom)
            shape = array.aval.shape
            struct = jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=aval.weak_type)
            specs.append(self._placement(struct, array))
        return self.step.result.joined(specs, report.JoinedPlacement)

    @cached_property
    def _output_arrays(self) -> list[Array]:
        """Type and place of each output; constants are replicated over the first mesh."""
        mesh = mesh_of(self.plan.stages[0])
        return [
            output
            if isinstance(output, Array)
            else Array.of(f"out{o}", jax.typeof(output), mesh, ((),) * np.ndim(output))
            for o, output in enumerate(self.description.outputs)
        ]

    def _placement(self, aval: Any, array: Array) -> report.PlacementSpec:
        mesh = array.place.mesh
        number = self.description.job.meshes.index(mesh.devices)
        return report.placed(aval, array.sharding, number, self._device_ids(mesh.devices))

    # -- description

    def get_stage_execution_info(self) -> list[report.StageInfo]:
        """Return for every stage its layers, devices and tasks, with the work of each."""
        return report.stage_infos(self.planned)

    @property
    @abstractmethod
    def platform(self) -> str:
        """The platform of the devices: "cpu", or "gpu" in this process and "cuda" elsewhere."""

    @abstractmethod
    def _text(self, task: Task, status: report.TaskStatus) -> str:
        """Return the program of a task."""

    def get_hlo_text(self, status: report.Status = "optimized", stage: int | None = None) -> str:
        """Return the program after one stage of its compilation.

        Args:
            status: "traced" for the step as the user wrote it, "annotated" with the plan's
                shardings, "partitioned" for one device, or "optimized" as it runs. Except for
                "traced", the text has a line `// task 0F` before the program of each task, if
                there are several tasks.
            stage: return only the tasks of this stage.

        Raises:
            ValueError: there is no such stage or status.
        """
        last = len(self.plan.stages) - 1
        if stage is not None and not 0 <= stage <= last:
            raise ValueError(f"there is no stage {stage}, expected 0 to {last}")
        match status:
            case "traced":
                return report.traced(self, self.platform)
            case "annotated" | "partitioned" | "optimized":
                pass
            case _:
                raise report.unknown_status(status)
        partition = self.planned.partition
        if partition.is_whole_step:
            (task,) = self.tasks
            return self._text(task, status)
        return "\n".join(
            f"// task {task.name}\n{self._text(task, status)}"
            for task in self.tasks
            if stage in (None, task.stage) and (partition.eqns[task] or partition.totals.get(task))
        )

    def dump_debug_info(self, folder: str | Path, name: str | None = None) -> tuple[Path, ...]:
        """Write plan, reasons, placements, reshardings, programs and memory to files.

        Args:
            folder: the directory of the files.
            name: the first part of their names; by default the step's name.

        Returns:
            The paths of the files, which `autopar.report.dump_debug_info` describes.
        """
        return report.dump_debug_info(self, folder, name)

    # -- memory

    @abstractmethod
    def get_stage_allocation_size(self) -> dict[Task, MemoryUse]:
        """Return for each task its bytes on one device, by XLA's buffer assignment."""

    @property
    def memory(self) -> tuple[MemoryUse, ...]:
        """For each mesh its peak bytes on one device, by XLA's buffer assignment of each task."""
        memory = MeshMemory(self.planned)
        for task, used in self.get_stage_allocation_size().items():
            memory.add_task(task, used)
        peaks = memory.peaks(memory.levels(self.planned.program))
        if self.first_pass is None:
            return peaks
        return peaks_of_passes(self.planned, self.first_pass.memory, peaks)

    def get_total_allocation_size(self) -> int:
        """Return the bytes that a step needs on the device that needs most."""
        return max(used.total for used in self.memory)

    # -- time

    def simulate(
        self,
        cluster: AnyCluster | str | Path,
        **options: Unpack[ProgramOptions],
    ) -> Timeline:
        """Return the timeline of a step on a cluster that need not exist.

        Args:
            cluster: the cluster: a description, the name of a shipped one, or the path of a file.
            **options: `donate_argnums` and `fidelity` of `autopar.compile_step`.
        """
        cluster = any_cluster(cluster)
        return simulate_program(program_of(self, cluster, **options), cluster)

    def predict(
        self,
        cluster: AnyCluster | str | Path,
        *,
        tokens: int = 0,
        **options: Unpack[ProgramOptions],
    ) -> Prediction:
        """Predict the time and memory of a step on a cluster that need not exist.

        Args:
            cluster: the cluster: a description, the name of a shipped one, or the path of a file.
            tokens: number of tokens in the batch, for the throughput.
            **options: `donate_argnums` and `fidelity` of `autopar.compile_step`.
        """
        cluster = any_cluster(cluster)
        tokens = checked("tokens", tokens, integer(0))
        timeline = self.simulate(cluster, **options)
        return prediction_of(timeline, cluster, tokens=tokens)

    @abstractmethod
    def _dummy_inputs(self) -> list[Any]:
        """Return zeros for every input, where the step reads them."""

    def profile_with_dummy_inputs(
        self, warmup: int = 1, number: int = 3, repeat: int = 3
    ) -> np.ndarray:
        """Measure the seconds of a step on zeros.

        Args:
            warmup: number of steps before the first measurement.
            number: number of steps in a measurement.
            repeat: number of measurements.

        Returns:
            Array of shape (repeat,): for each measurement the mean seconds of a step.
        """
        leaves = self._dummy_inputs()

        def run() -> None:
            result = jax.tree.leaves(self(*self.step.arguments.joined(leaves)))
            results = self.step.result.pieces(result)
            for output, i in self.step.carried.items():
                leaves[i] = results[output]

        return benchmark_func(run, self.sync, warmup, repeat, number)

    @abstractmethod
    def execution_timeline(self) -> Timeline:
        """Run a step on zeros with every instruction timed, and return its timeline."""

    def dump_stage_execution_trace(self, file: str | Path) -> Timeline:
        """Write `execution_timeline` to a file for Perfetto, and return it."""
        timeline = self.execution_timeline()
        timeline.save_chrome_trace(file)
        return timeline
