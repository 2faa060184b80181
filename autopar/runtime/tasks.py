"""The tasks of a planned step compiled for the devices that are here."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from weakref import WeakValueDictionary

import jax
from jax.sharding import Mesh

from autopar.lowering.compilation import lower_stage
from autopar.lowering.planned import PlannedStep
from autopar.lowering.stage_lowering import TaskFunction
from autopar.pipeline.partition import WHOLE_STEP_TASK, Task
from autopar.progress import log_progress, ranges


@dataclass(frozen=True, slots=True)
class CompiledTask:
    """A task as JAX has it, before and after compilation."""

    function: TaskFunction
    compiled: jax.stages.Compiled


def compile_tasks(
    planned: PlannedStep, meshes: Sequence[Mesh], donated: frozenset[int] = frozenset()
) -> dict[Task, CompiledTask]:
    """Compile the tasks of every stage.

    Those of one mesh that are the same program share an executable, as identical layers do, and the same stages under another
    schedule.

    Args:
        meshes: the devices of each stage.
        donated: numbers of the step's inputs whose memory it may reuse.
    """
    found: dict[Task, CompiledTask] = {}
    for number, (stage, mesh) in enumerate(zip(planned.plan.stages, meshes, strict=True)):
        start = time.perf_counter()
        functions = lower_stage(planned, number, mesh, donated)
        for function in functions:
            found[function.task] = CompiledTask(function, _compiled(function, mesh))
        layers = f"layers {ranges(stage.layers)} on " if stage.layers else ""
        log_progress(
            f"stage {number}: {layers}devices {ranges(stage.devices)}, mesh"
            f" {' x '.join(map(str, stage.mesh_shape))}; {len(functions)} tasks compiled in {time.perf_counter() - start:.2f} s"
        )
    return found


_known: WeakValueDictionary[tuple[Mesh, str], jax.stages.Compiled] = WeakValueDictionary()
"""Executables that are in use, by what they run."""


def _compiled(function: TaskFunction, mesh: Mesh) -> jax.stages.Compiled:
    lowered = function.jitted.lower(*function.in_avals)
    if function.task == WHOLE_STEP_TASK:  # there is no other, and its text may be long
        return lowered.compile()
    key = mesh, sha256(lowered.as_text().encode()).hexdigest()
    compiled = _known.get(key)
    if compiled is None:
        _known[key] = compiled = lowered.compile()
    return compiled
