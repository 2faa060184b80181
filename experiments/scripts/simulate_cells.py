"""Plans and predicts each strategy of a job; started by `experiments.isolate`.

python -m experiments.scripts.simulate_cells JOB DIRECTORY
"""

import sys
from dataclasses import replace
from pathlib import Path

import jax

import autopar
from experiments.cells import Cell, compute_cells, plan_path, program_path, timeline_path
from experiments.models import build_model
from experiments.strategies import STRATEGIES
from experiments.sweep_job import Job
from simulator import Cluster, save_program

jax.config.update("jax_platforms", "cpu")  # a prediction uses no device, so it leaves GPUs alone


def main(job_json: str, directory: str) -> None:
    """Plan, compile and simulate the remaining cells of a job.

    Args:
        job_json: the job, by `Job.to_json`.
        directory: where results, plans and timelines go.
    """
    job, results = Job.from_json(job_json), Path(directory)
    model, cluster = build_model(job.model, job.sizes), Cluster.load(job.cluster)

    def simulate(strategy: str) -> Cell:
        try:
            plan = STRATEGIES[strategy].plan(model, job.mesh, cluster)
        except autopar.MemoryBudgetError as error:
            return Cell("out_of_memory", str(error))
        if plan is not None:
            plan.save(plan_path(results, strategy))
        prediction = STRATEGIES[strategy].predict(model, job.mesh, plan, cluster)
        save_program(prediction.program, program_path(results, strategy))
        prediction.timeline.save_chrome_trace(timeline_path(results, strategy))
        memory, usable = prediction.timeline.peak_bytes, cluster.device.usable_bytes
        cell = Cell(
            step_time_s=prediction.timeline.makespan,
            memory_bytes_per_device=memory,
            planning_time_s=plan.planning_seconds if plan else None,
            compile_time_s=prediction.compile_seconds,
        )
        if memory <= usable:
            return cell
        reason = (
            f"needs {memory / 2**30:.2f} GiB of the {usable / 2**30:.2f} GiB that a step may use"
            f" on {cluster.device.name}"
        )
        return replace(cell, status="out_of_memory", reason=reason)

    with autopar.shared_traces():
        compute_cells(job, results, simulate)


if __name__ == "__main__":
    main(*sys.argv[1:])
