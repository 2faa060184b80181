"""Plans on one GPU: bytes and seconds as planned, as compiled, and as measured.

    python -m experiments.validation.gpu_plans --out DIR [--sizes tiny] [--seconds S]

Each case is a training step of a model, planned without a memory budget, or within a share of the
bytes that its fastest plan needs. Within a budget, values are recomputed or moved to host memory.
Each case has a process of its own, because JAX can't reset its counter of peak bytes. Some of them
plan at a time, and one uses the GPU. The script writes `plans.csv` after every case, and
`plans.json` with versions and failures.
"""

import argparse
import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jax.sharding import Mesh

import autopar
from autopar.util import benchmark_func
from experiments.local_steps import next_state
from experiments.measurements.gpu import circumstances
from experiments.models import BERT, GPT, LSTM, MLP, Llama, Model, MoE, UNet, ViT, WideResNet
from experiments.validation.llama_step import LlamaSizes
from simulator import Cluster, Program, simulate, unmodelled_kernels
from simulator.files import write_text
from simulator.hlo import parse_hlo

type Step = tuple[Callable[..., Any], tuple[Any, ...]]
"""A training step, and the shapes of its arguments."""

_LLAMA3_8B = LlamaSizes(4, 4096, 32, 8, 14336, vocab=128256, seq=8192)
"""Four layers of Llama 3 8B (Grattafiori et al., 2024, table 3)."""

_TINY_GPT = GPT(2, 32, 2, sequence_length=16, vocab_size=64, batch_size=4)

MODELS: dict[str, dict[str, Model]] = {
    "gpu": {
        "gpt": GPT(16, 1024, 16, 1024, 51200, batch_size=8, compute_dtype="bfloat16"),
        "bert": BERT(12, 768, 12, 512, 30528, batch_size=32, compute_dtype="bfloat16"),
        "llama": Llama(12, 1024, 16, 4, 2816, 1024, 32000, batch_size=8, compute_dtype="bfloat16"),
        "moe": MoE(6, 768, 16, 8, 2048, 1024, 32000, batch_size=8, compute_dtype="bfloat16"),
        "vit": ViT(12, 1024, 16, 16, 224, 1000, batch_size=64, compute_dtype="bfloat16"),
        "wide_resnet": WideResNet(
            50, channels=128, width=2, image_size=224, num_classes=1024, batch_size=32
        ),
        "unet": UNet(channels=128, depth=2, image_size=64, batch_size=64),
        "lstm": LSTM(1, 2048, sequence_length=64, vocab_size=10000, batch_size=256),
        "mlp": MLP(dim=4096, num_layers=8, batch_size=8192),
    },
    "tiny": {
        "gpt": _TINY_GPT,
        "mlp": MLP(dim=64, num_layers=2, batch_size=32),
    },
}
"""The models of `experiments.models` by name: those to measure on a GPU, and tiny ones."""

Recomputation = Literal["keep", "auto"]
Offload = Literal["none", "auto"]


@dataclass(frozen=True, slots=True)
class BudgetCase:
    """A model to plan within a share of the memory that its fastest plan needs.

    Attributes:
        model: its name: see `step_of`.
        share: memory budget as a share of the bytes of the fastest plan; 0 for no budget.
        remat: `ShardParallel.remat`.
        offload: `ShardParallel.offload`.
    """

    model: str
    share: float = 0.0
    remat: Recomputation = "keep"
    offload: Offload = "none"


CASES: dict[str, tuple[BudgetCase, ...]] = {
    "gpu": (
        *map(BudgetCase, ("gpt", "llama3-8b-4-layers-mlp", "llama", "hf-gpt2", "moe", "vit")),
        *(BudgetCase("gpt", share, "auto") for share in (0.7, 0.4)),
        BudgetCase("gpt", 0.4, "keep", "auto"),
        BudgetCase("llama", 0.5, "auto"),
        BudgetCase("moe", 0.5, "auto"),
        BudgetCase("vit", 0.5, "auto"),
        BudgetCase("vit", 0.5, "keep", "auto"),
        *map(BudgetCase, ("bert", "wide_resnet", "unet", "lstm", "mlp", "hf-vit-base")),
        BudgetCase("llama3-8b-4-layers-full"),
        BudgetCase("hf-gpt2", 0.5, "auto"),
        BudgetCase("wide_resnet", 0.7, "auto"),
        BudgetCase("bert", 0.5, "auto"),
        BudgetCase("llama", 0.3, "auto"),
        BudgetCase("hf-gpt2-medium"),
    ),
    "tiny": (BudgetCase("gpt"), BudgetCase("gpt", 0.85, "auto"), BudgetCase("mlp", 0.1, "auto")),
}
"""The most important ones first, because the time on a GPU may end."""


