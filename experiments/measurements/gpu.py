"""Training steps on one GPU, measured and predicted.

    python -m experiments.measurements.gpu --out DIR

It calibrates the first device, times jitted steps of MLPs, GPTs and ViTs in several dtypes, and
predicts each of them four times: from the program that XLA compiled and from the planner's work,
with the calibrated device and with the shipped one. It writes the table `gpu.csv`, versions and
statistics in `gpu.json`, and the calibrated cluster in `gpu_cluster.yaml`. Each file is replaced
atomically after every step, so that it is complete whenever the run ends.
"""

import argparse
import json
import os
import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd
from jax.sharding import Mesh
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

import autopar
from autopar.calibrate import CPU, GPU, Effort, calibrate, driver_version
from autopar.util import benchmark_func, memory_of
from experiments.local_steps import next_state
from experiments.models import GPT, MLP, ViT
from simulator import Cluster, Program, Timeline, simulate, unmodelled_kernels
from simulator.calibration import write_profile
from simulator.files import write_text
from simulator.hlo import parse_hlo

type Timed = MLP | GPT | ViT

DTYPES = ("float32", "bfloat16", "float16")
SIZES: dict[str, tuple[Timed, ...]] = {
    "gpu": (
        MLP(dim=1024, num_layers=6, batch_size=1024),
        GPT(6, 512, 8, sequence_length=512, vocab_size=8192, batch_size=8),
        ViT(12, 384, 6, patch_size=16, image_size=224, num_classes=1000, batch_size=64),
        MLP(dim=4096, num_layers=6, batch_size=4096),
        GPT(12, 768, 12, sequence_length=1024, vocab_size=51200, batch_size=8),
        ViT(12, 768, 12, patch_size=16, image_size=224, num_classes=1000, batch_size=128),
        MLP(dim=8192, num_layers=4, batch_size=8192),
        GPT(8, 2048, 16, sequence_length=1024, vocab_size=51200, batch_size=8),
    ),
    "tiny": (
        MLP(dim=64, num_layers=2, batch_size=32),
        GPT(1, 32, 2, sequence_length=16, vocab_size=64, batch_size=4),
        ViT(1, 32, 2, patch_size=8, image_size=16, num_classes=10, batch_size=4),
    ),
}
"""Models, small ones first: those to measure on a GPU, and tiny ones to try the script anywhere."""


@dataclass(frozen=True, slots=True)
class GpuStep:
    """A step, measured and predicted, in seconds and bytes.

    Attributes:
        measured: median of the repeats.
        spread: standard deviation of the repeats.
        compiled_calibrated: prediction from XLA's program with the calibrated device.
        compiled_shipped: prediction from XLA's program with the shipped device.
        analytic_calibrated: prediction from the planner's work with the calibrated device.
        analytic_shipped: prediction from the planner's work with the shipped device.
        memory_bytes: device memory by XLA's buffer assignment.
        analytic_memory_bytes: device memory by the planner's estimate.
        unmodelled_kernels: number of kernels in XLA's program that the cost model leaves out.
    """

    model: str
    size: str
    dtype: str
    parameters: int
    measured: float
    spread: float
    compiled_calibrated: float
    compiled_shipped: float
    analytic_calibrated: float
    analytic_shipped: float
    memory_bytes: int
    analytic_memory_bytes: int
    unmodelled_kernels: int
    compile_seconds: float


PREDICTED = ("compiled_calibrated", "compiled_shipped", "analytic_calibrated", "analytic_shipped")
"""The columns of predictions."""


@dataclass(frozen=True, slots=True)
class Clusters:
    """One device, as calibrated and as in the shipped file of its kind."""

    calibrated: Cluster
    shipped: Cluster


