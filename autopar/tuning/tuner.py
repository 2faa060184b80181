"""`tune`: the fastest way to run a step, among those that a space of knobs allows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from autopar.api import parallelize
from autopar.checks import FUNCTION, PATH, checked, instance, integer, one_of
from autopar.devices import AXIS_NAMES, Devices, device_mesh, devices_match
from autopar.lowering.target import target_mesh
from autopar.methods import ManualShardParallel, PlanningMethod
from autopar.planning.plan_step import plan_step
from autopar.prediction.predicting import simulate
from autopar.progress import log_progress
from autopar.sharding.planner import MemoryBudgetError
from autopar.tuning.candidate_search import Search, search
from autopar.tuning.search_space import Candidate, Domain, SearchSpace
from autopar.tuning.trials import Trial, TuningResult
from autopar.util import benchmark_func, zeros
from simulator.hardware.cluster import Cluster

type MakeMesh = Callable[[Sequence[int]], Mesh]
type Make = Callable[
    [Candidate, MakeMesh], tuple[Callable[..., Any], Sequence[Any], PlanningMethod]
]

_REFUSALS = (ValueError, TypeError, NotImplementedError, jax.errors.JaxRuntimeError)
"""What a candidate that can't be run is answered with. Anything else is a mistake, and stops the search."""


def tune(
    make: Make,
    space: Mapping[str, Domain],
    cluster: Cluster | str | Path,
    search_by: Search = "exhaustive",
    measure: int = 0,
) -> TuningResult:
    """Try candidates by prediction, and the best few by running them.

    Args:
        make: from a candidate, a value for each knob, and a function from a shape to a mesh, to (step, its arguments, method), as
            `autopar.parallelize` would have them; arguments may be ShapeDtypeStructs. The mesh is of the cluster's devices when it
            is predicted, of those here when it is measured; its axes are called "x", "y", "z", "w".
        space: what knobs may be: {"tensor": [1, 2, 4, 8], "data": lambda chosen: [8 // chosen["tensor"]]}.
        cluster: where to run. What takes more memory than a device has does not fit. Nothing can be compiled from here for
            clusters of CPUs: there the plan's own estimate is taken.
        search_by: "exhaustive", or "coordinate" for spaces too large for that.
        measure: how many of the best to measure; the devices of `cluster` must be here.

    Raises:
        ValueError, TypeError: the space or an option is not as said above. What is wrong with a candidate is written in its trial.
    """
    checked("make", make, FUNCTION)
    checked(
        "cluster",
        cluster,
        instance("a simulator.Cluster, the name of one or a path", Cluster) | PATH,
    )
    cluster = cluster if isinstance(cluster, Cluster) else Cluster.load(cluster)
    checked("search_by", search_by, one_of(*get_args(Search.__value__)))
    measure = checked("measure", measure, integer(0))
    if measure and not devices_match(cluster, jax.devices()):
        raise ValueError(
            f"measure is {measure}, but the devices here are {jax.devices()[0].device_kind}, not those of {cluster.name!r};"
            " leave it out, or tune for the devices that are here"
        )

    def evaluate(candidate: Candidate) -> Trial:
        trial = _predicted(make, candidate, cluster)
        log_progress(str(trial))
        return trial

    trials = search(SearchSpace(space), evaluate, search_by)
    if not trials:
        raise ValueError(
            f"the space has no candidate: whatever the first knobs of {', '.join(space)} are, none is left for another"
        )
    chosen = sorted(
        (trial for trial in trials if trial.status == "fits"), key=lambda trial: trial.rank
    )[:measure]
    measured = {id(trial): _measured(make, trial) for trial in chosen}
    return TuningResult(tuple(measured.get(id(trial), trial) for trial in trials))


def _predicted(make: Make, candidate: Candidate, cluster: Cluster) -> Trial:
    compiles = cluster.device.kind != "cpu"

    def mesh_of(shape: Sequence[int]) -> Mesh:
        return (
            target_mesh(cluster, tuple(shape), AXIS_NAMES[: len(shape)])
            if compiles
            else device_mesh(shape)
        )

    try:
        step, args, method = make(candidate, mesh_of)
        if compiles and isinstance(method, ManualShardParallel):
            method = replace(
                method, memory_budget=inf
            )  # what XLA makes of it is known below: better than an estimate
        plan = plan_step(
            step, args, method=method, cluster=cluster, mesh_shape=_shape(method.devices)
        )
        if compiles:
            timeline = simulate(step, args, plan, cluster)
            seconds, used = timeline.makespan, timeline.peak_bytes
        else:
            seconds, used = plan.predicted_seconds, plan.predicted_bytes
    except MemoryBudgetError as error:
        return Trial(candidate, "does not fit", reason=str(error))
    except _REFUSALS as error:
        return Trial(candidate, "invalid", reason=f"{type(error).__name__}: {error}")
    room = cluster.device.usable_bytes
    if used > room:
        reason = f"does not fit: a device has {room / 1e9:.4g} GB for it"
        return Trial(candidate, "does not fit", seconds, used, reason=reason)
    return Trial(candidate, "fits", seconds, used)


def _measured(make: Make, trial: Trial) -> Trial:
    try:
        step, args, method = make(trial.candidate, device_mesh)
        seconds = _seconds(step, args, method)
    except _REFUSALS as error:
        trial = replace(trial, status="invalid", reason=f"{type(error).__name__}: {error}")
    else:
        trial = replace(trial, measured_seconds=seconds)
    log_progress(str(trial))
    return trial


def _seconds(step: Callable[..., Any], args: Sequence[Any], method: PlanningMethod) -> float:
    """The time of a step on the devices that are here, with zeros for what has no values; the median of a few."""
    parallel = parallelize(step, method=method)
    leaves, tree = jax.tree.flatten(tuple(args))
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    avals = [leaf for leaf in leaves if isinstance(leaf, jax.ShapeDtypeStruct)]
    values = iter(zeros(avals, [here] * len(avals)))
    given = tree.unflatten(
        next(values) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf for leaf in leaves
    )
    state, *others = parallel.preshard_dynamic_args(*given)

    def run() -> None:
        nonlocal state
        result = jax.block_until_ready(parallel(state, *others))
        updated = result[0] if isinstance(result, tuple) else result
        if jax.tree.structure(updated) == jax.tree.structure(state):
            state = updated  # the one before may have been donated

    return float(np.median(benchmark_func(run, warmup=2, number=1)))


def _shape(devices: Devices) -> tuple[int, ...] | None:
    """The mesh shape that a method says; None where it takes all devices."""
    match devices:
        case None:
            return None
        case Mesh() | AbstractMesh():
            return tuple(devices.axis_sizes)
        case int():
            return (devices,)
        case _ if all(isinstance(each, int) for each in devices):
            return tuple(devices)
        case _:
            return (len(devices),)
