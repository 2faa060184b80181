"""Kernels of training steps on one GPU, profiled and predicted.

    python -m experiments.measurements.kernel_profiling --out DIR

It profiles steps of `experiments.measurements.gpu` with `jax.profiler`, matches launches to the
kernels of XLA's program, and writes `kernels.csv`, which has a row for all kernels of a step that
are alike. It shows which kernels cause the error of a step's prediction.
"""

import argparse
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import jax
import pandas as pd
from jax.profiler import ProfileData
from jax.sharding import Mesh

import autopar
from experiments.local_steps import next_state
from experiments.measurements.gpu import SIZES, Timed, step_name
from simulator import Cluster, Kernel, OpList
from simulator.hlo import parse_hlo
from simulator.transformer import Machine

STEPS = (
    (0, "bfloat16"),
    (1, "bfloat16"),
    (3, "bfloat16"),
    (4, "bfloat16"),
    (4, "float32"),
    (5, "bfloat16"),
    (5, "float32"),
)
"""The steps to profile: indices of `SIZES["gpu"]`, and dtypes."""

_PROFILED_STEPS = 3

_AUXILIARY = ("Memset", "nhwcAddPaddingKernel", "convertTensor_kernel")
"""Launches of libraries before a kernel, which clear memory, and pad and convert images."""

_NUMBERS = re.compile(r"[._]\d+")


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a kernel: its name in the profile, and its seconds."""

    name: str
    seconds: float


def profiled(model: Timed) -> tuple[str, list[list[Launch]]]:
    """Profile training steps on the first device.

    Args:
        model: the model to train.

    Returns:
        The text of XLA's program, and the launches of each step in their order.
    """
    init = jax.jit(lambda key: (model.init_state(key), model.make_batch(key)))
    state, batch = jax.block_until_ready(init(jax.random.key(0)))
    step = jax.jit(model.train_step, donate_argnums=0).lower(state, batch).compile()
    for _ in range(3):
        state = next_state(step(state, batch))
    jax.block_until_ready(state)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(_PROFILED_STEPS):
                state = next_state(step(state, batch))
            jax.block_until_ready(state)
        (path,) = Path(folder).rglob("*.xplane.pb")
        launches = launches_of(ProfileData.from_file(str(path)))
    count, rest = divmod(len(launches), _PROFILED_STEPS)
    if rest:
        raise ValueError(
            f"the profile has {len(launches)} launches in {_PROFILED_STEPS} steps; expected as many"
            " in each"
        )
    steps = [launches[i * count : (i + 1) * count] for i in range(_PROFILED_STEPS)]
    return step.as_text() or "", steps


def launches_of(profile: Any) -> list[Launch]:
    """Return the launches on the first GPU, in the order of their starts."""
    (plane,) = (plane for plane in profile.planes if plane.name == "/device:GPU:0")
    events = sorted(
        (event.start_ns, event.duration_ns, event.name)
        for line in plane.lines
        for event in line.events
    )
    return [Launch(name, 1e-9 * duration) for _, duration, name in events]


def seconds_of(body: OpList, steps: Sequence[Sequence[Launch]]) -> list[float]:
    """Return the seconds of each kernel of a program, as median of the steps.

    The auxiliary launches of libraries, which clear memory, sum partial products, and pad and
    convert images, count for the kernel that they serve.

    Args:
        body: the operations of the program.
        steps: the launches of each step.

    Raises:
        ValueError: the program has loops, or its number of kernels is not that of launches.
    """
    if others := [op for op in body if not isinstance(op, Kernel)]:
        raise ValueError(
            f"expected a program of kernels one after the other; this one has {others[0]}"
        )
    times = [_with_auxiliary(step) for step in steps]
    if len(times[0]) != len(body):
        raise ValueError(
            f"{len(times[0])} kernels were launched in a step, and the program has {len(body)}"
        )
    return [median(seconds) for seconds in zip(*times, strict=True)]


def _with_auxiliary(launches: Sequence[Launch]) -> list[float]:
    """Return the seconds of kernels with their auxiliary launches.

    Sums of partial products follow their kernel, the other launches precede it.
    """
    seconds = list[float]()
    before = 0.0
    for launch in launches:
        if "splitKreduce" in launch.name:
            seconds[-1] += launch.seconds
        elif any(name in launch.name for name in _AUXILIARY):
            before += launch.seconds
        else:
            seconds.append(before + launch.seconds)
            before = 0.0
    return seconds


def table_of(step: str, body: OpList, seconds: Sequence[float], cluster: Cluster) -> pd.DataFrame:
    """Return a row for all kernels of a step that are alike: their number and mean microseconds.

    Args:
        step: name of the step.
        body: the operations of its program.
        seconds: measured seconds of each.
        cluster: what they are predicted for.
    """
    model = Machine(cluster).kernels
    rows = [
        {
            "step": step,
            "kernel": _NUMBERS.sub("", kernel.name),
            "kind": kernel.kind,
            "dtype": kernel.dtype,
            "flops": kernel.flops,
            "bytes": kernel.bytes,
            "product": "x".join(map(str, (g.batch, g.m, g.n, g.k))) if (g := kernel.gemm) else "",
            "count": 1,
            "measured_us": 1e6 * measured,
            "predicted_us": 1e6 * model.seconds(kernel),
        }
        for kernel, measured in zip(body, seconds, strict=True)
        if isinstance(kernel, Kernel)
    ]
    alike = ["step", "kernel", "kind", "dtype", "flops", "bytes", "product"]
    together = {"count": "sum", "measured_us": "mean", "predicted_us": "mean"}
    return pd.DataFrame(rows).groupby(alike, as_index=False, sort=False).agg(together)


def main() -> None:
    """Profile steps, and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    flags = parser.parse_args()
    if jax.devices()[0].platform != "gpu":
        parser.error("no GPU is here; JAX's profiler names single kernels of GPUs only")
    cluster = autopar.cluster_of(Mesh(jax.devices()[:1], ("x",)))
    flags.out.mkdir(parents=True, exist_ok=True)
    tables = []
    for place, dtype in STEPS:
        model = replace(SIZES["gpu"][place], compute_dtype=dtype)  # pyright: ignore[reportArgumentType]
        program, steps = profiled(model)
        body = parse_hlo(program)
        tables.append(table_of(step_name(model), body, seconds_of(body, steps), cluster))
        pd.concat(tables).to_csv(flags.out / "kernels.csv", index=False, float_format="%.6g")


if __name__ == "__main__":
    main()
