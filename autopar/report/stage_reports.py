"""Reports about stages: each is viewed as a step with a plan of its own."""

from dataclasses import dataclass

from autopar.ir.control_flow import MARKERS, repeats
from autopar.ir.equation_work import array_bytes, kernel_of
from autopar.ir.graph import aval_of
from autopar.lowering.planned import Planned, PlannedStep, as_planned
from autopar.pipeline.partition import Task
from autopar.plan import WHOLE_STEP, Plan


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
                _task_info(planned, task) for task in planned.graphs[number].tasks if task.name in planned.tasks
            ),
        )
        for number, stage in enumerate(planned.plan.stages)
    ]


def single_stage(planned: Planned, stage: int | None) -> Planned:
    """What is asked to be inspected: the plan itself, or one stage of a pipeline.

    Raises:
        ValueError: the plan is a pipeline and `stage` is none of its stages.
    """
    if planned.plan.schedule.is_whole_step:
        return planned
    one = stage_plan(planned.plan, stage)
    step = as_planned(planned).graphs[stage or 0].step
    return PlannedStep(step, one.model_copy(update={"fingerprint": step.fingerprint}))


def stage_plan(plan: Plan, stage: int | None) -> Plan:
    """Return one stage of a plan as a plan. Raises ValueError as `single_stage` does."""
    if plan.schedule.is_whole_step:
        return plan
    last = len(plan.stages) - 1
    if stage is None or not 0 <= stage <= last:
        given = "no stage is given" if stage is None else f"stage {stage} is given"
        raise ValueError(
            f"{given}, but the plan is a pipeline and its stages are looked at one by one: give stage=0 to {last}"
        )
    return plan.model_copy(update={"stages": (plan.stages[stage],), "schedule": WHOLE_STEP})


def _task_info(planned: PlannedStep, task: Task) -> TaskInfo:
    eqns = [eqn for _, eqn in planned.cut.eqns[task]]
    micro = planned.step.microbatching if task.phase == "S" else None
    in_microbatches = {number for number, _ in micro.body} if micro else set()
    flops = num_bytes = 0.0
    for (number, eqn), repeated in zip(planned.cut.eqns[task], repeats(eqns), strict=True):
        times = repeated * (planned.step.num_micro_batches if number in in_microbatches else 1)
        if eqn.primitive not in MARKERS and eqn.outvars:
            avals = [aval_of(atom) for atom in (*eqn.invars, *eqn.outvars)]
            moved = sum(array_bytes(aval.shape, aval.dtype) for aval in avals)
            flops += times * kernel_of(eqn, [aval_of(a).shape for a in eqn.invars], moved).flops
            num_bytes += times * moved
    return TaskInfo(task.name, flops, num_bytes)
