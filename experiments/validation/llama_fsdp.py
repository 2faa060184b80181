"""Llama 2 70B with cuDNN's attention, FSDP on 64 H100: compiled, in closed form, and in MaxText.

    python -m experiments.validation.llama_fsdp [--layers N]

The step is plain JAX with `jax.nn.dot_product_attention(implementation="cudnn")`, planned by
`autopar.Zero3Parallel` and compiled for GPUs that are absent. MaxText reports 6.999 s a step for
its Llama 2 70B with FSDP on 64 H100. Its table doesn't say what the backward pass recomputes, so
both policies that fit in memory stand beside it.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name
from rich.console import Console
from rich.table import Table

import autopar
from simulator import Cluster, Prediction
from simulator.transformer import JITTED, Execution, Machine, Transformer, predict

MAXTEXT_SECONDS = 6.999
HOSTS = 8
SEQ = 4096
BATCH = 2 * 8 * HOSTS
SIZES = {"hidden": 8192, "heads": 64, "kv_heads": 8, "ffn": 28672, "vocab": 32000, "seq": SEQ}
HEAD = SIZES["hidden"] // SIZES["heads"]

Arrays = dict[str, Any]


@dataclass(frozen=True, slots=True)
class LlamaRow:
    """A policy of recomputation, with both predictions.

    Attributes:
        recompute: what the backward pass recomputes, as `Execution.recompute` calls it.
        compiled: the prediction from the compiled program.
        formula: the prediction in closed form.
    """

    recompute: str
    compiled: Prediction
    formula: Prediction


def compare(layers: int = 80, kinds: tuple[str, ...] = ("mlp", "full")) -> Iterator[LlamaRow]:
    """Predict the step with each policy of recomputation.

    Args:
        layers: number of layers.
        kinds: what the backward pass recomputes.
    """
    cluster = Cluster.load("dgx_h100").with_size(HOSTS)
    for kind in kinds:
        yield LlamaRow(kind, _compiled(layers, kind, cluster), _formula(layers, kind, cluster))


def _formula(layers: int, kind: str, cluster: Cluster) -> Prediction:
    model = Transformer.model_validate(
        {
            "layers": layers,
            **SIZES,
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
            "composed": ["norm_by_xla"],
        }
    )
    return predict(model, execution, Machine(cluster, JITTED))


def _compiled(layers: int, kind: str, cluster: Cluster) -> Prediction:
    step, args = training_step(layers, kind)
    plan = autopar.plan_step(step, args, method=autopar.Zero3Parallel(), cluster=cluster)
    return autopar.predict(
        step, args, plan, cluster, tokens=BATCH * SEQ, fidelity="compiled", donate_argnums=(0,)
    )


def training_step(layers: int, kind: str) -> tuple[Callable[..., Any], tuple[Any, Any]]:
    """Return a step of AdamW whose layers are in a scan, and its abstract arguments.

    Args:
        layers: number of layers.
        kind: "mlp" saves what attention projects and computes, "full" only the inputs of layers.
    """
    block = jax.checkpoint(_block)
    if kind == "mlp":
        saved = jax.checkpoint_policies.save_only_these_names("projection", "context")
        block = jax.checkpoint(_block, policy=saved)
    optimizer = optax.adamw(1e-4)

    def loss(params: Arrays, batch: Arrays) -> jax.Array:
        stream = params["embedding"].astype(jnp.bfloat16)[batch["tokens"]]
        stream, _ = jax.lax.scan(lambda x, layer: (block(x, layer), None), stream, params["layers"])
        logits = _norm(stream, params["norm"]) @ params["head"].astype(jnp.bfloat16)
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits.astype(jnp.float32), batch["labels"]
        )
        return losses.mean()

    def step(state: tuple[Any, Any], batch: Arrays) -> tuple[tuple[Any, Any], jax.Array]:
        params, moments = state
        value, gradients = jax.value_and_grad(loss)(params, batch)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    params = _parameters(layers)
    tokens = jax.ShapeDtypeStruct((BATCH, SEQ), jnp.int32)
    state = params, jax.eval_shape(optimizer.init, params)
    return step, (state, {"tokens": tokens, "labels": tokens})


def _parameters(layers: int) -> Arrays:
    h, keys, ffn, vocab = SIZES["hidden"], SIZES["kv_heads"] * HEAD, SIZES["ffn"], SIZES["vocab"]
    shapes = {
        "q": (h, h),
        "k": (h, keys),
        "v": (h, keys),
        "o": (h, h),
        "gate": (h, ffn),
        "up": (h, ffn),
        "down": (ffn, h),
        "norm1": (h,),
        "norm2": (h,),
    }
    return {
        "embedding": _abstract(vocab, h),
        "head": _abstract(h, vocab),
        "norm": _abstract(h),
        "layers": {name: _abstract(layers, *shape) for name, shape in shapes.items()},
    }


def _abstract(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _block(x: jax.Array, layer: Arrays) -> jax.Array:
    """Return the stream after a layer; `checkpoint_name` marks what may be saved."""
    w = {name: value.astype(jnp.bfloat16) for name, value in layer.items()}
    batch = x.shape[0]
    y = _norm(x, layer["norm1"])
    q, k, v = (checkpoint_name(y @ w[name], "projection") for name in ("q", "k", "v"))
    context = jax.nn.dot_product_attention(
        _rotated(q.reshape(batch, SEQ, -1, HEAD)),
        _rotated(k.reshape(batch, SEQ, -1, HEAD)),
        v.reshape(batch, SEQ, -1, HEAD),
        is_causal=True,
        implementation="cudnn",
    )
    context = checkpoint_name(context.reshape(batch, SEQ, -1), "context")
    x = x + checkpoint_name(context @ w["o"], "projection")
    y = _norm(x, layer["norm2"])
    return x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"]


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    root = jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-5)
    return (y * root * scale).astype(jnp.bfloat16)


def _rotated(x: jax.Array) -> jax.Array:
    half = HEAD // 2
    frequencies = 10000.0 ** -(jnp.arange(half) / half)
    angles = jnp.outer(jnp.arange(SEQ), frequencies)[:, None, :]
    cosine, sine = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    left, right = jnp.split(x, 2, -1)
    return jnp.concatenate([left * cosine - right * sine, left * sine + right * cosine], -1)


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
