"""Training recipes in plain JAX and optax, as their papers' code and tutorials write them."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from experiments.reach.public_step import (
    LENGTH,
    VOCABULARY,
    PublicStep,
    classes,
    features,
    tokens,
)

_cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def _init(seed: int, sizes: Sequence[int]) -> list[dict[str, jax.Array]]:
    """Return the layers of an MLP."""
    keys = jax.random.split(jax.random.key(seed), len(sizes) - 1)
    return [
        {"w": jax.random.normal(key, (rows, columns)) / rows**0.5, "b": jnp.zeros(columns)}
        for key, rows, columns in zip(keys, sizes[:-1], sizes[1:], strict=True)
    ]


def _mlp(layers: Any, x: Any) -> jax.Array:
    for layer in layers[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ layers[-1]["w"] + layers[-1]["b"]


def _normalized(x: jax.Array) -> jax.Array:
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-6)


def _step(loss_fn: Callable[..., jax.Array], params: Any, tx: Any, *batch: Any) -> PublicStep:
    """Return a step that minimizes a loss of parameters and batches."""

    def train_step(params, opt_state, *batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    numbers = tuple(range(2, 2 + len(batch)))
    args = (params, tx.init(params), *batch)
    return PublicStep(train_step, args, options={"batch_argnums": numbers})


class _Mamba(nn.Module):
    inner: int = 32
    states: int = 4

    @nn.compact
    def __call__(self, x):
        x, gate = jnp.split(nn.Dense(2 * self.inner, use_bias=False)(x), 2, -1)
        padding = [(3, 0)]
        conv = nn.Conv(self.inner, (4,), feature_group_count=self.inner, padding=padding)
        x = nn.silu(conv(x))
        log_decay = self.param("A_log", nn.initializers.uniform(1.0), (self.inner, self.states))
        skip = self.param("D", nn.initializers.ones, (self.inner,))
        step, b, c = jnp.split(nn.Dense(2 + 2 * self.states)(x), [2, 2 + self.states], -1)
        step = nn.softplus(nn.Dense(self.inner)(step))
        decay = jnp.exp(jnp.einsum("bld,dn->bldn", step, -jnp.exp(log_decay)))
        driven = jnp.einsum("bld,bln,bld->bldn", step, b, x)

        def combine(left, right):
            return left[0] * right[0], right[0] * left[1] + right[1]

        _, hidden = jax.lax.associative_scan(combine, (decay, driven), axis=1)
        y = jnp.einsum("bldn,bln->bld", hidden, c) + x * skip
        return nn.Dense(x.shape[-1] // 2, use_bias=False)(y * nn.silu(gate))


class _MambaModel(nn.Module):
    @nn.compact
    def __call__(self, ids):
        embed = nn.Embed(VOCABULARY, 16)
        x = embed(ids)
        for _ in range(2):
            x = x + _Mamba()(nn.RMSNorm()(x))
        return embed.attend(nn.RMSNorm()(x))


def mamba() -> PublicStep:
    """A selective state space model; its scan over time is an `associative_scan`."""
    model, ids = _MambaModel(), tokens()

    def loss_fn(params, ids):
        return _cross_entropy(model.apply(params, ids)[:, :-1], ids[:, 1:]).mean()

    return _step(loss_fn, model.init(jax.random.key(0), ids), optax.adamw(1e-3), ids)


def dpo() -> PublicStep:
    """Direct preference optimization: chosen and rejected answers are one batch of the model."""
    model = _MambaModel()
    chosen, rejected = tokens(1), tokens(2)
    params = model.init(jax.random.key(0), chosen)
    reference = jax.tree.map(lambda weight: 0.95 * weight, params)

    def log_probabilities(params, ids, mask):
        scores = jax.nn.log_softmax(model.apply(params, ids)[:, :-1])
        picked = jnp.take_along_axis(scores, ids[:, 1:, None], -1)[..., 0]
        return (picked * mask[:, 1:]).sum(-1)

    def loss_fn(params, chosen, rejected, mask):
        ids = jnp.concatenate([chosen, rejected])
        masks = jnp.concatenate([mask, jnp.ones_like(mask)])
        count = chosen.shape[0]
        policy = log_probabilities(params, ids, masks)
        other = jax.lax.stop_gradient(log_probabilities(reference, ids, masks))
        gain = (policy[:count] - policy[count:]) - (other[:count] - other[count:])
        return -jax.nn.log_sigmoid(0.1 * gain).mean()

    mask = jnp.ones((len(chosen), LENGTH)).at[::2, 12:].set(0)
    return _step(loss_fn, params, optax.rmsprop(1e-4), chosen, rejected, mask)


def clip() -> PublicStep:
    """CLIP: two towers, and a contrastive loss over all pairs of the batch."""
    params = {"image": _init(0, (12, 32, 16)), "text": _init(1, (10, 32, 16)), "scale": 2.6}

    def loss_fn(params, images, texts):
        image = _normalized(_mlp(params["image"], images))
        text = _normalized(_mlp(params["text"], texts))
        logits = jnp.exp(params["scale"]) * image @ text.T
        labels = jnp.arange(logits.shape[0])
        return (_cross_entropy(logits, labels) + _cross_entropy(logits.T, labels)).mean() / 2

    params = jax.tree.map(jnp.asarray, params)
    return _step(loss_fn, params, optax.adamw(1e-3), features(12), features(10, seed=3))


def distillation() -> PublicStep:
    """A student that learns from the labels and from a teacher's logits."""
    teacher = _init(7, (12, 64, 64, 10))

    def loss_fn(student, images, labels):
        logits = _mlp(student, images)
        soft = jax.nn.softmax(jax.lax.stop_gradient(_mlp(teacher, images)) / 4)
        divergence = optax.losses.kl_divergence(jax.nn.log_softmax(logits / 4), soft).mean()
        return 8 * divergence + 0.5 * _cross_entropy(logits, labels).mean()

    student = _init(0, (12, 32, 32, 10))
    return _step(loss_fn, student, optax.adam(1e-3), features(12), classes())


