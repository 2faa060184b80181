"""Steps on Ray hosts, compared with the same steps in one process and with predictions.

    python -m experiments.validation.ray_steps [--repeat 5] [--output FILE] [--calibrated FILE]

All hosts are processes of this machine; together they have 8 virtual CPU devices. The script
measures how long hosts take to start, how long transfers between them take by size, and how long
steps take. The overheads of hosts (`processes`, `inter_host` and `collective_permute` of a cluster
file) are fitted to the transfers and to the steps of MLPs. They then predict the steps of GPTs,
which are not fitted to. The simulator is given the seconds that each task takes alone in one
process; contention of the stages for the cores is its own prediction.
"""

import json
import os
import platform
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, Literal

import yaml

import autopar
from autopar import host_benchmarks
from autopar.testing import raylets
from experiments.growing_tables import table_options, written
from experiments.local_steps import initial_args, use_devices_like
from experiments.measurements import host_timing
from experiments.measurements.gpu import checked_out_commit
from experiments.measurements.host_timing import HostsShape, RunningStep, StepSeconds, medians
from experiments.models import GPT, MLP, Model
from simulator import Cluster, Run, cluster_files
from simulator.calibration import MeasuredStep, fit_links, fit_processes

SHAPES: tuple[HostsShape, ...] = ((2, 4), (4, 2))
SIZES = tuple(4**i for i in range(5, 14))
"""Bytes of the transfers: 1 KiB to 64 MiB."""

BETWEEN, WITHIN = (0, 4), (0, 1)
"""Devices of 2 x 4 between which transfers are timed: on two hosts, and on one."""


