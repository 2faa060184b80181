"""Predicts each strategy of a job; started by `experiments.isolate`.

python -m experiments.scripts.simulate_cells JOB DIRECTORY PLANS TIMELINES
"""

import sys
from dataclasses import replace
from pathlib import Path

import jax

import autopar
from experiments.cells import Cell, compute_cells, plan_path
from experiments.models import build_model
from experiments.strategies import STRATEGIES
from experiments.sweep_job import Job
from simulator import Cluster

jax.config.update("jax_platforms", "cpu")  # a prediction uses no device, so it leaves GPUs alone


def main(job_json: str, directory: str, plans: str, timelines: str) -> None:
    """Compile and simulate the remaining cells of a job.

    Args:
        job_json: the job, by `Job.to_json`.
        directory: where the results go.
        plans: the directory of the plans.
        timelines: where the timelines go, for Perfetto.
    """
    job = Job.from_json(job_json)
    model, cluster = build_model(job.model, job.sizes), Cluster.load(job.cluster)
    Path(timelines).mkdir(parents=True, exist_ok=True)

    def simulate(strategy: str) -> Cell:
        saved = plan_path(Path(plans), strategy)
        plan = autopar.Plan.load(saved) if saved.exists() else None
        prediction = STRATEGIES[strategy].predict(model, job.mesh, plan, cluster)
        prediction.timeline.save_chrome_trace(Path(timelines) / f"{strategy}.json")
        memory, usable = prediction.timeline.peak_bytes, cluster.device.usable_bytes
        cell = Cell(
            step_time_s=prediction.timeline.makespan,
            memory_bytes_per_device=memory,
            compile_time_s=prediction.compile_seconds,
        )
        if memory <= usable:
            return cell
        reason = (
            f"needs {memory / 2**30:.2f} GiB of the {usable / 2**30:.2f} GiB that a step may use"
            f" on {cluster.device.name}"
        )
        return replace(cell, status="out_of_memory", reason=reason)

    compute_cells("simulate", job, Path(directory), simulate, Path(plans))


if __name__ == "__main__":
    main(*sys.argv[1:])
