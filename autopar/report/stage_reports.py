"""The stages of a plan, with the FLOP and bytes of their tasks."""

from dataclasses import dataclass

from autopar.ir.array_sizes import array_bytes
from autopar.ir.control_flow import MARKERS, repeats
from autopar.ir.graph import aval_of
from autopar.lowering.planned import PlannedStep
from autopar.pipeline.partition import Task
from autopar.primitives import kernel_of


@dataclass(frozen=True, slots=True)
class TaskInfo:
    """The work of one run of a task, for a microbatch or a whole step, summed over all devices.

    Attributes:
        name: its name in the program: `0F`, `1B`, `1U0`.
        flops: FLOP.
        bytes: bytes that its equations read and write, without fusion.
    """

    name: str
    flops: float
    bytes: float


@dataclass(frozen=True, slots=True)
class StageInfo:
    """A stage with its tasks.

    Attributes:
        stage: number of the stage.
        layers: numbers of its layers; empty for a whole step.
        devices: numbers of its devices in the cluster.
        mesh_shape: shape of the logical mesh of these devices.
        tasks: its tasks in the program.
    """

    stage: int
    layers: tuple[int, ...]
    devices: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    tasks: tuple[TaskInfo, ...]


def stage_infos(planned: PlannedStep) -> list[StageInfo]:
    """Return every stage of a plan with its tasks."""
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
    numbered = planned.partition.eqns[task]
    loop_counts = repeats([eqn for _, eqn in numbered])
    # a whole step runs the equations of its microbatches once for each
    micro = planned.step.microbatching if task.phase == "S" else None
    in_microbatches = {number for number, _ in micro.body} if micro else set()
    flops = 0.0
    num_bytes = 0.0
    for (number, eqn), loop_count in zip(numbered, loop_counts, strict=True):
        if eqn.primitive in MARKERS or not eqn.outvars:
            continue
        runs = loop_count * (planned.step.num_micro_batches if number in in_microbatches else 1)
        avals = [aval_of(atom) for atom in (*eqn.invars, *eqn.outvars)]
        eqn_bytes = sum(array_bytes(aval.shape, aval.dtype) for aval in avals)
        flops += runs * kernel_of(eqn, eqn_bytes).flops
        num_bytes += runs * eqn_bytes
    return TaskInfo(task.name, flops, num_bytes)
