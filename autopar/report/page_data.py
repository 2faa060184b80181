"""The data of a report page as JSON values: what plans decide, and what is predicted of them.

Every number on the page is one of these, in seconds and bytes. They equal those of `Plan`,
`Prediction` and `Timeline`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any

from autopar.ir.spec import partition_spec
from autopar.lowering.placement_specs import array_text
from autopar.plan import Plan
from autopar.plan_stages import Stage, spec_text
from autopar.progress import ranges
from autopar.report.classify import classify
from autopar.report.program_work import collective_rows, kernel_rows
from autopar.report.timeline_rows import memory_rows, timeline_rows
from simulator.engine.prediction import PARTS, Prediction
from simulator.hardware.heterogeneous import AnyCluster
from simulator.program import Program
from simulator.report.prediction_table import prediction_rows


@dataclass(frozen=True, slots=True)
class PlanReport:
    """One plan of a report page, with what is predicted of it.

    Attributes:
        name: the heading of the plan, unique on its page.
        plan: the plan; None for a step that was predicted without one.
        prediction: its prediction; None if the page shows the plan's own estimates alone.
        cluster: the cluster of the prediction.
        program: the program that was simulated; None if it is not at hand. It has the kernels of
            the roofline, and the counts and bytes of collectives.
        fidelity: the source of the program, "analytic" or "compiled"; "" if unknown.
        kinds: the kinds of parallelism of parameters by stage and path.
    """

    name: str
    plan: Plan | None
    prediction: Prediction | None = None
    cluster: AnyCluster | None = None
    program: Program | None = None
    fidelity: str = ""
    kinds: Mapping[tuple[int, str], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.plan is None and self.prediction is None:
            raise ValueError(f"{self.name!r} has neither a plan nor a prediction; give one of them")
        if self.prediction is not None and self.cluster is None:
            raise ValueError(
                f"{self.name!r} has a prediction without its cluster; give both, or neither"
            )


@dataclass(frozen=True, slots=True)
class Alternative:
    """A plan that was considered beside the plans of a page.

    Attributes:
        name: what distinguishes it, e.g. its method.
        seconds: predicted seconds of a step; None if there is no plan.
        num_bytes: predicted bytes of the fullest device; None if unknown.
        remark: why there is no plan, or how it was considered.
    """

    name: str
    seconds: float | None
    num_bytes: float | None
    remark: str = ""


def page_data(
    reports: Sequence[PlanReport],
    alternatives: Sequence[Alternative],
    provenance: Mapping[str, str],
) -> dict[str, Any]:
    """Return the data of a page with several plans.

    Args:
        reports: the plans.
        alternatives: plans that were considered beside them.
        provenance: versions, command and date by name.
    """
    own = [Alternative(report.name, *_time_and_memory(report)) for report in reports]
    return {
        "plans": [plan_data(report) for report in reports],
        "alternatives": [asdict(other) | {"shown": True} for other in own]
        + [asdict(other) | {"shown": False} for other in alternatives],
        "provenance": dict(provenance),
    }


def _time_and_memory(report: PlanReport) -> tuple[float | None, float | None]:
    """Return the predicted seconds and bytes of a plan, which are its own without a prediction."""
    if report.prediction is not None:
        memory = report.prediction.memory
        return report.prediction.seconds, memory.total if memory.parts else None
    if report.plan is not None:
        return report.plan.predicted_seconds, report.plan.predicted_bytes
    return None, None


def plan_data(report: PlanReport) -> dict[str, Any]:
    """Return the data of one plan.

    Returns:
        The name, the memory by role, the warnings, and under `plan` and `prediction` what comes
        from each; None where there is no plan or no prediction.
    """
    memory = report.prediction.memory.parts if report.prediction else {}
    if report.plan is not None and not memory:
        memory = {r: size for r, size in report.plan.predicted_memory.model_dump().items() if size}
    return {
        "name": report.name,
        "fidelity": report.fidelity,
        "memory": dict(memory),
        "warnings": list(_warnings(report)),
        "plan": None if report.plan is None else _decided(report.plan, report),
        "prediction": None if report.prediction is None else _predicted(report),
    }


def _warnings(report: PlanReport) -> Iterator[str]:
    """Yield what a reader should know before trusting a plan or its prediction."""
    if report.plan is not None:
        yield from report.plan.warnings
    if report.prediction is None:
        return
    memory = report.prediction.memory
    if memory.parts and not memory.fits:
        yield (
            f"the step needs {memory.total / 1e9:.4g} GB, more than the"
            f" {(memory.capacity - memory.reserve) / 1e9:.4g} GB that a device has for it"
        )
    for sort, count in report.prediction.unmodelled_kernels.items():
        yield f"{count} x {sort}: cost unknown, priced by its bytes"


def _decided(plan: Plan, report: PlanReport) -> dict[str, Any]:
    """Return what a plan decides, and its own estimates."""
    kinds = report.kinds or plan_kinds(plan)
    return {
        "step": plan.step,
        "fingerprint": plan.fingerprint,
        "method": plan.method,
        "cluster": plan.cluster,
        "schedule": plan.schedule.name,
        "chunks": plan.schedule.num_chunks,
        "micro_batches": plan.num_micro_batches,
        "devices": len({device for stage in plan.stages for device in stage.devices}),
        "seconds": plan.predicted_seconds,
        "split": plan.predicted_split.model_dump(),
        "bytes": plan.predicted_bytes,
        "gap": plan.gap,
        "planning_seconds": plan.planning_seconds,
        "stages": [_stage(number, stage) for number, stage in enumerate(plan.stages)],
        "values": [
            row for number, stage in enumerate(plan.stages) for row in _values(number, stage, kinds)
        ],
    }


def plan_kinds(plan: Plan) -> dict[tuple[int, str], str]:
    """Return the kinds of parallelism of the parameters of a whole step; none for a pipeline.

    Stages of a pipeline are classified with their step.
    """
    if not plan.schedule.is_whole_step:
        return {}
    return {(0, parameter.path): parameter.label for parameter in classify(plan).parameters}


def _stage(number: int, stage: Stage) -> dict[str, Any]:
    return {
        "stage": number,
        "layers": ranges(stage.layers),
        "devices": ranges(stage.devices),
        "mesh": stage.mesh.sizes,
        "deferred": list(stage.deferred),
        "parameters": sum(1 for value in stage.inputs if value.role == "parameter"),
        "parameter_bytes": sum(
            value.device_bytes(stage.mesh) for value in stage.inputs if value.role == "parameter"
        ),
        "constraints": len(stage.constraints),
    }


def _values(
    number: int, stage: Stage, kinds: Mapping[tuple[int, str], str]
) -> list[dict[str, Any]]:
    """Return the inputs of a stage, without what other stages send."""
    return [
        {
            "path": value.path,
            "role": value.role,
            "stage": number,
            "array": array_text(value),
            "spec": spec_text(partition_spec(value.spec)),
            "bytes": prod(value.shape) * value.itemsize,
            "device_bytes": value.device_bytes(stage.mesh),
            "kind": kinds.get((number, value.path), ""),
        }
        for value in stage.inputs
        if value.role != "received"
    ]


def _predicted(report: PlanReport) -> dict[str, Any]:
    """Return what is predicted of a plan."""
    prediction, cluster = report.prediction, report.cluster
    assert prediction is not None
    assert cluster is not None, "PlanReport checks it"
    timeline, program = prediction.timeline, report.program
    axes = {**prediction.communication, **prediction.exposed}
    return {
        "cluster": cluster.name,
        "row": prediction_rows({"": prediction})[""],
        "parts": [
            *({"name": name, "seconds": getattr(prediction, name)} for name in PARTS),
            *(
                {"name": f"exposed {axis}", "seconds": seconds}
                for axis, seconds in prediction.exposed.items()
            ),
        ],
        "axes": [
            {
                "axis": axis,
                "communication": prediction.communication.get(axis, 0.0),
                "exposed": prediction.exposed.get(axis, 0.0),
            }
            for axis in axes
        ],
        "footprint": {
            "parts": dict(prediction.memory.parts),
            "reserve": prediction.memory.reserve,
            "capacity": prediction.memory.capacity,
        },
        "timeline": None if timeline is None else timeline_rows(timeline),
        "memory": [] if timeline is None else memory_rows(timeline, cluster),
        "collectives": [] if timeline is None else collective_rows(program, timeline),
        "kernels": None if program is None else kernel_rows(program, cluster),
    }