def maml() -> PublicStep:
    """Model-agnostic meta-learning: a gradient of a gradient for each task of the batch."""

    def task_loss(params, x, y):
        return jnp.mean((_mlp(params, x) - y) ** 2)

    def adapted_loss(params, x, y, other_x, other_y):
        grads = jax.grad(task_loss)(params, x, y)
        adapted = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return task_loss(adapted, other_x, other_y)

    def loss_fn(params, *tasks):
        return jnp.mean(jax.vmap(partial(adapted_loss, params))(*tasks))

    tasks = [features(6, 1, seed=seed) for seed in range(4)]
    return _step(loss_fn, _init(0, (1, 32, 32, 1)), optax.adam(1e-3), *tasks)


def byol() -> PublicStep:
    """BYOL: an online network predicts what a moving average of itself makes of another view."""
    online = {"encoder": _init(0, (12, 32, 32, 16)), "predictor": _init(2, (16, 32, 16))}
    target = jax.tree.map(jnp.copy, online["encoder"])
    tx = optax.lamb(1e-3)

    def train_step(state, images, key):
        key_1, key_2 = jax.random.split(key)
        first = images + 0.1 * jax.random.normal(key_1, images.shape)
        second = images * jax.random.bernoulli(key_2, 0.8, images.shape)

        def loss_fn(online):
            def loss_of(view, other):
                guess = _mlp(online["predictor"], _mlp(online["encoder"], view))
                aim = jax.lax.stop_gradient(_mlp(state["target"], other))
                return jnp.sum((_normalized(guess) - _normalized(aim)) ** 2, -1)

            return jnp.mean(loss_of(first, second) + loss_of(second, first))

        loss, grads = jax.value_and_grad(loss_fn)(state["online"])
        updates, opt_state = tx.update(grads, state["opt_state"], state["online"])
        online = optax.apply_updates(state["online"], updates)
        target = optax.incremental_update(online["encoder"], state["target"], 0.01)
        return {"online": online, "target": target, "opt_state": opt_state}, loss

    state = {"online": online, "target": target, "opt_state": tx.init(online)}
    return PublicStep(train_step, (state, features(12), jax.random.key(5)))


def moco() -> PublicStep:
    """MoCo: keys of a momentum encoder against a queue, which the step extends."""
    queries = _init(0, (12, 32, 32, 16))
    tx = optax.sgd(0.03, momentum=0.9)

    def train_step(state, first, second):
        encoder = optax.incremental_update(state["queries"], state["keys"], 0.001)
        keys = jax.lax.stop_gradient(_normalized(_mlp(encoder, second)))

        def loss_fn(queries):
            query = _normalized(_mlp(queries, first))
            positive = jnp.einsum("nc,nc->n", query, keys)[:, None]
            logits = jnp.concatenate([positive, query @ state["queue"].T], 1) / 0.07
            return _cross_entropy(logits, jnp.zeros(len(logits), jnp.int32)).mean(), logits

        (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["queries"])
        updates, opt_state = tx.update(grads, state["opt_state"])
        new_state = {
            "queries": optax.apply_updates(state["queries"], updates),
            "keys": encoder,
            "opt_state": opt_state,
            "queue": jnp.concatenate([keys, state["queue"][: -len(keys)]]),
        }
        return new_state, loss, (logits.argmax(1) == 0).mean()

    state = {
        "queries": queries,
        "keys": jax.tree.map(jnp.copy, queries),
        "opt_state": tx.init(queries),
        "queue": _normalized(jax.random.normal(jax.random.key(3), (32, 16))),
    }
    args = (state, features(12), features(12, seed=3))
    return PublicStep(train_step, args, options={"batch_argnums": (1, 2)})
