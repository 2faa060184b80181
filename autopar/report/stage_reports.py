"""Reports about stages: each is viewed as a step with a plan of its own."""

from dataclasses import dataclass

from autopar.ir.array_sizes import array_bytes
from autopar.ir.control_flow import MARKERS, repeats
from autopar.ir.graph import aval_of
from autopar.lowering.planned import PlannedStep
from autopar.pipeline.partition import Task
from autopar.primitives.equation_work import kernel_of


@dataclass(frozen=True, slots=True)
class TaskInfo:
    """The work of one run of a task, on all devices of its stage together: that of one microbatch, or of the whole step.

    Attributes:
        name: as in the program: `0F`, `1B`, `1U0`.
        flops: floating point operations.
        bytes: bytes of what its equations read and make, nothing fused.
    """

    name: str
    flops: float
    bytes: float


@dataclass(frozen=True, slots=True)
class StageInfo:
    """A stage and what runs on it.

    Attributes:
        layers: the layers that it consists of.
        devices: numbers of its devices in the cluster; `mesh_shape` is how they are arranged.
    """

    stage: int
    layers: tuple[int, ...]
    devices: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    tasks: tuple[TaskInfo, ...]


def stage_infos(planned: PlannedStep) -> list[StageInfo]:
    """Return what runs on every stage."""
    return [
        StageInfo(
            stage=number,
            layers=stage.layers,
            devices=stage.devices,
            mesh_shape=stage.mesh_shape,
            tasks=tuple(
                _task_info(planned, task)
                for task in planned.graphs[number].tasks
                if task.name in planned.tasks
            ),
        )
        for number, stage in enumerate(planned.plan.stages)
    ]


def _task_info(planned: PlannedStep, task: Task) -> TaskInfo:
    eqns = [eqn for _, eqn in planned.partition.eqns[task]]
    micro = planned.step.microbatching if task.phase == "S" else None
    in_microbatches = {number for number, _ in micro.body} if micro else set()
    flops = num_bytes = 0.0
    for (number, eqn), repeated in zip(planned.partition.eqns[task], repeats(eqns), strict=True):
        times = repeated * (planned.step.num_micro_batches if number in in_microbatches else 1)
        if eqn.primitive not in MARKERS and eqn.outvars:
            avals = [aval_of(atom) for atom in (*eqn.invars, *eqn.outvars)]
            moved = sum(array_bytes(aval.shape, aval.dtype) for aval in avals)
            flops += times * kernel_of(eqn, [aval_of(a).shape for a in eqn.invars], moved).flops
            num_bytes += times * moved
    return TaskInfo(task.name, flops, num_bytes)
