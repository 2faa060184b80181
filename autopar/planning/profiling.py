"""Stage profiling: measured times of stages on the devices of this process, cached in a file."""

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from math import inf, prod
from pathlib import Path
from statistics import median
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AxisType, Mesh
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from autopar.devices import Device, devices_match, logical_mesh
from autopar.lowering.stage_lowering import StageLowering, TaskFunction
from autopar.pipeline.stage_graph import StageGraph
from autopar.pipeline.stage_options import StageError
from autopar.plan_stages import Stage
from autopar.planning.layer_ranges import graph_key
from autopar.planning.stage_costs import SolvedStage
from autopar.planning.step_planner import stage_of
from autopar.progress import log_progress
from autopar.util import zeros
from simulator.files import write_text
from simulator.hardware.cluster import Cluster
from simulator.hardware.heterogeneous import AnyCluster
from simulator.program import Phase

WARMUP = 1
"""Runs of a task before it is timed."""

REPEAT = 5
"""Runs of a task that are timed."""

_FORMAT = "autopar stage profile, version 1"


class Measurement(BaseModel):
    """The measured times of a stage.

    Attributes:
        device_kind: kind of the devices, for a reader of the file.
        jax_version: version of JAX, for a reader of the file.
        mesh_shape: shape of the stage's logical mesh, for a reader of the file.
        seconds: seconds of each phase of one microbatch, of a step for the update. None if the
            devices ran out of memory.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    device_kind: str
    jax_version: str
    mesh_shape: tuple[int, ...]
    seconds: dict[Phase, float] | None


class _File(BaseModel):
    """The contents of a file of measurements."""

    model_config = ConfigDict(extra="forbid")

    format: Literal["autopar stage profile, version 1"] = _FORMAT
    stages: dict[str, Measurement] = Field(default_factory=dict)


class StageProfiler:
    """Measures stages, each kind once: a `Measure` for `stage_problem`.

    Attributes:
        measurements: measurements by a hash of stage, sharding, devices and version of JAX, those
            read from the file included.
        num_measured: number of stages measured in this process.
    """

    def __init__(
        self,
        cluster: AnyCluster,
        devices: Sequence[Device] | None = None,
        file: str | Path | None = None,
    ) -> None:
        """Prepare to measure the stages of a step.

        Args:
            cluster: the cluster that the step is planned for.
            devices: devices to measure on; by default all devices of this process.
            file: file to read measurements from and to write them to.

        Raises:
            StageError: the cluster has other devices, is heterogeneous or has more
                devices, or `file` is not a file of measurements.
        """
        self._devices = jax.devices() if devices is None else list(devices)
        devices_text = f"{len(self._devices)} x {self._devices[0].device_kind}"
        if not isinstance(cluster, Cluster):
            raise StageError(
                f"profile=True measures stages, but devices differ in cluster {cluster.name!r},"
                f" and all stages would be measured on the first ones of {devices_text}; plan with"
                " profile=False, or for one of its pools"
            )
        if not devices_match(cluster, self._devices):
            raise StageError(
                f"profile=True measures stages, but cluster {cluster.name!r} has"
                f" {cluster.device.name} and here are {devices_text}; plan with profile=False, or"
                " on that cluster"
            )
        if cluster.num_devices > len(self._devices):
            raise StageError(
                f"profile=True measures stages, and one on the submesh {cluster.hosts} x"
                f" {cluster.devices_per_host} of cluster {cluster.name!r} needs"
                f" {cluster.num_devices} devices, but here are {devices_text}; plan for fewer"
                " devices, or with profile=False"
            )
        self._file = None if file is None else Path(file)
        self.measurements = {} if self._file is None else _load(self._file)
        self.num_measured = 0
        if self.measurements:
            log_progress(f"{len(self.measurements)} stages are known from {file}")

    def __call__(self, graph: StageGraph, solved: SolvedStage) -> SolvedStage:
        """Return a stage with its measured seconds on the first devices.

        If they run out of memory, the stage's memory is infinite.
        """
        stage = stage_of(graph.step, logical_mesh(solved.shape), solved.shardings)
        device_kind = self._devices[0].device_kind
        key = _key(graph, stage, device_kind)
        if key not in self.measurements:
            start = time.perf_counter()
            seconds = self._measure(graph, stage)
            self.num_measured += 1
            self.measurements[key] = Measurement(
                device_kind=device_kind,
                jax_version=jax.__version__,
                mesh_shape=solved.shape,
                seconds=seconds,
            )
            if self._file is not None:
                _save(self._file, self.measurements)
            outcome = "too little memory" if seconds is None else _milliseconds(seconds)
            log_progress(
                f"stage {self.num_measured} measured: {len(graph.step.jaxpr.eqns)} equations on"
                f" mesh {' x '.join(map(str, solved.shape))}: {outcome} (predicted"
                f" {_milliseconds(solved.phases)}); that took {time.perf_counter() - start:.2f} s"
            )
        seconds = self.measurements[key].seconds
        if seconds is None:
            return replace(solved, shardings=replace(solved.shardings, peak_bytes=inf))
        return replace(solved, phases=dict(seconds))

    def _measure(self, graph: StageGraph, stage: Stage) -> dict[Phase, float] | None:
        devices = np.array(self._devices[: prod(stage.mesh_shape)]).reshape(stage.mesh_shape)
        mesh = Mesh(devices, stage.axis_names, axis_types=(AxisType.Auto,) * devices.ndim)
        seconds: dict[Phase, float] = defaultdict(float)
        try:
            lowering = StageLowering(graph, [stage] * graph.partition.num_stages, mesh)
            for function in lowering.functions():
                seconds[function.task.phase] += task_seconds(function)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return None
        return dict(seconds)


def task_seconds(function: TaskFunction) -> float:
    """Return the median seconds of a task on zeros.

    Warm-up runs do not count, and nothing else runs at the same time.
    """
    compiled = function.jitted.lower(*function.in_avals).compile()
    operands = zeros(function.in_avals, function.in_shardings)
    seconds = []
    for _ in range(WARMUP + REPEAT):
        operands = _refreshed(function, operands)
        start = time.perf_counter()
        jax.block_until_ready(compiled(*operands))
        seconds.append(time.perf_counter() - start)
    return median(seconds[WARMUP:])


def _refreshed(function: TaskFunction, operands: Sequence[jax.Array]) -> list[jax.Array]:
    """Return the operands, with new arrays in place of donated ones."""
    donated = [k for k, operand in enumerate(operands) if operand.is_deleted()]
    arrays = zeros(
        [function.in_avals[k] for k in donated], [function.in_shardings[k] for k in donated]
    )
    fresh = dict(zip(donated, arrays, strict=True))
    return jax.block_until_ready([fresh.get(k, operand) for k, operand in enumerate(operands)])


def _key(graph: StageGraph, stage: Stage, device_kind: str) -> str:
    """Return a hash that is equal for stages that are the same program for the same devices.

    The names of their values do not matter.
    """
    tasks = [(task.phase, task.round, len(eqns)) for task, eqns in graph.tasks.items()]
    constraints = [
        (constraint.eqn, constraint.side, constraint.index, constraint.spec)
        for constraint in stage.constraints
    ]
    values = [value.spec for value in (*stage.inputs, *stage.outputs)]
    facts = (
        graph_key(graph),
        tasks,
        stage.mesh_shape,
        values,
        constraints,
        stage.deferred,
        device_kind,
        jax.__version__,
    )
    return sha256(repr(facts).encode()).hexdigest()[:32]


def _load(file: Path) -> dict[str, Measurement]:
    if not file.exists():
        if not file.absolute().parent.is_dir():
            raise StageError(
                f"cached_profile_result is {file}, but there is no folder {file.absolute().parent}"
            )
        return {}
    try:
        return dict(_File.model_validate_json(file.read_bytes()).stages)
    except (OSError, ValidationError) as error:
        raise StageError(
            f"cached_profile_result is {file}, which is not what profile=True writes"
            f" ({_reason(error)}); delete it, or name another file"
        ) from error


def _reason(error: Exception) -> str:
    first = error.errors()[0] if isinstance(error, ValidationError) else None
    return (
        str(error)
        if first is None
        else f"{'.'.join(map(str, first['loc'])) or 'file'}: {first['msg']}"
    )


def _save(file: Path, measurements: dict[str, Measurement]) -> None:
    """Write measurements to a file atomically: readers find the old file or the new one."""
    write_text(file, _File(stages=measurements).model_dump_json(indent=1) + "\n")


def _milliseconds(seconds: dict[Any, float]) -> str:
    return ", ".join(f"{phase} {1e3 * value:.3g} ms" for phase, value in seconds.items())
