"""Measuring stages on the devices that are here, in place of predicting what they take, and remembering it in a file."""

import os
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
from autopar.plan import Stage
from autopar.planning.layer_ranges import graph_key
from autopar.planning.stage_costs import SolvedStage
from autopar.planning.step_planner import stage_of
from autopar.progress import log_progress
from autopar.util import zeros
from simulator.hardware.cluster import Cluster
from simulator.hardware.heterogeneous import AnyCluster
from simulator.program import Phase

WARMUP, REPEAT = 1, 5

_FORMAT = "autopar stage profile, version 1"


class Measurement(BaseModel):
    """What a stage took.

    Attributes:
        device_kind, jax_version, mesh_shape: where it was measured, for a reader of the file.
        seconds: of each phase of one microbatch; of the update, of a step. None: the devices had too little memory.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    device_kind: str
    jax_version: str
    mesh_shape: tuple[int, ...]
    seconds: dict[Phase, float] | None


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    format: Literal["autopar stage profile, version 1"] = _FORMAT
    stages: dict[str, Measurement] = Field(default_factory=dict)


class StageProfiler:
    """Measures stages, each kind once: a `Measure` for `stage_problem`.

    Attributes:
        known: what was measured, by stage, sharding, devices and version of JAX; with a file, also what is in it.
        num_measured: how many stages were measured here.
    """

    def __init__(
        self,
        cluster: AnyCluster,
        devices: Sequence[Device] | None = None,
        file: str | Path | None = None,
    ) -> None:
        """Get ready to measure the stages of a step on `cluster`, on `devices` (by default all that are here).

        Raises:
            StageError: the cluster is not here, is a mixed one, has more devices, or `file` is something else than such a file.
        """
        self._devices = jax.devices() if devices is None else list(devices)
        here = f"{len(self._devices)} x {self._devices[0].device_kind}"
        if not isinstance(cluster, Cluster):
            raise StageError(
                f"profile=True measures stages, but devices differ in cluster {cluster.name!r}, and all stages would be measured on"
                f" the first ones of {here}; plan with profile=False, or for one of its pools"
            )
        if not devices_match(cluster, self._devices):
            raise StageError(
                f"profile=True measures stages, but cluster {cluster.name!r} has {cluster.device.name} and here are {here};"
                " plan with profile=False, or where that cluster is"
            )
        if cluster.num_devices > len(self._devices):
            raise StageError(
                f"profile=True measures stages, and one on the submesh {cluster.hosts} x {cluster.devices_per_host} of cluster"
                f" {cluster.name!r} needs {cluster.num_devices} devices, but here are {here}; plan for fewer devices, or with"
                " profile=False"
            )
        self._file = None if file is None else Path(file)
        self.known = {} if self._file is None else _load(self._file)
        self.num_measured = 0
        if self.known:
            log_progress(f"{len(self.known)} stages are known from {file}")

    def __call__(self, graph: StageGraph, solved: SolvedStage) -> SolvedStage:
        """The stage with the seconds that it takes on the first devices; with endless memory needs if they have too little."""
        stage = stage_of(graph.step, logical_mesh(solved.shape), solved.shardings)
        device_kind = self._devices[0].device_kind
        key = _key(graph, stage, device_kind)
        if key not in self.known:
            start = time.perf_counter()
            seconds = self._measure(graph, stage)
            self.num_measured += 1
            self.known[key] = Measurement(
                device_kind=device_kind,
                jax_version=jax.__version__,
                mesh_shape=solved.shape,
                seconds=seconds,
            )
            if self._file is not None:
                _save(self._file, self.known)
            found = "too little memory" if seconds is None else _milliseconds(seconds)
            log_progress(
                f"stage {self.num_measured} measured: {len(graph.step.jaxpr.eqns)} equations on mesh"
                f" {' x '.join(map(str, solved.shape))}: {found} (predicted {_milliseconds(solved.phases)});"
                f" that took {time.perf_counter() - start:.2f} s"
            )
        seconds = self.known[key].seconds
        if seconds is None:
            return replace(solved, shardings=replace(solved.shardings, peak_bytes=inf))
        return replace(solved, phases=dict(seconds))

    def _measure(self, graph: StageGraph, stage: Stage) -> dict[Phase, float] | None:
        devices = np.array(self._devices[: prod(stage.mesh_shape)]).reshape(stage.mesh_shape)
        mesh = Mesh(devices, stage.axis_names, axis_types=(AxisType.Auto,) * devices.ndim)
        seconds: dict[Phase, float] = defaultdict(float)
        try:
            for function in StageLowering(
                graph, [stage] * graph.partition.num_stages, mesh
            ).functions():
                seconds[function.task.phase] += task_seconds(function)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return None
        return dict(seconds)


def task_seconds(function: TaskFunction) -> float:
    """The median of some runs of a task on zeros, nothing else running, after others that don't count."""
    compiled = function.jitted.lower(*function.in_avals).compile()
    operands = zeros(function.in_avals, function.in_shardings)
    found = []
    for _ in range(WARMUP + REPEAT):
        operands = _refreshed(function, operands)
        start = time.perf_counter()
        jax.block_until_ready(compiled(*operands))
        found.append(time.perf_counter() - start)
    return median(found[WARMUP:])


def _refreshed(function: TaskFunction, operands: Sequence[jax.Array]) -> list[jax.Array]:
    """The operands, new ones for those that were donated."""
    used = [k for k, operand in enumerate(operands) if operand.is_deleted()]
    made = zeros([function.in_avals[k] for k in used], [function.in_shardings[k] for k in used])
    fresh = dict(zip(used, made, strict=True))
    return jax.block_until_ready([fresh.get(k, operand) for k, operand in enumerate(operands)])


def _key(graph: StageGraph, stage: Stage, device_kind: str) -> str:
    """The same for stages that are the same program for the same devices, whatever their values are called."""
    tasks = [(task.phase, task.round, len(eqns)) for task, eqns in graph.tasks.items()]
    constraints = [(each.eqn, each.side, each.index, each.spec) for each in stage.constraints]
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
            f"cached_profile_result is {file}, which is not what profile=True writes ({_reason(error)}); delete it, or name"
            " another file"
        ) from error


def _reason(error: Exception) -> str:
    first = error.errors()[0] if isinstance(error, ValidationError) else None
    return (
        str(error)
        if first is None
        else f"{'.'.join(map(str, first['loc'])) or 'file'}: {first['msg']}"
    )


def _save(file: Path, known: dict[str, Measurement]) -> None:
    """Write to a file beside it first: whoever reads `file` finds all of it, whenever this process is stopped."""
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    partial.write_text(_File(stages=known).model_dump_json(indent=1) + "\n", encoding="utf-8")
    os.replace(partial, file)


def _milliseconds(seconds: dict[Any, float]) -> str:
    return ", ".join(f"{phase} {1e3 * value:.3g} ms" for phase, value in seconds.items())
