"""Seconds and memory of planning GPTs as pipelines, with fixed options and with every one open.

    uv run python -m experiments.validation.planning_seconds [--only PATTERN] [--output FILE]

Each is planned from the function of the step in a process of its own. The time of a reference
computation, measured before and after, says how fast the machine was.
"""

import multiprocessing
import re
import resource
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Literal

import autopar
from experiments.growing_tables import table_options, written
from experiments.models.gpt import GPT
from experiments.models.model_sizes import gpt
from experiments.reference_computation import reference_seconds
from experiments.validation.pipeline_quality import step_of
from simulator import Cluster


@dataclass(frozen=True, slots=True)
class Planning:
    """What is planned.

    Attributes:
        model: the model, for one batch of a step.
        cluster: name and number of hosts.
        layers: number of layers that stages consist of.
        micro_batches: number of microbatches; "auto" if the schedule and recomputation are open
            too.
    """

    model: GPT
    cluster: tuple[str, int]
    layers: int
    micro_batches: int | Literal["auto"] = "auto"

    def plan(self) -> autopar.Plan:
        """Return the plan."""
        is_open = self.micro_batches == "auto"
        model = replace(self.model, remat=not is_open)
        name, hosts = self.cluster
        train_step, args = step_of(model)
        method = autopar.PipeshardParallel(
            num_micro_batches=self.micro_batches,
            pipeline_schedule="auto" if is_open else "1f1b",
            layer_option=autopar.AutoLayerOption(
                self.layers, remat_layer="auto" if is_open else False
            ),
            stage_option="auto",
        )
        return autopar.plan_step(
            train_step,
            args,
            method=method,
            cluster=Cluster.load(name).with_size(hosts=hosts),
        )


PLANNINGS: Mapping[str, Planning] = {
    "GPT-2.6B, 8 V100": Planning(gpt(2560, 32, 32, 1024), ("p3.16xlarge", 1), 8, 128),
    "GPT-39B, 64 V100": Planning(gpt(8192, 48, 64, 1024), ("p3.16xlarge", 8), 16, 1024),
    "GPT-1T, 3072 A100": Planning(gpt(25600, 128, 160, 3072), ("dgx_a100_80", 384), 64, 384),
    "GPT-3.6B, 64 A100, all open": Planning(gpt(3072, 30, 32, 512), ("dgx_a100_80", 8), 10),
    "GPT-39B, 64 V100, all open": Planning(gpt(8192, 48, 64, 1024), ("p3.16xlarge", 8), 16),
    "GPT-175B, 1024 A100, all open": Planning(gpt(12288, 96, 96, 1536), ("dgx_a100_80", 128), 24),
}
"""Plannings by parameters and devices; the benchmarks time them too."""


@dataclass(frozen=True, slots=True)
class PlanningRow:
    """Seconds and memory of a planning.

    Attributes:
        planning: name in `PLANNINGS`.
        seconds: seconds of planning, tracing included.
        reference_seconds: seconds of the reference computation.
        memory_gb: the most memory of the process in GB.
        combinations: number of combinations of options.
        planned: number of combinations that were planned; bounds rule out the others.
        micro_batches: microbatches of the plan.
        schedule: schedule of the plan.
        stages: number of stages of the plan.
        step_seconds: predicted seconds of a step.
    """

    planning: str
    seconds: float
    reference_seconds: float
    memory_gb: float
    combinations: int
    planned: int
    micro_batches: int
    schedule: str
    stages: int
    step_seconds: float


def row_of(name: str) -> PlanningRow:
    """Plan one of `PLANNINGS`."""
    before = reference_seconds()
    start = time.perf_counter()
    plan = PLANNINGS[name].plan()
    seconds = time.perf_counter() - start
    is_open = PLANNINGS[name].micro_batches == "auto"
    trials = autopar.get_last_search_result() if is_open else ()
    return PlanningRow(
        name,
        round(seconds, 2),
        round(min(before, reference_seconds()), 5),
        round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
        max(len(trials), 1),
        max(sum(trial.seconds is not None for trial in trials), 1),
        plan.num_micro_batches,
        plan.schedule.name,
        len(plan.stages),
        plan.predicted_seconds,
    )


def main() -> None:
    """Write the table, and print it."""
    args = table_options(__doc__, "planning_seconds", only="names to plan").parse_args()
    names = [name for name in PLANNINGS if re.search(args.only, name)]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as process:
        for row in written(process.map(row_of, names), args.output):
            print(row, flush=True)


if __name__ == "__main__":
    main()