def measure(model: Timed, clusters: Clusters, repeat: int, least: float) -> GpuStep:
    """Time a step on the first device, and predict it.

    Args:
        model: the model to train.
        clusters: what it is predicted for.
        repeat: number of measurements.
        least: seconds that steps in a row take in each measurement, at least.
    """
    device = jax.devices()[0]
    init = jax.jit(lambda key: (model.init_state(key), model.make_batch(key)))
    state, batch = jax.block_until_ready(init(jax.device_put(jax.random.key(0), device)))
    begun = time.perf_counter()
    step = jax.jit(model.train_step, donate_argnums=0).lower(state, batch).compile()
    compile_seconds = time.perf_counter() - begun

    def run() -> None:
        nonlocal state
        state = next_state(step(state, batch))

    seconds = benchmark_func(
        run,
        lambda: jax.block_until_ready(state),
        warmup=2,
        repeat=repeat,
        number=1,
        min_repeat_second=least,
    )
    memory, body = memory_of(step), parse_hlo(step.as_text() or "")
    program = Program.single(body, memory=memory)
    args = model.abstract_args()
    plan = autopar.plan_step(model.train_step, args, cluster=clusters.shipped, mesh_shape=(1,))

    def analytic(cluster: Cluster) -> Timeline:
        return autopar.simulate(model.train_step, args, plan, cluster, fidelity="analytic")

    shipped = analytic(clusters.shipped)
    return GpuStep(
        model=type(model).__name__,
        size=_size(model),
        dtype=model.dtype,
        parameters=model.num_parameters,
        measured=float(np.median(seconds)),
        spread=float(np.std(seconds)),
        compiled_calibrated=simulate(program, clusters.calibrated).makespan,
        compiled_shipped=simulate(program, clusters.shipped).makespan,
        analytic_calibrated=analytic(clusters.calibrated).makespan,
        analytic_shipped=shipped.makespan,
        memory_bytes=memory.total,
        analytic_memory_bytes=shipped.memory[0].total,
        unmodelled_kernels=sum(unmodelled_kernels(body).values()),
        compile_seconds=compile_seconds,
    )


def _size(model: Timed) -> str:
    width = model.dim if isinstance(model, MLP) else model.hidden_size
    return f"{model.num_layers} x {width}, batch {model.batch_size}"


def step_name(model: Timed) -> str:
    """Return the model, its size and its dtype in one line."""
    return f"{type(model).__name__}, {_size(model)}, {model.dtype}"


def run(
    out: Path,
    sizes: Sequence[Timed],
    dtypes: Sequence[str],
    repeat: int,
    budget: float,
    effort: Effort | None = None,
    calibrated: Cluster | None = None,
    console: Console | None = None,
) -> pd.DataFrame:
    """Calibrate, measure and predict within a time budget.

    `gpu.json` names the steps that did not fit into the budget, and those that failed with the
    reason.

    Args:
        out: folder for the results.
        sizes: the models.
        dtypes: the dtypes of each model.
        repeat: measurements of each step.
        budget: seconds.
        effort: what is measured for the calibration; by default it depends on the device.
        calibrated: the calibrated device, if it is calibrated already.
        console: where progress is shown; stderr by default.

    Returns:
        The table of `gpu.csv`.
    """
    console = console or Console(stderr=True)
    begun = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    device = jax.devices()[0]
    effort = effort or (CPU if device.platform == "cpu" else GPU)
    rows: list[GpuStep] = []
    cases = [replace(model, compute_dtype=dtype) for model in sizes for dtype in dtypes]  # pyright: ignore[reportArgumentType]
    with Progress(
        BarColumn(), TextColumn("{task.description}"), console=console, transient=True
    ) as bar:
        task = bar.add_task("calibrating", total=1.0 + len(cases))
        calibrated = calibrated or calibrate(
            [device],
            effort,
            lambda what, spent: bar.update(task, completed=spent, description=what),
            0.3 * budget,
        )
        clusters = Clusters(calibrated, autopar.cluster_of(Mesh([device], ("x",))))
        write_profile(out / "gpu_cluster.yaml", clusters.calibrated)
        left, longest, failed = list(cases), 0.0, dict[str, str]()
        while left and time.perf_counter() - begun + longest < budget:
            model, start = left.pop(0), time.perf_counter()
            bar.update(task, completed=1.0 + len(rows), description=step_name(model))
            try:
                rows.append(
                    measure(
                        model, clusters, repeat, least=0.05 if device.platform == "cpu" else 0.2
                    )
                )
            except Exception as error:  # the other steps still run
                failed[step_name(model)] = f"{type(error).__name__}: {error}"[:2000]
            jax.clear_caches()
            longest = max(longest, time.perf_counter() - start)
            _write(out, rows, left, failed, repeat)
    return _write(out, rows, left, failed, repeat)


