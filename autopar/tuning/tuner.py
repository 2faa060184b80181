"""`tune`: search a space of knobs for the fastest way to run a step."""

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
from autopar.methods import PlanningMethod
from autopar.planning.plan_step import plan_step
from autopar.prediction.predicting import simulate
from autopar.progress import log_progress
from autopar.sharding.solve_within_memory import MemoryBudgetError
from autopar.tuning.candidate_search import Search, search
from autopar.tuning.search_space import Candidate, Domain, SearchSpace
from autopar.tuning.trials import RESULTS, Trial, TuningResult
from autopar.util import benchmark_func, zeros
from simulator.hardware.cluster import Cluster

type MeshFactory = Callable[[Sequence[int]], Mesh]
"""A function from a shape to a mesh."""

type StepFactory = Callable[
    [Candidate, MeshFactory], tuple[Callable[..., Any], Sequence[Any], PlanningMethod]
]
"""A function from a candidate and a `MeshFactory` to (step, arguments, method)."""

_REFUSALS = (ValueError, TypeError, NotImplementedError, jax.errors.JaxRuntimeError)
"""The errors of a candidate that can't run. Any other error is a bug, and stops the search."""

_METHOD = instance("a method that plans, such as autopar.ShardParallel(mesh)", PlanningMethod)


def tune(
    make: StepFactory,
    space: Mapping[str, Domain],
    cluster: Cluster | str | Path,
    search_by: Search = "exhaustive",
    measure: int = 0,
) -> TuningResult:
    """Predict candidates, measure the best few, and return all trials.

    An error of a candidate is not raised, but stored in its trial.

    Args:
        make: a function from a candidate, a value for each knob, and a function that makes a mesh
            of a given shape, to (step, arguments, method), as `autopar.parallelize` takes them.
            Arguments may be ShapeDtypeStructs. The mesh has the cluster's devices when a candidate
            is predicted, and local devices when it is measured; its axes are "x", "y", "z", "w".
        space: the values of the knobs, such as
            {"tensor": [1, 2, 4, 8], "data": lambda chosen: [8 // chosen["tensor"]]}.
        cluster: where to run. A candidate that needs more memory than a device has does not fit.
            For a cluster of CPUs, for which this process can't compile, predictions are the plan's
            own estimates.
        search_by: "exhaustive", or "coordinate" for spaces that are too large for that.
        measure: the number of candidates to measure; requires local devices like the cluster's.

    Raises:
        ValueError: The space has no candidate or a knob with the name of a result, or the devices
            to measure on are missing.
        TypeError: The space or an option has the wrong type.
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
            f"measure is {measure}, but the devices here are {jax.devices()[0].device_kind}, not"
            f" those of {cluster.name!r}; leave it out, or tune for the devices that are here"
        )

    def evaluate(candidate: Candidate) -> Trial:
        trial = _predicted(make, candidate, cluster)
        log_progress(str(trial))
        return trial

    searched = SearchSpace(space)
    taken = [name for name in space if name in RESULTS]
    if taken:
        raise ValueError(
            f"knob {taken[0]!r} has the name of a column of the results, which are"
            f" {', '.join(RESULTS)}; give it another name"
        )
    trials = search(searched, evaluate, search_by)
    if not trials:
        raise ValueError(
            f"the space has no candidate: all values of the first knobs of {', '.join(space)}"
            " leave another knob without values"
        )
    fitting = [trial for trial in trials if trial.status == "fits"]
    fastest = sorted(fitting, key=lambda trial: trial.rank)[:measure]
    measured = {id(trial): _measured(make, trial) for trial in fastest}
    return TuningResult(tuple(measured.get(id(trial), trial) for trial in trials))


def _predicted(make: StepFactory, candidate: Candidate, cluster: Cluster) -> Trial:
    """Return the trial of a candidate: compiled for a GPU, or as planned for a CPU."""
    compiles = cluster.device.kind != "cpu"

    def mesh_of(shape: Sequence[int]) -> Mesh:
        if compiles:
            return target_mesh(cluster, tuple(shape), AXIS_NAMES[: len(shape)])
        return device_mesh(shape)

    try:
        step, args, method = make(candidate, mesh_of)
        checked("method", method, _METHOD)
        if compiles and method.sharding.mode == "manual":
            # The compiled program below has the exact memory; the planner only estimates it.
            method = replace(method, memory_budget=inf)
        plan = plan_step(
            step, args, method=method, cluster=cluster, mesh_shape=_shape(method.devices)
        )
        if compiles:
            timeline = simulate(step, args, plan, cluster)
            seconds = timeline.makespan
            num_bytes = timeline.peak_bytes
        else:
            seconds = plan.predicted_seconds
            num_bytes = plan.predicted_bytes
    except MemoryBudgetError as error:
        return Trial(candidate, "does not fit", reason=str(error))
    except _REFUSALS as error:
        return Trial(candidate, "invalid", reason=f"{type(error).__name__}: {error}")
    usable = cluster.device.usable_bytes
    if num_bytes > usable:
        reason = f"does not fit: a device has {usable / 1e9:.4g} GB for it"
        return Trial(candidate, "does not fit", seconds, num_bytes, reason=reason)
    return Trial(candidate, "fits", seconds, num_bytes)


def _measured(make: StepFactory, trial: Trial) -> Trial:
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
    """Return the median time of a step on local devices, in seconds.

    Arguments that are ShapeDtypeStructs are zeros.
    """
    parallel = parallelize(step, method=method)
    leaves, tree = jax.tree.flatten(tuple(args))
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    avals = [leaf for leaf in leaves if isinstance(leaf, jax.ShapeDtypeStruct)]
    values = iter(zeros(avals, [device] * len(avals)))
    inputs = tree.unflatten(
        next(values) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf for leaf in leaves
    )
    state, *others = parallel.preshard_dynamic_args(*inputs)

    def run() -> None:
        nonlocal state
        result = jax.block_until_ready(parallel(state, *others))
        updated = result[0] if isinstance(result, tuple) else result
        if jax.tree.structure(updated) == jax.tree.structure(state):
            # The step may have donated the state before.
            state = updated

    return float(np.median(benchmark_func(run, warmup=2, number=1)))


def _shape(devices: Devices) -> tuple[int, ...] | None:
    """Return the mesh shape that the devices of a method imply; None if it takes all devices."""
    match devices:
        case None:
            return None
        case Mesh() | AbstractMesh():
            return tuple(devices.axis_sizes)
        case int():
            return (devices,)
        case _ if all(isinstance(size, int) for size in devices):
            return tuple(devices)
        case _:
            return (len(devices),)
