"""Steps on the hosts of a Ray cluster beside the same steps in one process, and beside what the simulator says of them.

    python -m experiments.validation.ray_steps [--repeat 5] [--output results/tables/hosts.csv] [--calibrated cpu-hosts.yaml]

All hosts are processes of this machine, with 8 virtual CPU devices between them. Measured are starting them, transfers between them by
size, and steps. What hosts cost (`processes`, `inter_host` and `collective_permute` of a cluster file) is fitted to the transfers and to the steps
of MLPs; it predicts the steps of GPTs, with which nothing was fitted. Of each task the simulator is told what it takes by itself, in one
process; what it takes where all stages want the cores is its own affair.
"""

import argparse
import csv
import json
import os
import platform
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, Literal

import yaml

import autopar
from autopar.progress import log_progress
from autopar.runtime.local_executable import LocalExecutable
from experiments.measurements import host_timing
from experiments.measurements.host_timing import HostsShape, Running, Seconds, middle
from experiments.models import GPT, MLP, Model
from experiments.raylets import raylets
from experiments.scripts.measure_cells import initial_args, use_devices_like
from simulator.calibration.fit_shared_cpu import MeasuredStep, fit_links, fit_processes
from simulator.hardware.cluster import Cluster, cluster_path
from simulator.program import Run

SHAPES: tuple[HostsShape, ...] = ((2, 4), (4, 2))
SIZES = tuple(4**i for i in range(5, 14))  # 1 KB to 64 MB
BETWEEN, WITHIN = (0, 4), (0, 1)
"""Devices of 2 x 4 that transfers go between."""


