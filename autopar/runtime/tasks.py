"""The tasks of a pipeline compiled for the devices that are here."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import jax
from jax.sharding import Mesh

from autopar.pipeline.cut import Task
from autopar.pipeline.lowering import TaskFunction, lower_stage
from autopar.pipeline.planned import PlannedPipeline
from autopar.progress import ranges, tell


@dataclass(frozen=True, slots=True)
class CompiledTask:
    """A task as JAX has it, before and after compilation."""

    function: TaskFunction
    compiled: jax.stages.Compiled


def compile_tasks(
    planned: PlannedPipeline, meshes: Sequence[Mesh], donated: frozenset[int] = frozenset()
) -> dict[Task, CompiledTask]:
    """The tasks of every stage; those of one mesh that are the same program, as identical layers are, share an executable.

    Args:
        meshes: the devices of each stage.
        donated: numbers of the step's inputs whose memory it may reuse.
    """
    known: dict[tuple[Mesh, str], jax.stages.Compiled] = {}
    found: dict[Task, CompiledTask] = {}
    for number, (stage, mesh) in enumerate(zip(planned.plan.stages, meshes, strict=True)):
        start = time.perf_counter()
        functions = lower_stage(planned, number, mesh, donated)
        for function in functions:
            program = function.jitted.lower(*function.in_avals)
            key = mesh, program.as_text()
            if key not in known:
                known[key] = program.compile()
            found[function.task] = CompiledTask(function, known[key])
        tell(
            f"stage {number}: layers {ranges(stage.layers)} on devices {ranges(stage.devices)}, mesh"
            f" {' x '.join(map(str, stage.mesh_shape))}; {len(functions)} tasks compiled in {time.perf_counter() - start:.2f} s"
        )
    return found
