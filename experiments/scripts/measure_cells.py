"""Run each strategy of a job: `python -m experiments.scripts.measure_cells JOB DIRECTORY PLANS SETTINGS` (through `experiments.isolate`)."""

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
"""On a busy machine a virtual device may come late to a collective; XLA's default is to abort after 40 s."""


def main(job_json: str, directory: str, plans: str, settings: str) -> None:
    job, repetitions = Job.from_json(job_json), json.loads(settings)
    use_devices_like(Cluster.load(job.cluster), job.num_devices)
    model = build_model(job.model, job.sizes)
    args = initial_args(model)

    @cache
    def expected() -> Any:
        return jax.device_get(jax.jit(model.train_step)(*args))

    def measure(strategy: str) -> Cell:
        saved = plan_path(Path(plans), strategy)
        plan = autopar.Plan.load(saved) if saved.exists() else None
        runnable = STRATEGIES[strategy].prepare(model, job.mesh, plan, args)
        state, batch = runnable.args
        reference = (
            expected()
        )  # before the step: in flight together they may wait for each other's threads
        result = jax.block_until_ready(runnable.step(state, batch))
        error = largest_difference(runnable.gather(result), reference)

        def step() -> None:
            nonlocal result
            result = runnable.step(next_state(result), batch)
            if (
                jax.default_backend() == "cpu"
            ):  # virtual devices share the cores: steps in flight starve one another
                jax.block_until_ready(result)

        seconds = benchmark_func(step, lambda: jax.block_until_ready(result), **repetitions)
        return Cell(
            step_time_s=float(np.mean(seconds)),
            step_time_std_s=float(np.std(seconds)),
            memory_bytes_per_device=runnable.memory_bytes,
            equality_error=error,
            compile_time_s=runnable.compile_seconds,
        )

    compute_cells("measure", job, Path(directory), measure, Path(plans))


def use_devices_like(cluster: Cluster, needed: int) -> None:
    """Run on virtual CPU devices for a CPU cluster, else on the GPUs present; a `ValueError` if they don't suffice."""
    if cluster.device.kind == "cpu":
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", cluster.num_devices)
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {PATIENT_COLLECTIVES}"
    present = jax.devices()
    if present[0].platform != cluster.device.kind or len(present) < needed:
        raise ValueError(
            f"{cluster.name} is to be measured on {needed} x {cluster.device.kind}, but present are {len(present)} x "
            f"{present[0].platform} ({present[0].device_kind}); measure where they are, or use 'source: simulated'"
        )


def initial_args(model: Model) -> Any:
    """(state, batch) of `model` as host arrays, the same every time."""
    init = jax.jit(lambda key: (model.init_state(key), model.make_batch(key)))
    return jax.device_get(init(jax.random.key(0)))


def next_state(result: Any) -> Any:
    """The state out of what a training step returns: the state alone, or the state and the loss."""
    return result[0] if type(result) is tuple else result


def largest_difference(actual: Any, expected: Any) -> float:
    """Largest absolute difference between two results of the same structure."""
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    return max(
        float(np.max(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64))))
        for a, b in pairs
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
