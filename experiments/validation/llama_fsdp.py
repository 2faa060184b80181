"""Llama 2 70B with cuDNN's attention, FSDP on 64 H100: compiled, in closed form, and in MaxText.

    python -m experiments.validation.llama_fsdp [--layers N]

The step is plain JAX with `jax.nn.dot_product_attention(implementation="cudnn")`, planned by
`autopar.Zero3Parallel` and compiled for GPUs that are absent. MaxText reports 6.999 s a step for
its Llama 2 70B with FSDP on 64 H100. Its table doesn't say what the backward pass recomputes, so
both policies that fit in memory stand beside it.
"""

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from rich.console import Console
from rich.table import Table

import autopar
from experiments.validation.llama_step import LlamaSizes, Recomputed
from simulator import Cluster, Prediction
from simulator.transformer import JITTED, Execution, Machine, Transformer, predict

MAXTEXT_SECONDS = 6.999
HOSTS = 8
BATCH = 2 * 8 * HOSTS
LLAMA_70B = LlamaSizes(80, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocab=32000, seq=4096)


@dataclass(frozen=True, slots=True)
class LlamaRow:
    """A policy of recomputation, with both predictions.

    Attributes:
        recompute: what the backward pass recomputes.
        compiled: the prediction from the compiled program.
        formula: the prediction in closed form.
    """

    recompute: Recomputed
    compiled: Prediction
    formula: Prediction


def compare(
    layers: int = 80, kinds: tuple[Recomputed, ...] = ("mlp", "full")
) -> Iterator[LlamaRow]:
    """Predict the step with each policy of recomputation.

    Args:
        layers: number of layers.
        kinds: what the backward pass recomputes.
    """
    cluster = Cluster.load("dgx_h100").with_size(HOSTS)
    llama = replace(LLAMA_70B, layers=layers)
    for kind in kinds:
        yield LlamaRow(kind, _compiled(llama, kind, cluster), _formula(llama, kind, cluster))


def _formula(llama: LlamaSizes, kind: Recomputed, cluster: Cluster) -> Prediction:
    model = Transformer.model_validate(
        {
            **asdict(llama),
            "gated": True,
            "tied": False,
            "learned_positions": False,
            "biases": False,
            "dropout": False,
            "attention": "cudnn",
        }
    )
    execution = Execution.model_validate(
        {
            "data": cluster.num_devices,
            "microbatch": BATCH // cluster.num_devices,
            "global_batch": BATCH,
            "zero": 3,
            "recompute": kind,
            "overlap_gradients": True,
            "communicated_gradient_bytes": 2,
            "casts_parameters": True,
            "composed": ["norm_by_xla"],
        }
    )
    return predict(model, execution, Machine(cluster, JITTED))


def _compiled(llama: LlamaSizes, kind: Recomputed, cluster: Cluster) -> Prediction:
    step, args = llama.training_step(BATCH, kind)
    plan = autopar.plan_step(step, args, method=autopar.Zero3Parallel(), cluster=cluster)
    tokens = BATCH * llama.seq
    return autopar.predict(
        step, args, plan, cluster, tokens=tokens, fidelity="compiled", donate_argnums=(0,)
    )


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=80, help="number of layers")
    layers = parser.parse_args().layers
    table = Table("recomputes", title=f"Llama 2 70B, {layers} layers, FSDP on {8 * HOSTS} H100")
    for heading in ("compiled, s", "formula, s", "MaxText, s", "compiled, GB", "formula, GB"):
        table.add_column(heading, justify="right")
    for row in compare(layers):
        table.add_row(
            row.recompute,
            f"{row.compiled.seconds:.2f}",
            f"{row.formula.seconds:.2f}",
            f"{MAXTEXT_SECONDS}" if layers == 80 else "",
            f"{sum(row.compiled.memory.parts.values()) / 1e9:.1f}",
            f"{sum(row.formula.memory.parts.values()) / 1e9:.1f}",
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
