"""The Alpa quickstart on 8 V100s: predicted step time and memory, and the numbers of its tutorial.

    python -m experiments.validation.alpa_quickstart

The published numbers are those of Alpa's documentation, "Alpa Quickstart", on one AWS p3.16xlarge;
its GB is 2**30 bytes. The cluster file is not fitted to them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

import autopar
from experiments.models import MLP
from simulator import Cluster, simulate

MODEL = MLP(dim=2048, num_layers=10, batch_size=2048)
GIB = 2**30


@dataclass(frozen=True, slots=True)
class TutorialResult:
    """The numbers that the tutorial prints for one way to run the step."""

    seconds: float
    memory_gib: float


@dataclass(frozen=True, slots=True)
class QuickstartRow:
    """A published result, and its prediction."""

    strategy: str
    published: TutorialResult
    seconds: float
    memory_gib: float

    @property
    def seconds_error(self) -> float:
        """Relative error of the predicted time; positive if it is too long."""
        return self.seconds / self.published.seconds - 1

    @property
    def memory_error(self) -> float:
        """Relative error of the predicted memory; positive if it is too much."""
        return self.memory_gib / self.published.memory_gib - 1


def compare(cluster: Cluster) -> Iterator[QuickstartRow]:
    """Compile and simulate the three ways in which the tutorial runs its step."""
    yield _row("serial", TutorialResult(150.57e-3, 2.78), compile_serial(cluster), cluster)
    yield _row(
        "data parallel (pmap)", TutorialResult(33.55e-3, 3.76), compile_pmap(cluster), cluster
    )
    yield _row(
        "Alpa (here: column/row by hand)",
        TutorialResult(22.85e-3, 0.50),
        compile_megatron(cluster),
        cluster,
    )


def compile_serial(cluster: Cluster) -> autopar.TargetExecutable:
    """Compile the step for one device; it donates its state."""
    mesh = autopar.target_mesh(cluster, (1,), ("x",))
    args = _place(MODEL.abstract_args(), mesh, lambda path: PartitionSpec())
    return autopar.compile_for(jax.jit(MODEL.train_step, donate_argnums=0), args, cluster)


def compile_pmap(cluster: Cluster) -> autopar.TargetExecutable:
    """Compile data parallelism as in the tutorial, whose `jax.pmap` averages gradients.

    The state is *not* donated, so that two copies of it are live.
    """
    devices = autopar.target_devices(cluster)
    state, batch = MODEL.abstract_args()
    replicas = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((len(devices), *x.shape), x.dtype), state
    )
    shards = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            (len(devices), x.shape[0] // len(devices), *x.shape[1:]), x.dtype
        ),
        batch,
    )

    def averaged(fun: Any) -> Any:
        return lambda *args: jax.lax.pmean(jax.value_and_grad(fun)(*args), "batch")

    step = jax.pmap(
        partial(MODEL.train_step, value_and_grad=averaged), axis_name="batch", devices=devices
    )
    return autopar.compile_for(step, (replicas, shards), cluster)


def compile_megatron(cluster: Cluster) -> autopar.TargetExecutable:
    """Compile tensor parallelism over all devices, with the batch replicated.

    Kernels are split by columns and by rows in turn.
    """
    mesh = autopar.target_mesh(cluster, (cluster.num_devices,), ("x",))
    state, batch = _place(MODEL.abstract_args(), mesh, _megatron_spec)
    shardings = jax.tree.map(lambda x: x.sharding, state)
    step = jax.jit(MODEL.train_step, donate_argnums=0, out_shardings=shardings)
    return autopar.compile_for(step, (state, batch), cluster)


def _megatron_spec(path: str) -> PartitionSpec:
    _, dense, rest = path.partition("Dense_")
    if not dense:
        return PartitionSpec()
    by_columns = int(rest.split("'")[0]) % 2 == 0
    if "kernel" in rest:
        return PartitionSpec(None, "x") if by_columns else PartitionSpec("x", None)
    return PartitionSpec("x") if by_columns else PartitionSpec()


def _place(args: Any, mesh: Mesh, spec: Any) -> Any:
    def place(path: Any, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh, spec(jax.tree_util.keystr(path)))
        )

    return jax.tree_util.tree_map_with_path(place, args)


def _row(
    strategy: str, published: TutorialResult, executable: autopar.TargetExecutable, cluster: Cluster
) -> QuickstartRow:
    seconds = simulate(executable.program, cluster).makespan
    return QuickstartRow(strategy, published, seconds, executable.memory.total / GIB)


def main() -> None:
    """Print the comparison."""
    cluster = Cluster.load("p3.16xlarge")
    table = Table(
        "strategy", title=f"10-layer MLP, dim 2048, batch 2048, float32, on {cluster.name}"
    )
    for heading in ("ms published", "predicted", "error", "GiB published", "predicted", "error"):
        table.add_column(heading, justify="right")
    for row in compare(cluster):
        times = (
            f"{row.published.seconds * 1e3:.2f}",
            f"{row.seconds * 1e3:.2f}",
            f"{row.seconds_error:+.1%}",
        )
        memory = (
            f"{row.published.memory_gib:.2f}",
            f"{row.memory_gib:.2f}",
            f"{row.memory_error:+.1%}",
        )
        table.add_row(row.strategy, *times, *memory)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
