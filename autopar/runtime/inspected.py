"""What there is to know about a pipeline that has been compiled, wherever it runs."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autopar import report
from autopar.pipeline.partition import Task
from autopar.pipeline.pipeline_memory import MeshMemory
from autopar.pipeline.planned import PlannedPipeline
from autopar.plan import Plan
from autopar.trace import StepGraph
from simulator.memory import MemoryUse
from simulator.program import Program


class InspectedPipeline(ABC):
    """A pipeline whose tasks can be asked for their programs and their memory.

    Attributes:
        tasks: what the stages run, by task.
    """

    planned: PlannedPipeline
    step: StepGraph
    plan: Plan
    program: Program
    tasks: Mapping[Task, Any]

    @abstractmethod
    def get_stage_allocation_size(self) -> dict[Task, MemoryUse]:
        """Bytes on one device for each task, by the compiler's buffer assignment."""

    @abstractmethod
    def _text(self, task: Task, status: report.Status) -> str:
        """The program of a task; a status that is none of a task's is not asked for."""

    @abstractmethod
    def get_input_placement_specs(self) -> Any:
        """A tuple like the arguments, with a `PlacementSpec` for every array."""

    @abstractmethod
    def get_output_placement_specs(self) -> Any:
        """A pytree like the result, with a `PlacementSpec` for every array."""

    @property
    def memory(self) -> tuple[MemoryUse, ...]:
        """For each mesh the bytes on one device when it is fullest, by the compiler's buffer assignment for each task."""
        memory = MeshMemory(self.planned)
        for task, used in self.get_stage_allocation_size().items():
            memory.add_task(task, used)
        return memory.peaks(memory.levels(self.program))

    def get_total_allocation_size(self) -> int:
        """Bytes that the fullest device needs to run the step."""
        return max(used.total for used in self.memory)

    def get_stage_execution_info(self) -> list[report.StageInfo]:
        """For every stage its layers, devices and tasks, with the work of each."""
        return report.stage_infos(self.planned)

    def get_hlo_text(self, status: report.Status = "optimized", stage: int | None = None) -> str:
        """The programs of the tasks, each under a line `// task 0F`: "annotated", "partitioned" or "optimized".

        Args:
            stage: only those of one stage.

        Raises:
            ValueError: there is no such stage or status.
        """
        last = len(self.plan.stages) - 1
        if stage is not None and not 0 <= stage <= last:
            raise ValueError(f"there is no stage {stage}, expected 0 to {last}")
        if status not in ("annotated", "partitioned", "optimized"):
            raise ValueError(
                f"status {status!r} for a pipeline, expected 'annotated', 'partitioned' or 'optimized'; its tasks are made"
                " from the traced step"
            )
        return "\n".join(
            f"// task {task.name}\n{self._text(task, status)}"
            for task in self.tasks
            if stage in (None, task.stage) and (self.planned.cut.eqns[task] or self.planned.cut.totals.get(task))
        )

    def dump_debug_info(self, folder: str | Path, name: str | None = None) -> tuple[Path, ...]:
        """Write plan, program, placements, the programs of every stage and their memory to `folder`."""
        return report.dump_pipeline(self, folder, name)
