"""Optimizers of optax on one MLP with dropout, as its documentation writes the step."""

from typing import Any

import flax.linen as nn
import jax
import optax
from flax.training.train_state import TrainState

from experiments.reach.public_step import PublicStep, classes, features


class _MLP(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        for _ in range(3):
            x = nn.Dropout(0.1, deterministic=not train)(nn.relu(nn.Dense(32)(x)))
        return nn.Dense(10)(x)


def _train(tx: Any) -> PublicStep:
    model = _MLP()
    images = features(16)
    params = model.init(jax.random.key(0), images, train=False)["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    def train_step(state, batch, rng):
        def loss_fn(params):
            logits = state.apply_fn({"params": params}, batch["image"], rngs={"dropout": rng})
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    batch = {"image": images, "label": classes()}
    return PublicStep(train_step, (state, batch, jax.random.key(1)))


def adafactor() -> PublicStep:
    """optax.adafactor with factored second moments."""
    return _train(optax.adafactor(1e-3, min_dim_size_to_factor=8))


def lion() -> PublicStep:
    """optax.lion."""
    return _train(optax.lion(1e-3))


def lamb() -> PublicStep:
    """optax.lamb."""
    return _train(optax.lamb(1e-3))


def multi_steps() -> PublicStep:
    """optax.MultiSteps around Adam: every second step updates."""
    return _train(optax.MultiSteps(optax.adam(1e-3), every_k_schedule=2))


def muon() -> PublicStep:
    """optax.contrib.muon."""
    return _train(optax.contrib.muon(1e-3))


def galore() -> PublicStep:
    """optax.contrib.galore with rank 4."""
    return _train(optax.contrib.galore(1e-3, rank=4))


def schedule_free() -> PublicStep:
    """optax.contrib.schedule_free_adamw."""
    return _train(optax.contrib.schedule_free_adamw(1e-3, warmup_steps=2))


def prodigy() -> PublicStep:
    """optax.contrib.prodigy."""
    return _train(optax.contrib.prodigy(1.0))


def ademamix() -> PublicStep:
    """optax.contrib.ademamix."""
    return _train(optax.contrib.ademamix(1e-3))


def clipped() -> PublicStep:
    """Clipping by the global norm, a schedule, and weight decay on matrices only."""
    schedule = optax.warmup_cosine_decay_schedule(1e-4, 1e-3, 2, 10)
    mask = lambda params: jax.tree.map(lambda p: p.ndim > 1, params)  # noqa: E731
    return _train(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, mask=mask)))


def frozen() -> PublicStep:
    """optax.partition: one layer is frozen."""
    transforms = {"adam": optax.adam(1e-3), "frozen": optax.set_to_zero()}

    def labels(params):
        return {name: "frozen" if name == "Dense_1" else "adam" for name in params}

    return _train(optax.partition(transforms, labels))


def apply_if_finite() -> PublicStep:
    """optax.apply_if_finite: steps with infinite gradients are left out."""
    return _train(optax.apply_if_finite(optax.adamw(1e-3), max_consecutive_errors=3))


def inject_hyperparams() -> PublicStep:
    """optax.inject_hyperparams: the learning rate is a part of the state."""
    schedule = optax.exponential_decay(1e-3, 10, 0.9)
    return _train(optax.inject_hyperparams(optax.adamw)(learning_rate=schedule))


def lbfgs() -> PublicStep:
    """optax.lbfgs with a fixed learning rate."""
    return _train(optax.lbfgs(0.1, linesearch=None))
