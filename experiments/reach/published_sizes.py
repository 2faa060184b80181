"""GPT-2 and ViT of transformers at their published sizes, as pipelines on 8 and 64 A100s.

`uv run --group reach python -m experiments.reach.published_sizes` plans each model unchanged, from
the shapes of its arrays alone, and compiles the stages for the cluster to predict the time of a
step. It adds the rows that the table does not have.
"""

import csv
import time
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax
import transformers as hf
import typer
from flax.training.train_state import TrainState

import autopar
from simulator import Cluster

TABLE = Path(__file__).parents[2] / "results" / "tables" / "published_sizes.csv"
STAGES, MICROBATCHES = 4, 16

GPT2 = {  # Radford et al., 2019, table 2: layers, width, heads
    "gpt2": (12, 768, 12),
    "gpt2-medium": (24, 1024, 16),
    "gpt2-large": (36, 1280, 20),
    "gpt2-xl": (48, 1600, 25),
}
VIT = {  # Dosovitskiy et al., 2021, table 1: layers, width, heads
    "vit-base": (12, 768, 12),
    "vit-large": (24, 1024, 16),
}


@dataclass(frozen=True)
class Row:
    """A pipeline of a model.

    Attributes:
        model: the model.
        parameters: the number of its parameters.
        gpus: the number of A100s with 80 GB, 8 in a host.
        rows: the number of sequences or images in a batch.
        planning_seconds: processor seconds of tracing and planning on this machine.
        step_seconds: the predicted time of a step.
        memory_gb: the predicted memory of the fullest device.
        samples_per_second: sequences or images per second.
    """

    model: str
    parameters: int
    gpus: int
    rows: int
    planning_seconds: float
    step_seconds: float
    memory_gb: float
    samples_per_second: float


def train_step(model: Any, loss: Any, state: TrainState, batch: Any, rng: jax.Array) -> Any:
    """Take a step as the examples of transformers do, with dropout."""
    dropout_rng, new_rng = jax.random.split(rng)

    def loss_of(params: Any) -> jax.Array:
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        logits = model(**inputs, params=params, dropout_rng=dropout_rng, train=True).logits
        return loss(logits.astype(jnp.float32), batch["labels"])

    value, gradients = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=gradients), value, new_rng


def next_token(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the loss of run_clm_flax.py."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], labels[:, 1:])
    return losses.mean()


def of_class(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the loss of run_image_classification_flax.py."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def build(name: str, rows: int) -> tuple[Any, tuple[Any, ...]]:
    """Return the training step of a model in bfloat16, and the shapes of its arguments."""
    options: dict[str, Any] = {"dtype": jnp.bfloat16, "_do_init": False}
    if name in GPT2:
        layers, width, heads = GPT2[name]
        config: Any = hf.GPT2Config(n_layer=layers, n_embd=width, n_head=heads)
        model: Any = hf.FlaxGPT2LMHeadModel(config, (1, config.n_positions), **options)
        ids = jax.ShapeDtypeStruct((rows, config.n_positions), jnp.int32)
        batch = {"input_ids": ids, "attention_mask": ids, "labels": ids}
        loss = next_token
    else:
        layers, width, heads = VIT[name]
        config = hf.ViTConfig(
            num_hidden_layers=layers,
            hidden_size=width,
            num_attention_heads=heads,
            intermediate_size=4 * width,
            num_labels=1000,
        )
        model = hf.FlaxViTForImageClassification(config, **options)
        images = jax.ShapeDtypeStruct((rows, 3, 224, 224), jnp.float32)
        batch = {"pixel_values": images, "labels": jax.ShapeDtypeStruct((rows,), jnp.int32)}
        loss = of_class
    rng = jax.eval_shape(lambda: jax.random.key(0))
    params = jax.eval_shape(partial(model.init_weights, input_shape=model.input_shape), rng)
    tx = optax.adamw(1e-4, weight_decay=0.01)
    create = partial(TrainState.create, apply_fn=model.__call__, tx=tx)
    state = jax.eval_shape(lambda params: create(params=params), params)
    return partial(train_step, model, loss), (state, batch, rng)


def run(name: str, cluster: Cluster) -> Row:
    """Return the row of a model on a cluster."""
    gpus = cluster.hosts * cluster.devices_per_host
    rows = (512 if name in GPT2 else 4096) * (1 if gpus <= 8 else 4)
    step, args = build(name, rows)
    method = autopar.PipeshardParallel(
        num_micro_batches=MICROBATCHES * (1 if gpus > 8 else 4),
        layer_option=autopar.AutoLayerOption(STAGES),
        stage_option=autopar.UniformStageOption(STAGES),
    )
    start = time.process_time()
    plan = autopar.plan_step(step, args, method=method, cluster=cluster, batch_argnums=(1,))
    seconds = time.process_time() - start
    prediction = autopar.predict(step, args, plan, cluster, batch_argnums=(1,))
    return Row(
        model=name,
        parameters=sum(leaf.size for leaf in jax.tree.leaves(args[0].params)),
        gpus=gpus,
        rows=rows,
        planning_seconds=round(seconds, 1),
        step_seconds=round(prediction.seconds, 4),
        memory_gb=round(prediction.memory.total / 1e9, 1),
        samples_per_second=round(rows / prediction.seconds),
    )


def main(
    models: Annotated[list[str] | None, typer.Argument(help="Models; all by default.")] = None,
    output: Annotated[Path, typer.Option(help="The table, which is extended.")] = TABLE,
) -> None:
    """Plan and predict the models, and write a row for each into a table."""
    done = list(csv.DictReader(output.open())) if output.exists() else []
    one_host = Cluster.load("dgx_a100_80")
    for name in models or [*VIT, *GPT2]:
        for hosts in (1, 8):
            key = name, str(hosts * one_host.devices_per_host)
            if any((row["model"], row["gpus"]) == key for row in done):
                continue
            row = run(name, one_host.with_size(hosts=hosts))
            typer.echo(row)
            done.append({field: str(value) for field, value in asdict(row).items()})
            with output.open("w", newline="") as file:
                writer = csv.DictWriter(file, [field.name for field in fields(Row)])
                writer.writeheader()
                writer.writerows(done)


if __name__ == "__main__":
    typer.run(main)
