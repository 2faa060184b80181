"""Run planned steps operation by operation, without compiling them.

Operations of equal shapes are compiled once for all steps, which makes thousands of random steps
affordable.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from autopar.ir.spec import partition_spec
from autopar.lowering.compilation import lower_stage
from autopar.lowering.planned import PlannedStep
from autopar.lowering.stage_lowering import TaskFunction
from autopar.pipeline.partition import Task
from autopar.runtime.tasks import CompiledTask


def eager_tasks(
    planned: PlannedStep, meshes: Sequence[Mesh], donated: frozenset[int] = frozenset()
) -> dict[Task, CompiledTask]:
    """Return tasks that run operation by operation.

    It takes the place of `autopar.runtime.tasks.compile_tasks`.
    """
    tasks: dict[Task, CompiledTask] = {}
    for number, mesh in enumerate(meshes):
        values = planned.values[number]
        for function in lower_stage(planned, number, mesh, donated):
            shardings = [
                NamedSharding(mesh, partition_spec(values.spec(var)))
                for var in (*function.results, *function.sums)
            ]
            eager: Any = _Eager(function, shardings)
            tasks[function.task] = CompiledTask(function, eager)
    return tasks


class _Eager:
    """Stands in for `jax.stages.Compiled`."""

    def __init__(self, function: TaskFunction, shardings: Sequence[NamedSharding]) -> None:
        self._function = function
        self._shardings = shardings

    def __call__(self, *operands: Any) -> list[jax.Array]:
        with jax.disable_jit():
            results = self._function.jitted(*operands)
        return jax.device_put(list(results), self._shardings)
