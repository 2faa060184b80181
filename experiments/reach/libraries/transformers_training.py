"""Sizes, losses and the training step that the models of transformers share."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from experiments.reach.public_step import LENGTH, PublicStep, classes, features, tokens

cross_entropy = optax.softmax_cross_entropy_with_integer_labels

ENCODER = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
}
DECODER = {**ENCODER, "num_key_value_heads": 2, "attention_dropout": 0.1, "pad_token_id": 0}
GPT2 = {"vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4}
SEQ2SEQ = {
    "vocab_size": 64,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
}
VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 16,
    "patch_size": 4,
}


def texts(ids: jax.Array, **others: jax.Array) -> dict[str, jax.Array]:
    """Return a batch of texts that are all of the same length."""
    return {"input_ids": ids, "attention_mask": jnp.ones_like(ids), **others}


def train(
    model: Any,
    batch: Mapping[str, jax.Array],
    loss: Callable[[Any, Mapping[str, Any]], jax.Array],
    training: Mapping[str, bool] = MappingProxyType({"train": True}),
) -> PublicStep:
    """Return the training step of the examples: a TrainState, AdamW, dropout.

    Args:
        model: the model, with its parameters.
        batch: its keyword arguments, and "labels".
        loss: the loss, from the model's output and the batch.
        training: the keyword argument that turns dropout on.
    """
    state = TrainState.create(
        apply_fn=model.__call__, params=model.params, tx=optax.adamw(1e-3, weight_decay=0.01)
    )

    def train_step(state, batch, dropout_rng):
        dropout_rng, new_dropout_rng = jax.random.split(dropout_rng)

        def loss_fn(params):
            inputs = {name: value for name, value in batch.items() if name != "labels"}
            outputs = state.apply_fn(**inputs, params=params, dropout_rng=dropout_rng, **training)
            return loss(outputs, batch)

        value, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": value}, new_dropout_rng

    return PublicStep(train_step, (state, dict(batch), jax.random.key(1)))


def mean_of(losses: jax.Array, chosen: jax.Array) -> jax.Array:
    """Return the mean of the losses where `chosen` is 1."""
    return (losses * chosen).sum() / chosen.sum()


def next_token(outputs: Any, batch: Mapping[str, Any]) -> jax.Array:
    """Return the loss of run_clm_flax.py."""
    return cross_entropy(outputs.logits[..., :-1, :], batch["labels"][..., 1:]).mean()


def labelled(outputs: Any, batch: Mapping[str, Any]) -> jax.Array:
    """Return the loss of run_flax_glue.py and run_image_classification_flax.py."""
    return cross_entropy(outputs.logits, batch["labels"]).mean()


def masked_loss(outputs: Any, batch: Mapping[str, Any]) -> jax.Array:
    """Return the loss of run_mlm_flax.py: the mean over the tokens that were masked."""
    chosen = jnp.where(batch["labels"] > 0, 1.0, 0.0)
    return mean_of(cross_entropy(outputs.logits, batch["labels"]), chosen)


def language_model(model: Any) -> PublicStep:
    """Return the step of run_clm_flax.py."""
    ids = tokens()
    return train(model, texts(ids, labels=ids), next_token)


def masked_model(model: Any) -> PublicStep:
    """Return the step of run_mlm_flax.py."""
    ids = tokens()
    masked = (ids % 5 == 0) | (jnp.arange(LENGTH) == 3)
    batch = texts(jnp.where(masked, 2, ids), labels=jnp.where(masked, ids, 0))
    return train(model, batch, masked_loss)


def image_classifier(model: Any) -> PublicStep:
    """Return the step of run_image_classification_flax.py."""
    return train(model, {"pixel_values": features(3, 16, 16), "labels": classes()}, labelled)
