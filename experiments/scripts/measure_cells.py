"""Plans each strategy of a job and runs it on this machine; started by `experiments.isolate`.

python -m experiments.scripts.measure_cells JOB DIRECTORY SETTINGS
"""

import json
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np

import autopar
from autopar.util import benchmark_func
from experiments.cells import Cell, compute_cells, plan_path
from experiments.models import Model, build_model
from experiments.strategies import STRATEGIES
from experiments.sweep_job import Job
from simulator import Cluster

PATIENT_COLLECTIVES = "--xla_cpu_collective_call_terminate_timeout_seconds=600"
"""A flag for busy machines, where a virtual device may be so late that XLA aborts, after 40 s."""


def main(job_json: str, directory: str, settings: str) -> None:
    """Plan and time the remaining cells of a job, and compare results with the serial step.

    Args:
        job_json: the job, by `Job.to_json`.
        directory: where results and plans go.
        settings: `warmup`, `repeat` and `number` of `benchmark_func`, as JSON.
    """
    job, results = Job.from_json(job_json), Path(directory)
    repetitions = json.loads(settings)
    cluster = Cluster.load(job.cluster)
    use_devices_like(cluster, job.num_devices)
    model = build_model(job.model, job.sizes)
    args = initial_args(model)

    @cache
    def expected() -> Any:
        return jax.device_get(jax.jit(model.train_step)(*args))

    def measure(strategy: str) -> Cell:
        plan = STRATEGIES[strategy].plan(model, job.mesh, cluster)
        if plan is not None:
            plan.save(plan_path(results, strategy))
        runnable = STRATEGIES[strategy].prepare(model, job.mesh, plan, args)
        state, batch = runnable.args
        # Computed first: in flight together, the two steps may block each other's threads.
        reference = expected()
        result = jax.block_until_ready(runnable.step(state, batch))
        error = largest_difference(runnable.gather(result), reference)

        def step() -> None:
            nonlocal result
            result = runnable.step(next_state(result), batch)
            if jax.default_backend() == "cpu":
                # Virtual devices share the cores: steps in flight would starve one another.
                jax.block_until_ready(result)

        seconds = benchmark_func(step, lambda: jax.block_until_ready(result), **repetitions)
        return Cell(
            step_time_s=float(np.mean(seconds)),
            step_time_std_s=float(np.std(seconds)),
            memory_bytes_per_device=runnable.memory_bytes,
            equality_error=error,
            planning_time_s=plan.planning_seconds if plan else None,
            compile_time_s=runnable.compile_seconds,
        )

    with autopar.shared_traces():
        compute_cells(job, results, measure)


def use_devices_like(cluster: Cluster, needed: int) -> None:
    """Have JAX use virtual CPU devices for a CPU cluster, else the GPUs of this machine.

    Args:
        cluster: the cluster whose kind of device is wanted.
        needed: number of devices.

    Raises:
        ValueError: this machine has too few of them.
    """
    if cluster.device.kind == "cpu":
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", cluster.num_devices)
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {PATIENT_COLLECTIVES}"
    present = jax.devices()
    if present[0].platform != cluster.device.kind or len(present) < needed:
        raise ValueError(
            f"{cluster.name} is to be measured on {needed} x {cluster.device.kind}, but present are"
            f" {len(present)} x {present[0].platform} ({present[0].device_kind}); measure where"
            " they are, or use 'source: simulated'"
        )


def initial_args(model: Model) -> Any:
    """Return (state, batch) of `model` as host arrays, the same on every call."""
    init = jax.jit(lambda key: (model.init_state(key), model.make_batch(key)))
    return jax.device_get(init(jax.random.key(0)))


def next_state(result: Any) -> Any:
    """Return the state from the result of a training step: (state, loss), or the state alone."""
    return result[0] if type(result) is tuple else result


def largest_difference(actual: Any, expected: Any) -> float:
    """Return the largest absolute difference between two results of the same structure."""
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    return max(
        float(np.max(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64))))
        for a, b in pairs
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
