"""Llama 3 8B on 128 H100: the plan beside FSDP, and FSDP with tensor parallelism by hand.

    python -m experiments.validation.llama_plans [--layers N] [--output FILE]

Every strategy is planned with each of two policies of recomputation, compiled for GPUs that are
absent, and predicted from the compiled program. By hand, 16 x 8 devices split weights as
Megatron-LM does along the second axis and as FSDP does along the first. torchtitan's step with
these degrees takes 366 ms and that of PyTorch's AutoParallel 379 ms (meta-pytorch/autoparallel),
for a batch of one or two sequences for each of the 16 groups of 8 GPUs.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace

from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

import autopar
from experiments.growing_tables import table_options, written
from experiments.validation.llama_step import LlamaSizes, Recomputed
from simulator import Cluster

CLUSTER = Cluster.load("dgx_h100").with_size(16)
LLAMA_8B = LlamaSizes(32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256, seq=8192)
GROUPS, DEGREE = 16, 8
"""Degrees of data and tensor parallelism by hand."""

_SPLIT_BY_COLUMN, _SPLIT_BY_ROW = P(None, "x", "y"), P(None, "y", "x")
_SPECS = {
    "embedding": P("y", "x"),
    "head": P("x", "y"),
    **{f"layers/{name}": _SPLIT_BY_COLUMN for name in ("q", "k", "v", "gate", "up")},
    **{f"layers/{name}": _SPLIT_BY_ROW for name in ("o", "down")},
}
_PINS = {
    **{f"0/{state}/{name}": spec for state in ("0", "1/*") for name, spec in _SPECS.items()},
    "1/*": P("x", None),
}
BY_HAND = autopar.ShardParallel((GROUPS, DEGREE), options=autopar.ShardingOptions(pins=_PINS))

STRATEGIES: Mapping[str, autopar.PlanningMethod] = {
    "FSDP": autopar.Zero3Parallel(),
    "FSDP x TP by hand": BY_HAND,
    "plan, 128": autopar.ShardParallel(),
    "plan, 16 x 8": autopar.ShardParallel((GROUPS, DEGREE)),
}


@dataclass(frozen=True, slots=True)
class StrategyRow:
    """A strategy with one policy of recomputation.

    Attributes:
        sequences: sequences in the batch of all GPUs.
        strategy: a name in `STRATEGIES`.
        recompute: what the backward pass recomputes.
        planned_s: planned seconds of the step.
        compiled_s: predicted seconds of the compiled step.
        planned_gb: planned memory of a GPU in GB.
        compiled_gb: memory of a GPU in GB as compiled.
    """

    sequences: int
    strategy: str
    recompute: Recomputed
    planned_s: float
    compiled_s: float
    planned_gb: float
    compiled_gb: float


def strategy_rows(llama: LlamaSizes, batches: Iterable[int]) -> Iterator[StrategyRow]:
    """Yield a row for each batch, strategy and policy; one mesh axis needs a sequence per GPU."""
    for sequences in batches:
        for strategy, method in STRATEGIES.items():
            if isinstance(method.devices, tuple) or sequences >= CLUSTER.num_devices:
                for recompute in ("mlp", "full"):
                    yield _row(llama, sequences, strategy, method, recompute)


def _row(
    llama: LlamaSizes,
    sequences: int,
    strategy: str,
    method: autopar.PlanningMethod,
    recompute: Recomputed,
) -> StrategyRow:
    step, args = llama.training_step(sequences, recompute)
    plan = autopar.plan_step(step, args, method=method, cluster=CLUSTER)
    compiled = autopar.predict(step, args, plan, CLUSTER, fidelity="compiled", donate_argnums=(0,))
    return StrategyRow(
        sequences,
        strategy,
        recompute,
        round(plan.predicted_seconds, 4),
        round(compiled.seconds, 4),
        round(plan.predicted_bytes / 1e9, 2),
        round(sum(compiled.memory.parts.values()) / 1e9, 2),
    )


def main() -> None:
    """Write the table, and print it."""
    parser = table_options(__doc__, "llama_plans")
    parser.add_argument("--layers", type=int, default=LLAMA_8B.layers, help="number of layers")
    args = parser.parse_args()
    llama = replace(LLAMA_8B, layers=args.layers)
    names = [field.name for field in fields(StrategyRow)]
    table = Table(*names, title=f"Llama 3 8B, {args.layers} layers, on 128 H100")
    for row in written(strategy_rows(llama, (GROUPS, 2 * GROUPS, 128, 256)), args.output):
        table.add_row(*map(str, asdict(row).values()))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
