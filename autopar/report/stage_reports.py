"""Reports about pipelines: each stage is viewed as a step with a plan of its own."""

from dataclasses import dataclass

from autopar.control_flow import MARKERS, repeats
from autopar.equation_work import array_bytes, kernel_of
from autopar.graph import aval_of
from autopar.pipeline.partition import Task
from autopar.pipeline.planned import PlannedPipeline
from autopar.plan import Plan
from autopar.planned import Planned, PlannedStep


@dataclass(frozen=True, slots=True)
class TaskInfo:
    """What one task does for one microbatch, on all devices of its stage together.

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


def stage_infos(planned: PlannedPipeline) -> list[StageInfo]:
    """Every stage of a pipeline."""
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
    if planned.plan.pipeline is None:
        return planned
    one = stage_plan(planned.plan, stage)
    known = getattr(planned, "planned", None)  # an executable has cut the step already
    whole = known if isinstance(known, PlannedPipeline) else PlannedPipeline(planned.step, planned.plan)
    step = whole.graphs[stage or 0].step
    return PlannedStep(step, one.model_copy(update={"fingerprint": step.fingerprint}))


def stage_plan(plan: Plan, stage: int | None) -> Plan:
    """One stage of a pipelined plan as a plan; a plan without a pipeline as it is. Raises ValueError as `single_stage` does."""
    if plan.pipeline is None:
        return plan
    last = len(plan.stages) - 1
    if stage is None or not 0 <= stage <= last:
        given = "no stage is given" if stage is None else f"stage {stage} is given"
        raise ValueError(
            f"{given}, but the plan is a pipeline and its stages are looked at one by one: give stage=0 to {last}"
        )
    return plan.model_copy(update={"stages": (plan.stages[stage],), "pipeline": None})


def _task_info(planned: PlannedPipeline, task: Task) -> TaskInfo:
    eqns = [eqn for _, eqn in planned.cut.eqns[task]]
    flops = num_bytes = 0.0
    for eqn, times in zip(eqns, repeats(eqns), strict=True):
        if eqn.primitive not in MARKERS and eqn.outvars:
            avals = [aval_of(atom) for atom in (*eqn.invars, *eqn.outvars)]
            moved = sum(array_bytes(aval.shape, aval.dtype) for aval in avals)
            flops += times * kernel_of(eqn, [aval_of(a).shape for a in eqn.invars], moved).flops
            num_bytes += times * moved
    return TaskInfo(task.name, flops, num_bytes)