@dataclass(frozen=True, slots=True)
class PlanRow:
    """A plan that ran, in seconds and bytes.

    The table also has relative errors: of both predictions of seconds, and of the planned bytes.

    Attributes:
        model: as in `BudgetCase`, like share, remat and offload.
        budget: the memory budget; 0 for none.
        planned_bytes: bytes by the planner's estimate.
        compiled_bytes: bytes by XLA's buffer assignment.
        peak_bytes: most bytes that JAX's allocator had handed out in a step; 0 if compilation,
            which tries kernels on the GPU, took more.
        planned_seconds: prediction from the planner's work with the shipped device.
        compiled_seconds: prediction from XLA's program with the shipped device.
        measured: median of the repeats.
        spread: standard deviation of the repeats.
        loss: loss of the third step, NaN if the step returns none. Plans of one model have the
            same arguments.
        recomputed: number of values that the plan recomputes.
        offloaded: number of values that the plan moves to host memory.
        unmodelled_kernels: number of kernels in XLA's program that the cost model leaves out.
        warnings: those of the plan.
    """

    model: str
    share: float
    remat: str
    offload: str
    parameters: int
    budget: int
    planned_bytes: int
    compiled_bytes: int
    peak_bytes: int
    planned_seconds: float
    compiled_seconds: float
    measured: float
    spread: float
    loss: float
    recomputed: int
    offloaded: int
    unmodelled_kernels: int
    planning_seconds: float
    compile_seconds: float
    warnings: str


def step_of(name: str, sizes: str) -> Step:
    """Return the training step of a model.

    Args:
        name: a name of `MODELS`; "hf-" and a model of `experiments.reach.published_sizes`, which
            imports transformers; or "llama3-8b-4-layers-" and what the backward pass recomputes,
            with cuDNN's attention.
        sizes: "gpu" or "tiny".
    """
    if name in MODELS[sizes]:
        model = MODELS[sizes][name]
        return model.train_step, model.abstract_args()
    if name.startswith("hf-"):
        from experiments.reach.published_sizes import build

        return build(name.removeprefix("hf-"), rows=64 if "vit" in name else 8)
    for recomputed in ("mlp", "full"):
        if name == f"llama3-8b-4-layers-{recomputed}":
            return _LLAMA3_8B.training_step(1, recomputed)
    raise ValueError(f"no such model: {name!r}; expected one of {', '.join(MODELS[sizes])}")