@dataclass(frozen=True, slots=True)
class RayCase:
    """A model and how it is parallelized; a single stage: `ShardParallel` on all devices.

    Attributes:
        role: "fitted": the simulator's numbers are chosen so that they suit it; "held out": they predict it.
    """

    name: str
    model: Model
    stages: int
    micro_batches: int
    role: Literal["fitted", "held out", ""] = ""

    def __str__(self) -> str:
        how = (
            f"{self.stages} stages, {self.micro_batches} microbatches"
            if self.stages > 1
            else "ShardParallel"
        )
        return f"{self.name}, {how}"

    def step(self, state: Any, batch: Any) -> Any:
        return self.model.train_step(state, batch, autopar.value_and_grad)

    def plan(self, args: Any) -> autopar.Plan:
        """The plan, as it comes back from a file."""
        method = autopar.ShardParallel()
        if self.stages > 1:
            layers, stages = (
                autopar.AutoLayerOption(self.stages),
                autopar.UniformStageOption(self.stages),
            )
            method = autopar.PipeshardParallel(
                num_micro_batches=self.micro_batches, layer_option=layers, stage_option=stages
            )
        plan = autopar.plan_step(
            self.step, args, method=method, cluster="cpu-virtual", mesh_shape=(8,)
        )
        with tempfile.TemporaryDirectory() as folder:
            plan.save(Path(folder) / "plan.json")
            return autopar.Plan.load(Path(folder) / "plan.json")

    def hosts_per_stage(self, shape: HostsShape) -> int:
        """Over how many hosts a stage spans."""
        return max(1, shape[0] // self.stages)


_GPT = GPT(
    num_layers=4, hidden_size=128, num_heads=4, sequence_length=64, vocab_size=512, batch_size=32
)
CASES = (
    RayCase("MLP 64", MLP(64, 4, 64), 4, 4, "fitted"),
    RayCase("MLP 256", MLP(256, 4, 512), 4, 8, "fitted"),
    RayCase("MLP 256", MLP(256, 4, 512), 2, 8, "fitted"),
    RayCase("GPT", _GPT, 4, 4, "held out"),
    RayCase("GPT", _GPT, 2, 4, "held out"),
    RayCase("MLP 256", MLP(256, 4, 512), 1, 1),
    RayCase("GPT", _GPT, 1, 1),
)


@dataclass(frozen=True, slots=True)
class RayMeasurement:
    """A number; its quantity says the unit, and is of a step, of a transfer or of the start."""

    measurement: Literal["step", "transfer", "start"]
    case: str
    hosts: int
    devices_per_host: int
    quantity: str
    value: float


class Compiled:
    """A case, compiled for this process, which remembers what it took there."""

    def __init__(self, case: RayCase) -> None:
        self.case, self.args = case, initial_args(case.model)
        self.plan = case.plan(self.args)
        executable = self.function().get_executable(*self.args)
        assert isinstance(executable, LocalExecutable)
        self.executable = executable
        self.running = Running(self.executable, self.args)

    def function(self) -> autopar.ParallelizedFunction:
        """The step, not yet compiled."""
        return autopar.parallelize(
            self.case.step, method=autopar.PlanMethod(self.plan), donate_argnums=(0,)
        )


@dataclass(frozen=True, slots=True)
class Measured:
    """A case in one process and over hosts.

    Attributes:
        tasks: of a pipeline, the seconds of each of its tasks by itself.
    """

    compiled: Compiled
    shape: HostsShape
    local: Seconds
    remote: Seconds
    tasks: dict[str, float]

    def step(self) -> MeasuredStep:
        """For the simulator."""
        return MeasuredStep(
            self.compiled.executable.program, self.shape, self.tasks, self.remote.ahead
        )


def measure(cases: Sequence[Compiled], shape: HostsShape, repeat: int) -> Iterator[Measured]:
    """Cases that hosts of this shape can run one beside the other; everything is measured in turns, so that all see the same machine."""
    host_timing.start_hosts(shape)
    remotes = [Running(each.function().get_executable(*each.args), each.args) for each in cases]
    found: list[list[tuple[Seconds, Seconds, dict[str, float]]]] = [[] for _ in cases]
    for turn in range(
        repeat + 1
    ):  # the first, in which much happens for the first time, doesn't count
        for each, remote, results in zip(cases, remotes, found, strict=True):
            local = each.executable
            tasks = {} if local.plan.schedule.is_whole_step else host_timing.task_seconds(local)
            result = each.running.seconds(3), remote.seconds(3), tasks
            if turn:
                results.append(result)
    for each, results in zip(cases, found, strict=True):
        locals_, remotes_, tasks = zip(*results, strict=True)
        medians = {task: median(turn[task] for turn in tasks) for task in tasks[0]}
        yield Measured(each, shape, middle(locals_), middle(remotes_), medians)


def measure_start(case: Compiled, shape: HostsShape) -> Iterator[RayMeasurement]:
    """From nothing to the second step."""

    def row(quantity: str, value: float) -> RayMeasurement:
        return RayMeasurement("start", str(case.case), *shape, f"{quantity}_seconds", value)

    yield row("import_in_one_process", host_timing.import_seconds("autopar.hosts.worker"))
    hosts, seconds = host_timing.start_hosts(shape)
    yield row("init", seconds)
    executable, loaded = host_timing.load(hosts, case.executable.planned)
    yield from (row(name, value) for name, value in asdict(loaded).items())
    remote = Running(executable, case.args)
    yield row("first_step", remote.seconds(1).alone)
    yield row("second_step", remote.seconds(1).alone)


def measure_transfers(repeat: int) -> dict[str, list[tuple[float, float]]]:
    """(bytes, seconds) between hosts and within one."""
    hosts, _ = host_timing.start_hosts(SHAPES[0])
    return {
        where: [
            (
                size,
                host_timing.transfer_seconds(
                    hosts, devices, size, 3 if size > 2**22 else 17, 2 * repeat
                ),
            )
            for size in SIZES
        ]
        for where, devices in (("between hosts", BETWEEN), ("within a host", WITHIN))
    }


def calibrated(
    transfers: dict[str, list[tuple[float, float]]], found: Sequence[Measured]
) -> Cluster:
    """The shipped cluster with the numbers of this machine."""
    base = fit_links(
        Cluster.load("cpu-hosts"), transfers["within a host"], transfers["between hosts"]
    )
    return fit_processes(base, [each.step() for each in found if _is_predicted(each, "fitted")])


def _is_predicted(found: Measured, *roles: str) -> bool:
    return (
        found.compiled.case.role in roles and found.compiled.case.hosts_per_stage(found.shape) == 1
    )


def rows_of(found: Measured, clusters: dict[str, Cluster]) -> Iterator[RayMeasurement]:
    """The numbers of a case; `clusters` predict it."""
    case = found.compiled.case
    values = {
        "one_process_seconds": found.local.ahead,
        "seconds": found.remote.ahead,
        "over_one_process": found.remote.ahead / found.local.ahead,
        "seconds_if_waited_for": found.remote.alone,
        "driver_seconds": found.remote.driver,
        "tasks_seconds": sum(found.tasks[run] for run in _runs(found)),
    }
    if _is_predicted(found, "fitted", "held out"):
        for name, cluster in clusters.items():
            values[f"predicted_seconds_{name}"] = predicted = found.step().predicted(cluster)
            values[f"error_{name}"] = predicted / found.remote.ahead - 1
    label = f"{case} ({case.role})" if case.role else str(case)
    yield from (
        RayMeasurement("step", label, *found.shape, quantity, value)
        for quantity, value in values.items()
    )


def _runs(found: Measured) -> Iterator[str]:
    for row in found.compiled.executable.program.instructions:
        yield from (each.task for each in row if isinstance(each, Run) and each.task in found.tasks)


def circumstances(repeat: int, before: Sequence[float]) -> dict[str, Any]:
    """What there is to know about a run beside its numbers."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return {
        "machine": {
            "cores": os.cpu_count(),
            "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
            "architecture": platform.machine(),
        },
        "load_average_before": round(before[0], 1),
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("jax", "ray", "numpy")},
        "commit": commit.stdout.strip(),
        "repeats": repeat,
        "statistic": "median of the repeats, which take turns; of transfers the fastest",
    }


def write_calibrated(path: Path, cluster: Cluster, source: str) -> None:
    """The shipped file with other numbers."""
    text = yaml.safe_load(cluster_path("cpu-hosts").read_text())
    dumped = cluster.model_dump(
        include={"inter_host", "processes", "collectives"}, exclude_none=True
    )
    rounded = json.loads(
        json.dumps(dumped), parse_float=lambda number: float(f"{float(number):.3g}")
    )
    path.write_text(
        yaml.safe_dump(text | {"source": source} | rounded, sort_keys=False, width=130),
        encoding="utf-8",
    )


def measure_steps(cases: Sequence[Compiled], repeat: int) -> Iterator[Measured]:
    """Every case on every shape; stages that span other hosts want other workers."""
    groups: defaultdict[tuple[int, HostsShape], list[Compiled]] = defaultdict(list)
    for shape, each in product(SHAPES, cases):
        groups[each.case.hosts_per_stage(shape), shape].append(each)
    for (_, shape), group in sorted(groups.items(), key=lambda item: item[0]):
        log_progress(
            f"steps on {shape[0]} x {shape[1]}: {'; '.join(str(each.case) for each in group)}"
        )
        yield from measure(group, shape, repeat)


def write(path: Path, rows: Sequence[RayMeasurement]) -> None:
    """Write the table, and print it."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(
            file, [field.name for field in fields(RayMeasurement)], lineterminator="\n"
        )
        writer.writeheader()
        for row in rows:
            writer.writerow(asdict(row) | {"value": f"{row.value:.4g}"})
            print(
                f"{row.case:45} {row.hosts} x {row.devices_per_host} {row.quantity:32} {row.value:12.6g}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("results/tables/hosts.csv"))
    parser.add_argument("--calibrated", type=Path, help="a cluster file to write")
    flags = parser.parse_args()
    before = os.getloadavg()
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = (
        "0"  # else Ray's processes build the environment anew
    )
    use_devices_like(Cluster.load("cpu-virtual"), 8)
    log_progress("compiling for one process")
    cases = [Compiled(case) for case in CASES]
    with raylets(max(count for count, _ in SHAPES)):
        rows = list(
            measure_start(next(each for each in cases if each.case.role == "held out"), SHAPES[0])
        )
        log_progress("transfers")
        transfers = measure_transfers(flags.repeat)
        steps = list(measure_steps(cases, flags.repeat))
    for where, found in transfers.items():
        rows += [
            RayMeasurement("transfer", f"{size} bytes {where}", *SHAPES[0], "seconds", seconds)
            for size, seconds in found
        ]
    here = calibrated(transfers, steps)
    clusters = {"fitted_here": here, "shipped": Cluster.load("cpu-hosts")}
    for each in steps:
        rows += rows_of(
            each,
            {name: cluster for name, cluster in clusters.items() if cluster.processes is not None},
        )
    write(flags.output, rows)
    flags.output.with_suffix(".json").write_text(
        json.dumps(circumstances(flags.repeat, before), indent=1) + "\n"
    )
    print(here.processes, here.inter_host, here.curves.collective_permute, sep="\n")
    if flags.calibrated:
        source = "fitted by python -m experiments.validation.ray_steps on a machine with"
        write_calibrated(
            flags.calibrated,
            here,
            f"{source} {os.cpu_count()} cores; collectives are orders of magnitude",
        )


if __name__ == "__main__":
    main()
