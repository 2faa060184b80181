"""A GPT under directives, planned, and with both combined: simulated step times on 8 A100s.

    python -m experiments.validation.schedule_quality [--layers 4] [--output FILE]

The directives are Megatron's tensor parallelism. Backend `manual` builds the model on
shards, and `gspmd` leaves it to XLA's partitioner. With `auto` the planner keeps the directives,
for all layers or for attention alone, and decides the rest.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from jax.sharding import AbstractMesh

import autopar
from autopar.directives import Backend, ModelSchedule, build
from experiments.gpt_directives import megatron, schedule_gpt, split_attention, train_step
from experiments.growing_tables import table_options, written
from experiments.models import GPT
from experiments.models.model_sizes import PUBLISHED
from simulator import Cluster

MESH = (8,)
WAYS: dict[str, tuple[Callable[[ModelSchedule], None], Backend]] = {
    "by hand, manual": (megatron, "manual"),
    "by hand, gspmd": (megatron, "gspmd"),
    "by hand, the rest planned": (megatron, "auto"),
    "attention by hand, the rest planned": (split_attention, "auto"),
    "planned": (lambda _: None, "auto"),
}


@dataclass(frozen=True, slots=True)
class ScheduleResult:
    """One way to run the model: simulated step time, and compiled memory of one device."""

    model: str
    cluster: str
    way: str
    step_seconds: float
    memory_bytes: int
    planning_seconds: float


def measure(name: str, model: GPT, cluster: Cluster) -> Iterator[ScheduleResult]:
    """Plan, compile and simulate the model in each way."""
    for way, (directives, backend) in WAYS.items():
        sch = schedule_gpt(model, AbstractMesh(MESH, ("x",)))
        directives(sch)
        built = build(sch, backend)
        step, args = train_step(model, built), model.abstract_args()
        plan = autopar.plan_step(step, args, method=built.method, cluster=cluster)
        timeline = autopar.simulate(step, args, plan, cluster)
        used = timeline.memory[0].total
        yield ScheduleResult(
            name, cluster.name, way, timeline.makespan, used, plan.planning_seconds
        )


def main() -> None:
    """Write the table, and print it."""
    parser = table_options(__doc__, "schedules")
    parser.add_argument("--layers", type=int, default=4)
    flags = parser.parse_args()
    model = PUBLISHED["gpt-350M"]
    assert isinstance(model, GPT)
    model, cluster = replace(model, num_layers=flags.layers), Cluster.load("dgx_a100_80")
    rows = measure(f"gpt-350M ({flags.layers} layers)", model, cluster.first_devices(8))
    for row in written(rows, flags.output):
        print(
            f"{row.way:40} {row.step_seconds * 1e3:8.2f} ms {row.memory_bytes / 1e9:6.2f} GB",
            flush=True,
        )


if __name__ == "__main__":
    main()
