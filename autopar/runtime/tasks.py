"""Compilation of a planned step's tasks for devices of this process."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from weakref import WeakValueDictionary

import jax
from jax.sharding import Mesh

from autopar.lowering.compilation import lower_stage
from autopar.lowering.memory_limit import compile_on
from autopar.lowering.planned import PlannedStep
from autopar.lowering.stage_lowering import TaskFunction
from autopar.pipeline.partition import WHOLE_STEP_TASK, Task
from autopar.progress import log_progress, ranges


@dataclass(frozen=True, slots=True)
class CompiledTask:
    """A task before and after compilation.

    Attributes:
        function: the task as a JAX function.
        compiled: its executable.
    """

    function: TaskFunction
    compiled: jax.stages.Compiled


def compile_tasks(
    planned: PlannedStep, meshes: Sequence[Mesh], donated: frozenset[int]
) -> dict[Task, CompiledTask]:
    """Compile the tasks of every stage.

    Equal programs for the same mesh share an executable: identical layers, or the same stages
    under another schedule.

    Args:
        planned: the traced step and its plan.
        meshes: for each stage its devices.
        donated: numbers of the step's inputs whose memory it may reuse.
    """
    tasks: dict[Task, CompiledTask] = {}
    for number, (stage, mesh) in enumerate(zip(planned.plan.stages, meshes, strict=True)):
        start = time.perf_counter()
        functions = lower_stage(planned, number, mesh, donated)
        for function in functions:
            compiled = _compiled(function, mesh, planned.program_budget)
            tasks[function.task] = CompiledTask(function, compiled)
        layers = f"layers {ranges(stage.layers)} on " if stage.layers else ""
        log_progress(
            f"stage {number}: {layers}devices {ranges(stage.devices)}, mesh"
            f" {' x '.join(map(str, stage.mesh_shape))}; {len(functions)} tasks compiled in"
            f" {time.perf_counter() - start:.2f} s"
        )
    return tasks


_in_use: WeakValueDictionary[tuple[Mesh, str], jax.stages.Compiled] = WeakValueDictionary()
"""Executables that are in use, by mesh and SHA-256 of the program's text."""


def _compiled(
    function: TaskFunction, mesh: Mesh, memory_budget: float | None
) -> jax.stages.Compiled:
    lowered = function.jitted.lower(*function.in_avals)
    if function.task == WHOLE_STEP_TASK:
        # No other task can share the executable, and hashing the long text takes time.
        return compile_on(lowered, memory_budget, mesh.devices.flat[0])
    key = mesh, sha256(lowered.as_text().encode()).hexdigest()
    compiled = _in_use.get(key)
    if compiled is None:
        _in_use[key] = compiled = lowered.compile()
    return compiled
