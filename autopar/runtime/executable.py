"""The executable of a planned step: what `parallelize` compiles, wherever it runs."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack

import jax
import numpy as np

from autopar import report
from autopar.checks import checked, integer
from autopar.ir.graph import aval_of
from autopar.ir.step_graph import StepGraph
from autopar.lowering.job import Array
from autopar.lowering.job_description import JobDescription, mesh_of
from autopar.lowering.pipeline_memory import MeshMemory
from autopar.lowering.planned import PlannedStep
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
        description: its job.
        tasks: what its stages run, by task.
        in_shardings, out_shardings: pytrees like the arguments and the result.
        plan_seconds: seconds of tracing and planning.
        compile_seconds: seconds of compiling.
    """

    planned: PlannedStep
    description: JobDescription
    tasks: Mapping[Task, Any]
    in_shardings: Any
    out_shardings: Any
    plan_seconds: float
    compile_seconds: float

    @property
    def step(self) -> StepGraph:
        """What was traced."""
        return self.planned.step

    @property
    def plan(self) -> Plan:
        """How it runs."""
        return self.planned.plan

    @property
    def program(self) -> Program:
        """The plan as instructions."""
        return self.planned.program

    # -- running

    @abstractmethod
    def shard_args(self, *args: Any) -> tuple[Any, ...]:
        """Return `args` on the devices, as the plan wants them; what is in place already is not copied."""

    @abstractmethod
    def __call__(self, *args: Any) -> Any:
        """Run the step on arguments that are where the plan wants them.

        Raises:
            ValueError: they are elsewhere, or of another structure.
        """

    @abstractmethod
    def sync(self) -> None:
        """Wait until the devices have nothing left to do."""

    # -- what it is

    @abstractmethod
    def _device_ids(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """Return what `PlacementSpec` calls the devices that have these numbers in the plan."""

    def get_input_placement_specs(self) -> Any:
        """Return a tuple like the arguments, with a `PlacementSpec` for every array."""
        avals = jax.tree.leaves(self.step.in_avals)
        return jax.tree.unflatten(
            self.step.in_tree, map(self._placement, avals, self.description.inputs)
        )

    def get_output_placement_specs(self) -> Any:
        """Return a pytree like the result, with a `PlacementSpec` for every array."""
        atoms = self.step.jaxpr.outvars
        made = [
            self._placement(
                jax.ShapeDtypeStruct(each.aval.shape, aval.dtype, weak_type=aval.weak_type), each
            )
            for each, aval in zip(self._output_arrays, map(aval_of, atoms), strict=True)
        ]
        return jax.tree.unflatten(self.step.out_tree, made)

    @cached_property
    def _output_arrays(self) -> list[Array]:
        """What and where the outputs are; constants count as copies on the first mesh."""
        mesh = mesh_of(self.plan.stages[0])
        return [
            each
            if isinstance(each, Array)
            else Array.of(f"out{o}", jax.typeof(each), mesh, ((),) * np.ndim(each))
            for o, each in enumerate(self.description.outputs)
        ]

    def _placement(self, aval: Any, array: Array) -> report.PlacementSpec:
        mesh = array.place.mesh
        number = self.description.job.meshes.index(mesh.devices)
        return report.placed(aval, array.sharding, number, self._device_ids(mesh.devices))

    def get_stage_execution_info(self) -> list[report.StageInfo]:
        """Return for every stage its layers, devices and tasks, with the work of each."""
        return report.stage_infos(self.planned)

    @property
    @abstractmethod
    def platform(self) -> str:
        """The platform of its devices, "cpu" or "gpu"."""

    @abstractmethod
    def _text(self, task: Task, status: report.TaskStatus) -> str:
        """Return the program of a task."""

    def get_hlo_text(self, status: report.Status = "optimized", stage: int | None = None) -> str:
        """Return the program at one stage of its compilation.

        Args:
            status: "traced": the step as it was written; "annotated" with the plan's shardings, "partitioned" for one device, or
                "optimized" as it runs: the program of each task, under a line `// task 0F` where there are several.
            stage: only those of one stage.

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
        """Write plan, reasons, placements, reshardings, programs and memory to `folder`; see `autopar.report.DEBUG_FILES`."""
        return report.dump_debug_info(self, folder, name)

    # -- what it needs

    @abstractmethod
    def get_stage_allocation_size(self) -> dict[Task, MemoryUse]:
        """Return the bytes on one device for each task, by the compiler's buffer assignment."""

    @property
    def memory(self) -> tuple[MemoryUse, ...]:
        """For each mesh the bytes on one device when it is fullest, by the compiler's buffer assignment for each task."""
        memory = MeshMemory(self.planned)
        for task, used in self.get_stage_allocation_size().items():
            memory.add_task(task, used)
        return memory.peaks(memory.levels(self.program))

    def get_total_allocation_size(self) -> int:
        """Return the bytes that the fullest device needs to run the step."""
        return max(used.total for used in self.memory)

    # -- how long it takes

    def simulate(
        self,
        cluster: AnyCluster | str | Path,
        **options: Unpack[ProgramOptions],
    ) -> Timeline:
        """Return the timeline of a step on a cluster that need not exist; see `autopar.simulate`."""
        cluster = any_cluster(cluster)
        return simulate_program(program_of(self, cluster, **options), cluster)

    def predict(
        self,
        cluster: AnyCluster | str | Path,
        *,
        tokens: int = 0,
        **options: Unpack[ProgramOptions],
    ) -> Prediction:
        """Predict the time and memory of a step on a cluster that need not exist; see `autopar.predict`."""
        cluster, tokens = any_cluster(cluster), checked("tokens", tokens, integer(0))
        timeline = self.simulate(cluster, **options)
        return prediction_of(timeline, cluster, tokens=tokens)

    @abstractmethod
    def _dummy_inputs(self) -> list[Any]:
        """Return zeros for every input, where the step takes them."""

    def profile_with_dummy_inputs(
        self, warmup: int = 1, number: int = 3, repeat: int = 3
    ) -> np.ndarray:
        """Return the seconds of a step on zeros, `repeat` times the mean over `number` steps; shape (repeat,)."""
        leaves = self._dummy_inputs()

        def run() -> None:
            results = jax.tree.leaves(self(*jax.tree.unflatten(self.step.in_tree, leaves)))
            for output, i in self.step.carried.items():
                leaves[i] = results[output]

        return benchmark_func(run, self.sync, warmup, repeat, number)

    @abstractmethod
    def execution_timeline(self) -> Timeline:
        """Run a step on zeros with every instruction timed, and return it in the form of a simulated step."""

    def dump_stage_execution_trace(self, file: str | Path) -> Timeline:
        """Write `execution_timeline` to a file for Perfetto, and return it."""
        timeline = self.execution_timeline()
        timeline.save_chrome_trace(file)
        return timeline
