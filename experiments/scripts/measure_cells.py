"""Plans each strategy of a job and runs it on this machine; started by `experiments.isolate`.

python -m experiments.scripts.measure_cells JOB DIRECTORY SETTINGS
"""

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np

import autopar
from autopar.util import benchmark_func
from experiments.cells import Cell, compute_cells, plan_path
from experiments.local_steps import initial_args, largest_difference, next_state, use_devices_like
from experiments.models import build_model
from experiments.strategies import STRATEGIES
from experiments.sweep_job import Job
from simulator import Cluster


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


if __name__ == "__main__":
    main(*sys.argv[1:])
