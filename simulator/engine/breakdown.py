"""Prediction of a program: simulate it, and break the seconds of the timeline down by part."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from math import nan

from simulator.backend import Backend
from simulator.costs.cost_model import CostModel
from simulator.engine.prediction import Prediction
from simulator.engine.simulation import simulate
from simulator.engine.timeline import Timeline
from simulator.hardware.device import Device
from simulator.hardware.heterogeneous import AnyCluster
from simulator.memory import Footprint, MemoryUse
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
    """Predict one step of `program` on `cluster`.

    `simulator.transformer.predict` does so for the sizes of a transformer.

    Args:
        program: as in `simulator.engine.simulation.simulate`, like the next four.
        cluster: where the program runs.
        costs: the cost model.
        dispatch: seconds of the host for each instruction.
        model_flops: FLOP that the step needs, without remat, on all devices; by default those of
            the program.
        tokens: tokens that the step learns from.
        backend: the software that drives the devices.

    Raises:
        ValueError: as `simulate` does.
    """
    return prediction_of(
        simulate(program, cluster, costs, dispatch, backend), cluster, model_flops, tokens
    )


def prediction_of(
    timeline: Timeline, cluster: AnyCluster, model_flops: float | None = None, tokens: int = 0
) -> Prediction:
    """Return the breakdown of a timeline on the mesh that computes longest.

    Args:
        timeline: the timeline.
        cluster: the cluster on which it was simulated.
        model_flops: FLOP that the step needs, without remat, on all devices; by default those of
            the timeline.
        tokens: tokens that the step learns from.
    """
    mesh = max(range(len(timeline.meshes)), key=lambda mesh: timeline.busy(mesh, "compute"))
    own = [span for span in timeline.spans if span.mesh == mesh]
    parts, exposed = _compute_seconds(own)
    computed = max((span.end for span in own if span.stream == "compute"), default=0.0)
    parts["bubble"] += timeline.makespan - computed
    communication, last = _communication(own, computed)
    for axis, seconds in last.items():
        exposed[axis] += seconds
        parts["bubble"] -= seconds
    devices = [cluster.pools[cluster.pool_of(ids)].device for ids in timeline.meshes]
    sizes = list(map(len, timeline.meshes))
    flops = timeline.model_flops if model_flops is None else model_flops
    return Prediction(
        seconds=timeline.makespan,
        forward=parts["forward"],
        backward=parts["backward"],
        recompute=parts["recompute"],
        update=parts["update"],
        bubble=parts["bubble"],
        host=parts["host"],
        exposed=dict(exposed),
        communication=communication,
        memory=_fullest(timeline.memory, devices, devices[mesh]),
        model_flops=nan if flops is None else flops,
        hardware_flops=sum(timeline.flops.values()) or nan,
        peak_flop_per_s=sum(
            _peak(timeline.flops, device) * size
            for device, size in zip(devices, sizes, strict=True)
        ),
        devices=sum(sizes),
        tokens=tokens,
        examples=timeline.examples,
        unattributed=parts["unattributed"],
        unmodelled_kernels=timeline.unmodelled_kernels,
        timeline=timeline,
    )


def _communication(
    own: Sequence[Span], computed: float
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the seconds of collectives by mesh axis, and those after the last kernel.

    Args:
        own: the spans of a mesh.
        computed: when the last kernel ends.
    """
    communication: defaultdict[str, float] = defaultdict(float)
    tail: defaultdict[str, float] = defaultdict(float)
    for span in own:
        if span.stream == "communication":
            communication[_axis(span)] += span.seconds
            part = max(0.0, span.end - max(span.start, computed)) / (span.end - span.start or 1.0)
            tail[_axis(span)] += part * span.seconds
    # Communication over different links at the same time counts once.
    total = sum(tail.values())
    end = max((span.end for span in own), default=computed)
    share = min(1.0, (end - computed) / total) if total else 0.0
    return dict(communication), {axis: share * spent for axis, spent in tail.items() if spent}


def _fullest(
    memory: Sequence[MemoryUse], devices: Sequence[Device], otherwise: Device
) -> Footprint:
    """Return the memory of the mesh that fills its devices most.

    Args:
        memory: the memory of each mesh; none if it is not known.
        devices: the kind of device of each mesh.
        otherwise: the device without `memory`.
    """
    parts, device = max(
        ((use.parts(), device) for use, device in zip(memory, devices, strict=False)),
        key=lambda use: sum(use[0].values()) / use[1].usable_bytes,
        default=({}, otherwise),
    )
    return Footprint(parts, 1e9 * device.reserve_gb, device.memory_bytes)


def _compute_seconds(own: list[Span]) -> tuple[defaultdict[str, float], defaultdict[str, float]]:
    """Return the seconds of a compute stream by part of the step, and its waits by mesh axis."""
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
    """Return the mesh axes of communication or of a wait for it; its kind if they are unknown."""
    kind = span.category if span.stream == "communication" else span.awaited or "wait"
    return "pipeline" if kind == "send" else span.axis or kind


@cache
def _part(task: str) -> str:
    instruction = parse_instruction(task)
    return _PARTS[instruction.phase] if isinstance(instruction, Run) else "unattributed"


def _peak(flops_by_dtype: Mapping[str, float], device: Device) -> float:
    """Return FLOP per second of a device that does these FLOP at the peak of each dtype."""
    seconds = sum(
        flops / device.peak_tflop_per_s.get(dtype, device.vector_tflop_per_s)
        for dtype, flops in flops_by_dtype.items()
    )
    return 1e12 * sum(flops_by_dtype.values()) / seconds if seconds else nan
