"""Automatic plans compared with data parallelism, ZeRO and expert annotations on the same mesh.

    python -m experiments.validation.quality [--full] [--only PATTERN] [--output FILE]

Each way is compiled by XLA for the cluster and simulated; one that does not fit in memory is not a
candidate. Data parallelism depends only on the number of devices, so its result on the first mesh
stands for all. Large GPTs scan their layers, so that they compile as fast as one. Without `--full`
the other models have few layers.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import autopar
from experiments.growing_tables import table_options, written
from experiments.models import GPT, Model, MoE
from experiments.models.model_sizes import PUBLISHED
from experiments.strategy import Shape
from experiments.sweep_job import mesh_name
from experiments.validation.annotations import Annotations
from simulator import Cluster, Timeline, simulate

type Way = type[autopar.PlanningMethod] | Annotations

AUTOMATIC = "automatic"
DATA_PARALLEL: dict[str, Way] = {
    "data": autopar.DataParallel,
    "zero2": autopar.Zero2Parallel,
    "zero3": autopar.Zero3Parallel,
}
METHODS: dict[str, Way] = {AUTOMATIC: autopar.ShardParallel} | DATA_PARALLEL
ANNOTATED: dict[int, dict[str, Way]] = {
    1: {"megatron": Annotations(tensor="x"), "fsdp": Annotations(data="x", fsdp=True)},
    2: {
        "megatron": Annotations(data="x", tensor="y"),
        "fsdp+tp": Annotations(data="x", tensor="y", fsdp=True),
    },
}
"""Annotations by name, for each number of mesh axes."""


@dataclass(frozen=True, slots=True)
class WayResult:
    """One way to run one model.

    Attributes:
        way: name of the way.
        status: "ok", "out of memory", or why there is no program.
        step_seconds: simulated step time; None without a program.
        memory_bytes: compiled memory of one device; None without a program.
        planned_seconds: step time that the plan predicts; None for annotations.
        planned_bytes: memory of one device that the plan predicts; None for annotations.
        planning_seconds: seconds of planning; None for annotations.
    """

    model: str
    cluster: str
    mesh: str
    way: str
    status: str
    step_seconds: float | None = None
    memory_bytes: int | None = None
    planned_seconds: float | None = None
    planned_bytes: int | None = None
    planning_seconds: float | None = None


def measure(
    name: str,
    model: Model,
    cluster: Cluster,
    mesh: Shape,
    ways: Sequence[str] = (),
    earlier: Sequence[WayResult] = (),
) -> Iterator[WayResult]:
    """Plan, compile and simulate each way to run a model.

    Args:
        name: name of the model.
        model: the model.
        cluster: the cluster to compile for.
        mesh: shape of the mesh.
        ways: names of the ways; all by default.
        earlier: results on other meshes, from which those of data parallelism are taken.
    """
    for way, method in (METHODS | ANNOTATED[len(mesh)]).items():
        if ways and way not in ways:
            continue
        row = WayResult(name, cluster.name, mesh_name(mesh), way, "ok")
        place = name, cluster.name, way
        same = [other for other in earlier if _place(other) == place]
        if way in DATA_PARALLEL and same:
            yield replace(same[0], mesh=row.mesh)
            continue
        try:
            if isinstance(method, Annotations):
                executable = method.compile(model, mesh, cluster)
                timeline = simulate(executable.program, cluster)
            else:
                row, timeline = _planned(row, model, method, mesh, cluster)
        except autopar.InfeasibleError as error:
            yield replace(row, status=f"no plan: {error}")
            continue
        used = timeline.memory[0].total
        status = "ok" if used <= cluster.device.usable_bytes else "out of memory"
        yield replace(row, status=status, step_seconds=timeline.makespan, memory_bytes=used)


def _place(row: WayResult) -> tuple[str, str, str]:
    """Return what identifies a result, apart from its mesh."""
    return row.model, row.cluster, row.way


def _planned(
    row: WayResult,
    model: Model,
    method: type[autopar.PlanningMethod],
    mesh: Shape,
    cluster: Cluster,
) -> tuple[WayResult, Timeline]:
    args = model.abstract_args()
    plan = autopar.plan_step(
        model.train_step, args, method=method(), cluster=cluster, mesh_shape=mesh
    )
    planned = replace(
        row,
        planned_seconds=plan.predicted_seconds,
        planned_bytes=plan.predicted_bytes,
        planning_seconds=plan.planning_seconds,
    )
    return planned, autopar.simulate(model.train_step, args, plan, cluster)


def behind(rows: Sequence[WayResult]) -> float | None:
    """Return by which part the automatic plan is slower than the best other way that fits.

    It is negative if the automatic plan is the fastest, None if there is nothing to compare.
    """
    fit = {
        row.way: row.step_seconds
        for row in rows
        if row.status == "ok" and row.step_seconds is not None
    }
    others = [seconds for way, seconds in fit.items() if way != AUTOMATIC]
    return fit[AUTOMATIC] / min(others) - 1 if AUTOMATIC in fit and others else None


def _models(full: bool) -> Iterator[tuple[str, Model]]:
    few = {"gpt-350M": 4, "moe-380M": 4}
    scanned = {"gpt-1.3B", "gpt-2.6B"}
    for name, model in PUBLISHED.items():
        if name in scanned:
            assert isinstance(model, GPT)
            yield f"{name} (scan)", replace(model, scan_layers=True)
        elif full or name == "wide_resnet-250M":
            yield name, model
        elif name in few:
            assert isinstance(model, GPT | MoE)
            yield f"{name} ({few[name]} layers)", replace(model, num_layers=few[name])


def _cells(full: bool) -> Iterator[tuple[str, Model, str, Shape]]:
    for name, model in _models(full):
        for cluster in ("dgx_a100_80", "p3.16xlarge"):
            for mesh in ((8,), (2, 4)):
                yield name, model, cluster, mesh


def main() -> None:
    """Write the table, and print it."""
    parser = table_options(__doc__, "quality", only="`model cluster mesh`")
    parser.add_argument(
        "--full", action="store_true", help="every model and size of the suites, with all layers"
    )
    parser.add_argument("--ways", default="", help="only these, with commas between")
    args = parser.parse_args()
    ways = args.ways.split(",") if args.ways else ()
    for row in written(_rows(args.full, args.only, ways), args.output):
        print(_text(row), flush=True)


def _rows(full: bool, only: str, ways: Sequence[str]) -> Iterator[WayResult]:
    """Yield the results of all cells that match a pattern, and say how far behind a plan is."""
    earlier: list[WayResult] = []
    for name, model, cluster, mesh in _cells(full):
        if not re.search(only, f"{name} {cluster} {mesh_name(mesh)}"):
            continue
        count = len(earlier)
        for row in measure(name, model, Cluster.load(cluster), mesh, ways, earlier):
            earlier.append(row)
            yield row
        gap = behind(earlier[count:])
        print(f"    automatic {'' if gap is None else f'{gap:+.1%}'}", file=sys.stderr, flush=True)


def _text(row: WayResult) -> str:
    times = (
        ""
        if row.step_seconds is None
        else f"{row.step_seconds * 1e3:9.2f} ms {(row.memory_bytes or 0) / 1e9:6.2f} GB"
    )
    planned = (
        ""
        if row.planned_seconds is None
        else f"planned {row.planned_seconds * 1e3:8.2f} ms {(row.planned_bytes or 0) / 1e9:6.2f} GB"
    )
    where = f"{row.model:22} {row.cluster:12} {row.mesh:4} {row.way:10}"
    return f"{where} {row.status[:40]:14} {times} {planned}"


if __name__ == "__main__":
    main()