@dataclass(frozen=True, slots=True)
class RayCase:
    """A model and how it is parallelized: as a pipeline, or with `ShardParallel` on all devices.

    Attributes:
        stages: number of pipeline stages; 1 for `ShardParallel`.
        role: "fitted" if the simulator's numbers are fitted to its steps, "held out" if they
            predict its steps.
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
        """Run a training step whose gradients are accumulated over microbatches."""
        return self.model.train_step(state, batch, autopar.value_and_grad)

    def plan(self, args: Any) -> autopar.Plan:
        """Return the plan for arguments like `args`, saved to a file and loaded again."""
        method = autopar.ShardParallel()
        if self.stages > 1:
            method = autopar.PipeshardParallel(
                num_micro_batches=self.micro_batches,
                layer_option=autopar.AutoLayerOption(self.stages),
                stage_option=autopar.UniformStageOption(self.stages),
            )
        plan = autopar.plan_step(
            self.step, args, method=method, cluster="cpu-virtual", mesh_shape=(8,)
        )
        with tempfile.TemporaryDirectory() as folder:
            plan.save(Path(folder) / "plan.json")
            return autopar.Plan.load(Path(folder) / "plan.json")

    def hosts_per_stage(self, shape: HostsShape) -> int:
        """Return the number of hosts that a stage spans."""
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
    """One number of the table: of starting, of a transfer or of a step.

    Attributes:
        quantity: the name of the number; its end says the unit.
    """

    case: str
    hosts: int
    devices_per_host: int
    quantity: str
    value: float


class CompiledCase:
    """A case compiled for the devices of this process."""

    def __init__(self, case: RayCase) -> None:
        self.case = case
        self.args = initial_args(case.model)
        self.plan = case.plan(self.args)
        self.executable = self.function().get_executable(*self.args)
        self.running = RunningStep(self.executable, self.args)

    def function(self) -> autopar.ParallelizedFunction:
        """Return the parallelized step, to be compiled for the hosts that are joined."""
        return autopar.parallelize(
            self.case.step, method=autopar.PlanMethod(self.plan), donate_argnums=(0,)
        )


@dataclass(frozen=True, slots=True)
class MeasuredCase:
    """A case, timed in one process and over hosts.

    Attributes:
        tasks: seconds of each task by itself; empty without stages.
    """

    compiled: CompiledCase
    shape: HostsShape
    local: StepSeconds
    remote: StepSeconds
    tasks: dict[str, float]

    def step(self) -> MeasuredStep:
        """Return what the simulator is fitted to and compared with."""
        return MeasuredStep(
            self.compiled.executable.program, self.shape, self.tasks, self.remote.ahead
        )


def measure(
    cases: Sequence[CompiledCase], shape: HostsShape, repeat: int
) -> Iterator[MeasuredCase]:
    """Time cases whose workers can coexist on hosts of this shape.

    Cases and places take turns, so that the load of the machine affects them alike. The first turn
    does not count: it warms up.
    """
    host_timing.start_hosts(shape)
    remotes = [RunningStep(case.function().get_executable(*case.args), case.args) for case in cases]
    turns: list[list[tuple[StepSeconds, StepSeconds, dict[str, float]]]] = [[] for _ in cases]
    for turn in range(repeat + 1):
        for case, remote, results in zip(cases, remotes, turns, strict=True):
            is_whole_step = case.executable.plan.schedule.is_whole_step
            tasks = {} if is_whole_step else host_timing.task_seconds(case.executable)
            result = case.running.seconds(3), remote.seconds(3), tasks
            if turn:
                results.append(result)
    for case, results in zip(cases, turns, strict=True):
        local, remote, tasks = zip(*results, strict=True)
        median_tasks = {task: median(turn[task] for turn in tasks) for task in tasks[0]}
        yield MeasuredCase(case, shape, medians(local), medians(remote), median_tasks)


def measure_start(case: CompiledCase, shape: HostsShape) -> Iterator[RayMeasurement]:
    """Time everything from no hosts to the second step."""

    def row(quantity: str, value: float) -> RayMeasurement:
        return RayMeasurement(str(case.case), *shape, f"{quantity}_seconds", value)

    yield row("import_in_one_process", host_timing.import_seconds("autopar.hosts.worker"))
    yield row("init", host_timing.start_hosts(shape))
    executable = case.function().get_executable(*case.args)
    load_seconds = host_benchmarks.load_seconds(executable)
    yield from (row(name, value) for name, value in asdict(load_seconds).items())
    remote = RunningStep(executable, case.args)
    yield row("first_step", remote.seconds(1).alone)
    yield row("second_step", remote.seconds(1).alone)


def measure_transfers(repeat: int) -> dict[str, list[tuple[float, float]]]:
    """Return (bytes, seconds) of transfers between two hosts and within one."""
    host_timing.start_hosts(SHAPES[0])

    def seconds(devices: tuple[int, int], size: int) -> float:
        count = 3 if size > 2**22 else 17
        return host_benchmarks.transfer_seconds(devices, size, count, 2 * repeat)

    return {
        where: [(size, seconds(devices, size)) for size in SIZES]
        for where, devices in (("between hosts", BETWEEN), ("within a host", WITHIN))
    }


def calibrated(
    transfers: dict[str, list[tuple[float, float]]], measured: Sequence[MeasuredCase]
) -> Cluster:
    """Return the shipped cluster with the transfers and overheads of this machine."""
    base = fit_links(
        Cluster.load("cpu-hosts"), transfers["within a host"], transfers["between hosts"]
    )
    return fit_processes(base, [case.step() for case in measured if _is_predicted(case, "fitted")])


def _is_predicted(measured: MeasuredCase, *roles: str) -> bool:
    """Return whether a case has one of the roles, and stages that do not span hosts."""
    case = measured.compiled.case
    return case.role in roles and case.hosts_per_stage(measured.shape) == 1


def rows_of(measured: MeasuredCase, clusters: dict[str, Cluster]) -> Iterator[RayMeasurement]:
    """Yield the numbers of a case, and the predictions of each of `clusters` by its name."""
    case, remote = measured.compiled.case, measured.remote
    values = {
        "one_process_seconds": measured.local.ahead,
        "seconds": remote.ahead,
        "over_one_process": remote.ahead / measured.local.ahead,
        "seconds_if_waited_for": remote.alone,
        "driver_seconds": remote.driver,
        "tasks_seconds": sum(measured.tasks[task] for task in _tasks(measured)),
    }
    if _is_predicted(measured, "fitted", "held out"):
        for name, cluster in clusters.items():
            predicted = measured.step().predicted(cluster)
            values[f"predicted_seconds_{name}"] = predicted
            values[f"error_{name}"] = predicted / remote.ahead - 1
    label = f"{case} ({case.role})" if case.role else str(case)
    for quantity, value in values.items():
        yield RayMeasurement(label, *measured.shape, quantity, value)


def _tasks(measured: MeasuredCase) -> Iterator[str]:
    """Yield the task of every instruction that runs a timed one."""
    for row in measured.compiled.executable.program.instructions:
        for instruction in row:
            if isinstance(instruction, Run) and instruction.task in measured.tasks:
                yield instruction.task


def circumstances(repeat: int, load_average: Sequence[float]) -> dict[str, Any]:
    """Return the machine, versions and statistics that belong to a run's numbers."""
    return {
        "machine": {
            "cores": os.cpu_count(),
            "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
            "architecture": platform.machine(),
        },
        "load_average_before": round(load_average[0], 1),
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("jax", "ray", "numpy")},
        "commit": checked_out_commit(),
        "repeats": repeat,
        "statistic": "median of the repeats, which take turns; of transfers the fastest",
    }