def arguments(abstract: Any, seed: int = 0) -> Any:
    """Return arguments of the given shapes on the host.

    Weights are random, norms and biases 1, moments of optimizers 0, and indices below 64.
    """
    draw = np.random.default_rng(seed)

    def filled(path: Any, leaf: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.key(seed)
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            upper = 64 if leaf.ndim else 1
            return draw.integers(0, upper, leaf.shape).astype(leaf.dtype)
        if {"mu", "nu"} & {getattr(key, "name", "") for key in path}:
            return np.zeros(leaf.shape, leaf.dtype)
        if leaf.ndim < 2:
            return np.ones(leaf.shape, leaf.dtype)
        return (0.02 * draw.standard_normal(leaf.shape, np.float32)).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(filled, abstract)


def measure(case: BudgetCase, sizes: str, lock: Path, repeat: int, least: float) -> PlanRow:
    """Plan a case, and time and weigh its steps on the first device.

    Args:
        case: the case.
        sizes: "gpu" or "tiny".
        lock: a file that is locked while the device computes.
        repeat: number of measurements.
        least: seconds that steps in a row take in each measurement, at least.
    """
    device = jax.devices()[0]
    cluster = autopar.cluster_of(Mesh([device], ("x",)))
    train_step, abstract = step_of(case.model, sizes)
    begun = time.perf_counter()
    plan, budget = _planned(case, train_step, abstract, cluster)
    planning_seconds = time.perf_counter() - begun
    step = autopar.parallelize(
        train_step, method=autopar.PlanMethod(plan, [device]), donate_argnums=(0,)
    )
    concrete = arguments(abstract)
    with locked(lock):
        begun = time.perf_counter()
        executable = step.get_executable(*abstract)
        compile_seconds = time.perf_counter() - begun
        before = _peak_bytes(device)
        args = list(executable.shard_args(*concrete))
        del concrete
        seconds, loss = _timed(step, args, repeat, least)
        peak = _peak_bytes(device)
    body = parse_hlo(executable.get_hlo_text("optimized"))
    program = Program.single(body, memory=executable.memory[0])
    analytic = autopar.simulate(train_step, abstract, plan, cluster, fidelity="analytic")
    return PlanRow(
        **asdict(case),
        parameters=_num_parameters(abstract[0]),
        budget=budget,
        planned_bytes=analytic.memory[0].total,
        compiled_bytes=executable.get_total_allocation_size(),
        peak_bytes=peak if peak > before else 0,
        planned_seconds=analytic.makespan,
        compiled_seconds=simulate(program, cluster).makespan,
        measured=float(np.median(seconds)),
        spread=float(np.std(seconds)),
        loss=loss,
        recomputed=len(plan.recomputed),
        offloaded=len(plan.offloaded) + len(plan.offloaded_results),
        unmodelled_kernels=sum(unmodelled_kernels(body).values()),
        planning_seconds=planning_seconds,
        compile_seconds=compile_seconds,
        warnings="; ".join(plan.warnings),
    )


def _planned(
    case: BudgetCase, train_step: Callable[..., Any], abstract: Any, cluster: Cluster
) -> tuple[autopar.Plan, int]:
    """Return the plan of a case, and the budget that it keeps; 0 for none."""
    method = autopar.ShardParallel(
        devices=jax.devices()[:1], remat=case.remat, offload=case.offload
    )
    plan = autopar.plan_step(train_step, abstract, method=method, cluster=cluster)
    if not case.share:
        return plan, 0
    budget = int(case.share * plan.predicted_bytes)
    method = replace(method, memory_budget=budget)
    return autopar.plan_step(train_step, abstract, method=method, cluster=cluster), budget


def _timed(
    step: Callable[..., Any], args: list[Any], repeat: int, least: float
) -> tuple[np.ndarray, float]:
    """Run steps one after the other, the first one with `args`, which are on the device.

    Returns:
        The seconds of a step in each measurement, and the loss of the third step, NaN for none.
    """
    loss: Any = np.nan

    def run() -> None:
        nonlocal loss
        result = step(*args)
        args[0] = next_state(result)
        if type(result) is tuple:
            loss = result[1]
            args[2:] = result[2:]

    for _ in range(3):
        run()
    third = float(loss)
    seconds = benchmark_func(
        run,
        lambda: jax.block_until_ready((args, loss)),
        warmup=0,
        repeat=repeat,
        number=1,
        min_repeat_second=least,
    )
    return seconds, third


def _num_parameters(state: Any) -> int:
    params = state.params if hasattr(state, "params") else state[0]
    return sum(leaf.size for leaf in jax.tree.leaves(params))


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file while the block runs."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _peak_bytes(device: Any) -> int:
    return (device.memory_stats() or {}).get("peak_bytes_in_use", 0)


def run(
    out: Path,
    sizes: str,
    cases: Sequence[BudgetCase],
    repeat: int,
    seconds: float,
    workers: int,
    environment: dict[str, str] | None = None,
) -> pd.DataFrame:
    """Measure cases, each in a process, within a time budget.

    Args:
        out: folder for the results.
        sizes: "gpu" or "tiny".
        cases: the cases, in order.
        repeat: number of measurements of each.
        seconds: the time budget. Cases that are not measured then are named in `plans.json`.
        workers: number of processes at a time.
        environment: more environment variables of the processes.

    Returns:
        The table of `plans.csv`.
    """
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + seconds
    rows: dict[BudgetCase, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    table = pd.DataFrame()

    def measured(case: BudgetCase) -> dict[str, Any]:
        command = [sys.executable, "-m", "experiments.validation.gpu_plans", "--out", str(out)]
        command += ["--sizes", sizes, "--repeat", str(repeat), "--case", json.dumps(asdict(case))]
        process = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=max(end - time.monotonic(), 0.1),
            env={**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | (environment or {}),
        )
        if process.returncode:
            raise RuntimeError(_reason(process.stderr))
        return json.loads(process.stdout.splitlines()[-1])

    with ThreadPoolExecutor(workers) as pool:
        futures = {pool.submit(measured, case): case for case in cases}
        for future in as_completed(futures):
            case = futures[future]
            try:
                rows[case] = future.result()
                print(json.dumps(rows[case]), flush=True)
            except subprocess.TimeoutExpired:
                failed[str(case)] = "not measured: the time was over"
            except Exception as error:  # the other cases still run
                failed[str(case)] = str(error)
                print(case, failed[str(case)], flush=True)
            table = pd.DataFrame([rows[case] for case in cases if case in rows])
            _write(out, table, failed, repeat)
    return table


def _reason(errors: str) -> str:
    """Return the message of the last exception that a process printed."""
    _, _, message = errors.rpartition("\n  File ")
    return message.partition("\n")[2].partition("\n")[2].strip()[:1000] or errors[-1000:]


def _write(out: Path, table: pd.DataFrame, failed: dict[str, str], repeat: int) -> None:
    """Write the table, with relative errors of predictions, and what belongs to it."""
    if not table.empty:
        for name in ("planned", "compiled"):
            table[f"{name}_error"] = table[f"{name}_seconds"] / table["measured"] - 1
        table["memory_error"] = table["planned_bytes"] / table["compiled_bytes"] - 1
    record = circumstances(repeat) | {"failed": failed}
    write_text(out / "plans.csv", table.to_csv(index=False, float_format="%.6g"))
    write_text(out / "plans.json", json.dumps(record, indent=1) + "\n")


def main() -> None:
    """Measure all cases, or one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--sizes", choices=list(CASES), default="gpu")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=420.0, help="seconds for all cases")
    parser.add_argument("--workers", type=int, default=4, help="processes at a time")
    parser.add_argument("--case", help="one case as JSON, measured in this process")
    flags = parser.parse_args()
    if flags.case is None:
        cases = CASES[flags.sizes]
        run(flags.out, flags.sizes, cases, flags.repeat, flags.seconds, flags.workers)
        return
    case = BudgetCase(**json.loads(flags.case))
    least = 0.2 if flags.sizes == "gpu" else 0.01
    row = measure(case, flags.sizes, flags.out / ".device.lock", flags.repeat, least)
    print(json.dumps(asdict(row)))


if __name__ == "__main__":
    main()
