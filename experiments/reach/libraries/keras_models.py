"""Keras on JAX, trained as in its guide "Writing a training loop from scratch in JAX"."""

import os

os.environ["KERAS_BACKEND"] = "jax"

import jax
import jax.numpy as jnp
import keras
from keras import layers

from experiments.reach.public_step import PublicStep, classes, features, tokens


def _training(model, optimizer, metric, x, y) -> PublicStep:
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer.build(model.trainable_variables)

    def compute_loss_and_updates(trainable, non_trainable, metric_variables, x, y):
        y_pred, non_trainable = model.stateless_call(trainable, non_trainable, x, training=True)
        loss = loss_fn(y, y_pred)
        metric_variables = metric.stateless_update_state(metric_variables, y, y_pred)
        return loss, (non_trainable, metric_variables)

    grad_fn = jax.value_and_grad(compute_loss_and_updates, has_aux=True)

    def train_step(state, x, y):
        trainable, non_trainable, optimizer_variables, metric_variables = state
        (loss, (non_trainable, metric_variables)), grads = grad_fn(
            trainable, non_trainable, metric_variables, x, y
        )
        trainable, optimizer_variables = optimizer.stateless_apply(
            optimizer_variables, grads, trainable
        )
        return loss, (trainable, non_trainable, optimizer_variables, metric_variables)

    sources = (
        model.trainable_variables,
        model.non_trainable_variables,
        optimizer.variables,
        metric.variables,
    )
    state = tuple([variable.value for variable in variables] for variables in sources)
    return PublicStep(train_step, (state, x, y))


def mlp() -> PublicStep:
    """Dense layers with dropout and layer normalization, and the accuracy."""
    model = keras.Sequential([
        keras.Input((16,)),
        layers.Dense(32, activation="relu"),
        layers.Dropout(0.2),
        layers.Dense(32, activation="relu"),
        layers.LayerNormalization(),
        layers.Dense(10),
    ])  # fmt: skip
    metric = keras.metrics.SparseCategoricalAccuracy()
    optimizer = keras.optimizers.SGD(1e-2, momentum=0.9)
    return _training(model, optimizer, metric, features(16), classes())


def transformer() -> PublicStep:
    """A decoder of two layers with dropout."""
    inputs = keras.Input((16,), dtype="int32")
    x = layers.Embedding(64, 32)(inputs)
    for _ in range(2):
        attended = layers.MultiHeadAttention(4, 8, dropout=0.1)(x, x, use_causal_mask=True)
        x = layers.LayerNormalization()(x + layers.Dropout(0.1)(attended))
        hidden = layers.Dense(64, activation="gelu")(x)
        x = layers.LayerNormalization()(x + layers.Dropout(0.1)(layers.Dense(32)(hidden)))
    model = keras.Model(inputs, layers.Dense(64)(x))
    ids = tokens()
    metric = keras.metrics.SparseCategoricalAccuracy()
    return _training(model, keras.optimizers.Adam(1e-3), metric, ids, jnp.roll(ids, -1, 1))