def write_calibrated(path: Path, cluster: Cluster, source: str) -> None:
    """Write the shipped cluster file with the fitted numbers of `cluster`, in three digits.

    Args:
        path: the file to write.
        cluster: the cluster with the fitted numbers.
        source: where the numbers come from, for the file.
    """
    shipped = cluster_files("cpu-hosts")[0]
    text = yaml.safe_load(shipped.read_text())
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


def measure_steps(cases: Sequence[CompiledCase], repeat: int) -> Iterator[MeasuredCase]:
    """Time every case on every shape; cases whose stages span other hosts need other workers."""
    groups: defaultdict[tuple[int, HostsShape], list[CompiledCase]] = defaultdict(list)
    for shape, case in product(SHAPES, cases):
        groups[case.case.hosts_per_stage(shape), shape].append(case)
    for (_, shape), group in sorted(groups.items(), key=lambda item: item[0]):
        _log(f"steps on {shape[0]} x {shape[1]}: {'; '.join(str(case.case) for case in group)}")
        yield from measure(group, shape, repeat)


def write(path: Path, rows: Sequence[RayMeasurement]) -> None:
    """Write the table, and print it."""
    for row in written(rows, path, lambda row: asdict(row) | {"value": f"{row.value:.4g}"}):
        shape = f"{row.hosts} x {row.devices_per_host}"
        print(f"{row.case:45} {shape} {row.quantity:32} {row.value:12.6g}")


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Measure, fit and write the tables."""
    parser = table_options(__doc__, "hosts")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--calibrated", type=Path, help="a cluster file to write")
    flags = parser.parse_args()
    load_average = os.getloadavg()
    use_devices_like(Cluster.load("cpu-virtual"), 8)
    _log("compiling for one process")
    cases = [CompiledCase(case) for case in CASES]
    with raylets(max(count for count, _ in SHAPES)):
        held_out = next(case for case in cases if case.case.role == "held out")
        rows = list(measure_start(held_out, SHAPES[0]))
        _log("transfers")
        transfers = measure_transfers(flags.repeat)
        steps = list(measure_steps(cases, flags.repeat))
    for where, times in transfers.items():
        for size, seconds in times:
            name = f"{size} bytes {where}"
            rows.append(RayMeasurement(name, *SHAPES[0], "seconds", seconds))
    fitted = calibrated(transfers, steps)
    clusters = {"fitted_here": fitted, "shipped": Cluster.load("cpu-hosts")}
    clusters = {name: cluster for name, cluster in clusters.items() if cluster.processes}
    for step in steps:
        rows += rows_of(step, clusters)
    write(flags.output, rows)
    flags.output.with_suffix(".json").write_text(
        json.dumps(circumstances(flags.repeat, load_average), indent=1) + "\n"
    )
    print(fitted.processes, fitted.inter_host, fitted.curves.collective_permute, sep="\n")
    if flags.calibrated:
        source = (
            "fitted by python -m experiments.validation.ray_steps on a machine with"
            f" {os.cpu_count()} cores; collectives are orders of magnitude"
        )
        write_calibrated(flags.calibrated, fitted, source)


if __name__ == "__main__":
    main()
