"""Predictions of programs: a timeline, and where its seconds go."""

from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from math import nan

from simulator.backend import Backend
from simulator.costs.cost_model import CostModel
from simulator.engine.prediction import Prediction
from simulator.engine.simulation import simulate
from simulator.engine.timeline import Timeline
from simulator.hardware.cluster import Device
from simulator.hardware.heterogeneous import AnyCluster
from simulator.memory import Footprint
from simulator.program import Phase, Program, Run, parse_instruction
from simulator.spans import Span

_PARTS: dict[Phase, str] = {
    "F": "forward",
    "B": "backward",
    "I": "backward",
    "W": "backward",
    "U": "update",
    "S": "unattributed",
}


def predict(
    program: Program,
    cluster: AnyCluster,
    costs: CostModel | None = None,
    dispatch: float | None = None,
    model_flops: float | None = None,
    tokens: int = 0,
    backend: Backend | None = None,
) -> Prediction:
    """What one step of `program` takes on `cluster`; `simulator.transformer.predict` answers the same for a transformer's sizes.

    Args:
        program, cluster, costs, dispatch, backend: as for `simulator.engine.simulation.simulate`, which also says what may be wrong with them.
        model_flops: FLOP that the step needs, nothing computed twice, of all devices; by default what the program says.
        tokens: that the step learns from.
    """
    return prediction_of(
        simulate(program, cluster, costs, dispatch, backend), cluster, model_flops, tokens
    )


def prediction_of(
    timeline: Timeline, cluster: AnyCluster, model_flops: float | None = None, tokens: int = 0
) -> Prediction:
    """Where the seconds of a timeline go, on the mesh that computes longest; arguments as of `predict`."""
    mesh = max(range(len(timeline.meshes)), key=lambda mesh: timeline.busy(mesh, "compute"))
    own = [span for span in timeline.spans if span.mesh == mesh]
    parts, exposed = _compute_seconds(own)
    computed = max((span.end for span in own if span.stream == "compute"), default=0.0)
    parts["bubble"] += timeline.makespan - computed
    moved: defaultdict[str, float] = defaultdict(float)
    late: defaultdict[str, float] = defaultdict(
        float
    )  # nobody waits for it, except for the end of the step
    for span in own:
        if span.stream == "communication":
            moved[_axis(span)] += span.seconds
            part = max(0.0, span.end - max(span.start, computed)) / (span.end - span.start or 1.0)
            late[_axis(span)] += part * span.seconds
    # over different links it goes on at the same time, which counts once
    total = sum(late.values())
    once = (
        min(1.0, max((span.end - computed for span in own), default=0.0) / total) if total else 0.0
    )
    for axis, seconds in late.items():
        if seconds:
            exposed[axis] += once * seconds
            parts["bubble"] -= once * seconds
    of_mesh = [cluster.pools[cluster.pool_of(devices)].device for devices in timeline.meshes]
    used = [(use.parts(), device) for use, device in zip(timeline.memory, of_mesh, strict=False)]
    held, device = max(
        used,
        key=lambda each: sum(each[0].values()) / each[1].memory_bytes,
        default=({}, of_mesh[mesh]),
    )
    sizes = list(map(len, timeline.meshes))
    needed = timeline.model_flops if model_flops is None else model_flops
    return Prediction(
        seconds=timeline.makespan,
        forward=parts["forward"],
        backward=parts["backward"],
        recompute=parts["recompute"],
        update=parts["update"],
        bubble=parts["bubble"],
        host=parts["host"],
        exposed=dict(exposed),
        communication=dict(moved),
        memory=Footprint(held, 1e9 * device.reserve_gb, device.memory_bytes),
        model_flops=nan if needed is None else needed,
        hardware_flops=sum(timeline.flops.values()) or nan,
        peak_flop_per_s=sum(
            _peak(timeline.flops, each) * size for each, size in zip(of_mesh, sizes, strict=True)
        ),
        devices=sum(sizes),
        tokens=tokens,
        examples=timeline.examples,
        unattributed=parts["unattributed"],
        unmodelled_kernels=timeline.unmodelled_kernels,
        timeline=timeline,
    )


def _compute_seconds(own: list[Span]) -> tuple[defaultdict[str, float], defaultdict[str, float]]:
    """What the compute stream of a mesh does, and what collectives it waits for."""
    parts: defaultdict[str, float] = defaultdict(float)
    exposed: defaultdict[str, float] = defaultdict(float)
    trains = any(span.phase == "backward" for span in own)
    for span in own:
        if span.stream != "compute":
            continue
        match span.category:
            case "wait":
                exposed[_axis(span)] += span.seconds
            case "bubble" | "host":
                parts[span.category] += span.seconds
            case _:
                part = _part(span.task)
                if span.phase and (
                    (part == "unattributed" and trains)
                    or (part == "backward" and span.phase == "recompute")
                ):
                    part = span.phase
                parts[part] += span.seconds
    return parts, exposed


def _axis(span: Span) -> str:
    """What communication counts for, or waiting for it: the axes it lies along, or else its kind."""
    kind = span.category if span.stream == "communication" else span.awaited or "wait"
    return "pipeline" if kind == "send" else span.axis or kind


@cache
def _part(task: str) -> str:
    instruction = parse_instruction(task)
    return _PARTS[instruction.phase] if isinstance(instruction, Run) else "unattributed"


def _peak(done: Mapping[str, float], device: Device) -> float:
    """FLOP per second of a device that does this mixture of precisions at the peak of each."""
    seconds = sum(
        flops / device.peak_tflop_per_s.get(dtype, device.vector_tflop_per_s)
        for dtype, flops in done.items()
    )
    return 1e12 * sum(done.values()) / seconds if seconds else nan
