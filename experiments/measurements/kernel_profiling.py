"""Single kernels of training steps on one GPU beside what the simulator says of each: `python -m experiments.measurements.kernel_profiling --out DIR`.

Profiles steps of `experiments.measurements.gpu` with `jax.profiler`, finds the kernel of XLA's program that each launch belongs to, and
writes `kernels.csv`, a row for all kernels of a step that are alike: where predictions of a step go wrong is read from it.
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
from experiments.measurements.gpu import SIZES, Timed, step_name
from experiments.scripts.measure_cells import next_state
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
"""What is profiled by default: places in `SIZES["gpu"]`, and dtypes."""

_BESIDE = ("Memset", "nhwcAddPaddingKernel", "convertTensor_kernel")
_NUMBERS = re.compile(r"[._]\d+")


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel as it ran: what the profiler calls it, and its seconds."""

    name: str
    seconds: float


def profiled(model: Timed, steps: int = 3) -> tuple[str, list[list[Launch]]]:
    """XLA's program of a training step on the first device, and the launches of each of so many steps in their order."""
    init = jax.jit(lambda key: (model.init_state(key), model.make_batch(key)))
    state, batch = jax.block_until_ready(init(jax.random.key(0)))
    step = jax.jit(model.train_step, donate_argnums=0).lower(state, batch).compile()
    for _ in range(3):
        state = next_state(step(state, batch))
    jax.block_until_ready(state)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(steps):
                state = next_state(step(state, batch))
            jax.block_until_ready(state)
        (path,) = Path(folder).rglob("*.xplane.pb")
        launches = launches_of(ProfileData.from_file(str(path)))
    count, rest = divmod(len(launches), steps)
    if rest:
        raise ValueError(
            f"the profile has {len(launches)} launches in {steps} steps; expected as many in each"
        )
    return step.as_text() or "", [launches[i * count : (i + 1) * count] for i in range(steps)]


def launches_of(profile: Any) -> list[Launch]:
    """What a profile has of the first GPU, in the order of starting."""
    (plane,) = (plane for plane in profile.planes if plane.name == "/device:GPU:0")
    events = sorted(
        (event.start_ns, event.duration_ns, event.name)
        for line in plane.lines
        for event in line.events
    )
    return [Launch(name, 1e-9 * duration) for _, duration, name in events]


def seconds_of(body: OpList, steps: Sequence[Sequence[Launch]]) -> list[float]:
    """Seconds of each kernel of a program, the median of the steps.

    What libraries launch beside a kernel (they clear memory, sum partial products, pad and convert images) counts for that kernel.

    Raises:
        ValueError: the program has loops, or other kernels than were launched.
    """
    if others := [op for op in body if not isinstance(op, Kernel)]:
        raise ValueError(
            f"expected a program of kernels one after the other; this one has {others[0]}"
        )
    times = [_together(step) for step in steps]
    if len(times[0]) != len(body):
        raise ValueError(
            f"{len(times[0])} kernels were launched in a step, and the program has {len(body)}"
        )
    return [median(each) for each in zip(*times, strict=True)]


def _together(launches: Sequence[Launch]) -> list[float]:
    """Seconds of kernels, each with what is launched beside it: before it, but for sums of partial products."""
    seconds, before = list[float](), 0.0
    for launch in launches:
        if "splitKreduce" in launch.name:
            seconds[-1] += launch.seconds
        elif any(name in launch.name for name in _BESIDE):
            before += launch.seconds
        else:
            seconds.append(before + launch.seconds)
            before = 0.0
    return seconds


def table_of(step: str, body: OpList, seconds: Sequence[float], cluster: Cluster) -> pd.DataFrame:
    """A row for all kernels of a step that are alike: how many there are, and the mean of their microseconds, measured and predicted."""
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
