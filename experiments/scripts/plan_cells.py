"""Plans each strategy of a job; started by `experiments.isolate`.

python -m experiments.scripts.plan_cells JOB DIRECTORY
"""

import sys
from pathlib import Path

import jax

from experiments.cells import Cell, compute_cells, plan_path
from experiments.models import build_model
from experiments.strategies import STRATEGIES
from experiments.sweep_job import Job
from simulator import Cluster

jax.config.update("jax_platforms", "cpu")  # planning uses no device, so it leaves GPUs alone


def main(job_json: str, directory: str) -> None:
    """Plan the remaining cells of a job.

    Args:
        job_json: the job, by `Job.to_json`.
        directory: where plans and results go.
    """
    job, results = Job.from_json(job_json), Path(directory)
    model, cluster = build_model(job.model, job.sizes), Cluster.load(job.cluster)

    def plan(strategy: str) -> Cell:
        plan = STRATEGIES[strategy].plan(model, job.mesh, cluster)
        if plan is None:
            return Cell()
        plan.save(plan_path(results, strategy))
        return Cell(planning_time_s=plan.planning_seconds)

    compute_cells("plan", job, results, plan)


if __name__ == "__main__":
    main(*sys.argv[1:])