def _write(
    out: Path,
    rows: Sequence[GpuStep],
    left: Sequence[Timed],
    failed: Mapping[str, str],
    repeat: int,
) -> pd.DataFrame:
    table = pd.DataFrame([asdict(row) for row in rows], columns=list(GpuStep.__dataclass_fields__))
    for name in PREDICTED:
        table[f"{name}_error"] = table[name] / table["measured"] - 1
    record = circumstances(repeat) | {
        "complete": not left,
        "not_measured": list(map(step_name, left)),
        "failed": failed,
    }
    write_text(out / "gpu.csv", table.to_csv(index=False, float_format="%.6g"))
    write_text(out / "gpu.json", json.dumps(record, indent=1) + "\n")
    return table


def circumstances(repeat: int) -> dict[str, Any]:
    """Return the device, versions and statistics that belong to a run's numbers."""
    device = jax.devices()[0]
    names = ("jax", "jaxlib", "flax", "optax", "numpy", "scipy")
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "device": device.device_kind,
        "driver": driver_version() if device.platform == "gpu" else None,
        "platform_version": device.client.platform_version,
        "versions": {"python": platform.python_version()} | {name: version(name) for name in names},
        "commit": checked_out_commit(),
        "repeats": repeat,
        "statistic": "median of the repeats, each the mean over steps one after the other",
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def checked_out_commit() -> str | None:
    """Return AUTOPAR_COMMIT, or else the commit that is checked out; None without git."""
    if commit := os.environ.get("AUTOPAR_COMMIT"):
        return commit
    try:
        git = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return git.stdout.strip()


def table_of(rows: pd.DataFrame) -> Table:
    """Return a table to print: measured milliseconds, and the errors of the predictions."""
    table = Table(
        "step",
        "dtype",
        "measured",
        *(name.replace("_", ", ") for name in PREDICTED),
        "memory",
        "analytic",
    )
    for row in rows.to_dict("records"):
        errors = (f"{row[f'{name}_error']:+.1%}" for name in PREDICTED)
        memory = (
            f"{row['memory_bytes'] / 1e9:.2f} GB",
            f"{row['analytic_memory_bytes'] / row['memory_bytes'] - 1:+.1%}",
        )
        table.add_row(
            f"{row['model']}, {row['size']}",
            row["dtype"],
            f"{1e3 * row['measured']:.3g} ms",
            *errors,
            *memory,
        )
    table.add_section()
    means = (f"{rows[f'{name}_error'].abs().mean():.1%}" for name in PREDICTED)
    table.add_row("mean absolute error", "", "", *means, "", "")
    return table


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--sizes", choices=list(SIZES), help="tiny ones on a CPU, by default")
    parser.add_argument("--models", nargs="+", choices=("MLP", "GPT", "ViT"), help="all by default")
    parser.add_argument(
        "--calibrated",
        type=Path,
        help="the gpu_cluster.yaml of an earlier run, in place of calibrating again",
    )
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--budget", type=float, default=540.0, help="seconds")
    flags = parser.parse_args()
    sizes = SIZES[flags.sizes or ("tiny" if jax.devices()[0].platform == "cpu" else "gpu")]
    chosen = [
        model for model in sizes if type(model).__name__ in (flags.models or ("MLP", "GPT", "ViT"))
    ]
    calibrated = Cluster.load(flags.calibrated) if flags.calibrated else None
    rows = run(flags.out, chosen, DTYPES, flags.repeat, flags.budget, calibrated=calibrated)
    console = Console()
    console.width = max(console.width, 160)  # the table needs it, also in a file
    console.print(table_of(rows))


if __name__ == "__main__":
    main()
