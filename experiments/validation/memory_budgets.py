"""Plans within random memory budgets: bytes as planned, as predicted, and as compiled by XLA.

    python -m experiments.validation.memory_budgets [--number N] [--first SEED] [--cluster NAME]
        [--output FILE]

A seed draws a model, a mesh, a method and a budget: between the least that a plan needs and what
the fastest plan needs, or above that. It is planned for 8 GPUs and compiled for them.

Seeds whose solves end at their limit of time without a sharding have no row.

A pipeline is planned by a bound of its bytes; the analytic prediction follows its schedule.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import autopar
from experiments.growing_tables import table_options, with_error, written
from experiments.models import Model
from experiments.validation.fidelity import MODELS
from simulator import Cluster

MESHES = (8,), (2, 4), (4, 2)
IN_STAGES = "gpt", "bert", "vit", "moe"
"""The models that are also planned as pipelines."""
CONVOLUTIONAL = "unet", "wide_resnet"
"""The models that have no microbatches here, and no recomputation beside offload.

With them, plans in little memory take minutes.
"""


@dataclass(frozen=True, slots=True)
class BudgetRow:
    """A plan within a budget.

    Attributes:
        seed: the seed that drew the row.
        model: name of the model.
        method: the method without its budget, as Python writes it.
        share: where the budget is between the least (0) and the bytes of the fastest plan (1).
        budget: the memory budget of a device in bytes.
        planned: bytes of the plan on the device with the most.
        predicted: these bytes by the analytic prediction.
        compiled: bytes of XLA's programs on that device.
        seconds: planned seconds of the step.
        warnings: what the plan says about itself.
    """

    seed: int
    model: str
    method: str
    share: float
    budget: int
    planned: int
    predicted: int
    compiled: int
    seconds: float
    warnings: str

    @property
    def error(self) -> float:
        """Relative error of the predicted bytes."""
        return self.predicted / self.compiled - 1


def drawn_method(draw: random.Random, model: str) -> autopar.PlanningMethod:
    """Return a random method for a model of `MODELS`."""
    common: dict[str, Any] = {
        "offload": draw.choice(("none", "none", "auto")),
        "batch_statistics": "microbatch",
    }
    recomputation = draw.choice(("keep", "auto", "none"))
    microbatches = draw.choice((1, 1, 4))
    if model in CONVOLUTIONAL:
        microbatches = 1
        recomputation = "keep" if common["offload"] == "auto" else recomputation
    if model in IN_STAGES and draw.random() < 0.3:
        return autopar.PipeshardParallel(
            8,
            4,
            pipeline_schedule=draw.choice(("gpipe", "1f1b", "zero_bubble_h1")),
            layer_option=autopar.AutoLayerOption(2),
            stage_option=autopar.UniformStageOption(2),
            **common,
        )
    return autopar.ShardParallel(
        draw.choice(MESHES),
        microbatches,
        remat=recomputation,
        options=autopar.ShardingOptions(time_limit=20.0, tolerance=0.01),
        **common,
    )


def row_of(seed: int, cluster: Cluster) -> BudgetRow:
    """Plan and compile what a seed draws."""
    with autopar.shared_traces():
        return _row_of(seed, cluster)


def _row_of(seed: int, cluster: Cluster) -> BudgetRow:
    """Plan and compile a random case within a random budget."""
    draw = random.Random(seed)
    name = draw.choice(sorted(MODELS))
    model, method = MODELS[name], drawn_method(draw, name)
    share = draw.choice((0.0, 0.1, 0.3, 0.6, 0.9, 1.5))
    fastest = 1.05 * _plan(model, method, cluster, None).predicted_bytes
    budget = int(share * fastest)
    if share < 1:
        least = least_budget(model, method, cluster, 0.3 * fastest)
        budget = int(least + share * max(fastest - least, 0.0)) + 1
    plan = _plan(model, method, cluster, budget)
    return BudgetRow(
        seed,
        name,
        repr(method),
        share,
        budget,
        int(plan.predicted_bytes),
        _largest_memory(model, plan, cluster, "analytic"),
        _largest_memory(model, plan, cluster, "compiled"),
        plan.predicted_seconds,
        "; ".join(plan.warnings),
    )


def _largest_memory(
    model: Model,
    plan: autopar.Plan,
    cluster: Cluster,
    fidelity: Literal["analytic", "compiled"],
) -> int:
    """Return the bytes of the device with the most."""
    args = model.abstract_args()
    program = autopar.compile_step(
        model.train_step, args, plan, cluster, donate_argnums=(0,), fidelity=fidelity
    )
    return int(max(memory.total for memory in program.memory))


def least_budget(
    model: Model, method: autopar.PlanningMethod, cluster: Cluster, first: float
) -> float:
    """Return a memory budget in bytes that a plan meets: `first`, or 20 % above one too small."""
    budget = first
    while True:
        try:
            _plan(model, method, cluster, budget)
        except (autopar.MemoryBudgetError, autopar.NoStagesError, TimeoutError) as error:
            budget = 1.2 * max(budget, getattr(error, "least", 0.0))
        else:
            return budget


def _plan(
    model: Model, method: autopar.PlanningMethod, cluster: Cluster, budget: float | None
) -> autopar.Plan:
    within = replace(method, memory_budget=budget)
    return autopar.plan_step(
        model.train_step, model.abstract_args(), method=within, cluster=cluster
    )


def summary(rows: Sequence[BudgetRow]) -> str:
    """Return how many rows meet their budgets, and how many are planned within 5 %."""
    count = len(rows)
    met = sum(row.compiled <= row.budget for row in rows)
    close = sum(abs(row.error) <= 0.05 for row in rows)
    below = sum(row.error < -0.02 for row in rows)
    return (
        f"{met} of {count} need no more than their budget when compiled; predicted bytes are"
        f" within 5 % for {close}, and more than 2 % too low for {below}"
    )


def main() -> None:
    """Write the table, and print it."""
    parser = table_options(__doc__, "memory_budgets")
    parser.add_argument("--number", type=int, default=60, help="number of rows")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--cluster", default="dgx_a100_80", help="cluster of 8 GPUs")
    args = parser.parse_args()
    cluster = Cluster.load(args.cluster)
    rows = []
    seeds = range(args.first, args.first + args.number)
    for row in written(_planned_rows(seeds, cluster), args.output, with_error):
        rows.append(row)
        sizes = (
            f"{name} {getattr(row, name) / 1e9:7.3f} GB"
            for name in ("budget", "planned", "predicted", "compiled")
        )
        over = "" if row.compiled <= row.budget else "OVER"
        print(
            f"{row.seed:3} {row.model:12} {', '.join(sizes)} {row.error:+7.1%} {over} {row.method}"
            f" {row.warnings}",
            flush=True,
        )
    print(summary(rows))


def _planned_rows(seeds: Iterable[int], cluster: Cluster) -> Iterator[BudgetRow]:
    """Yield the rows of seeds; a case that the solver does not plan in time has none."""
    for seed in seeds:
        try:
            yield row_of(seed, cluster)
        except TimeoutError as error:
            print(f"{seed:3} not planned: {error}", flush=True)


if __name__ == "__main__":
    main()
