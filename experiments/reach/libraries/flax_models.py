"""Training steps of the flax examples, in linen and in nnx."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training.train_state import TrainState

from experiments.reach.public_step import (
    BATCH,
    LENGTH,
    VOCABULARY,
    Change,
    PublicStep,
    classes,
    features,
    tokens,
    with_arrays,
)


class _CNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(features=8, kernel_size=(3, 3))(x))
        x = nn.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = nn.relu(nn.Conv(features=16, kernel_size=(3, 3))(x))
        x = nn.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = x.reshape((x.shape[0], -1))
        x = nn.relu(nn.Dense(features=32)(x))
        return nn.Dense(features=10)(x)


def linen_mnist() -> PublicStep:
    """examples/mnist: a CNN; logits leave the loss, and metrics are computed from them."""
    model = _CNN()
    images = features(8, 8, 1)
    params = model.init(jax.random.key(0), images)["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.1, momentum=0.9))

    def train_step(state, images, labels):
        def loss_fn(params):
            logits = state.apply_fn({"params": params}, images)
            one_hot = jax.nn.one_hot(labels, 10)
            loss = jnp.mean(optax.softmax_cross_entropy(logits=logits, labels=one_hot))
            return loss, logits

        (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        accuracy = jnp.mean(jnp.argmax(logits, -1) == labels)
        return state.apply_gradients(grads=grads), loss, accuracy

    args = (state, images, classes())
    return PublicStep(train_step, args, options={"batch_argnums": (1, 2)})


def linen_mixup() -> PublicStep:
    """big_vision/train.py: mixup with the batch rolled by one, in the step."""
    model = _CNN()
    images = features(8, 8, 1)
    params = model.init(jax.random.key(0), images)["params"]
    tx = optax.sgd(0.1, momentum=0.9)

    def update_fn(params, opt, rng, images, labels):
        rng, rng_mixup = jax.random.split(rng)
        share = jax.random.beta(rng_mixup, 0.2, 0.2)
        share = jnp.maximum(share, 1.0 - share)

        def mixed(rows):
            return share * rows + (1.0 - share) * jnp.roll(rows, shift=1, axis=0)

        images, labels = mixed(images), mixed(jax.nn.one_hot(labels, 10))

        def loss_fn(params):
            logits = model.apply({"params": params}, images)
            return jnp.mean(optax.softmax_cross_entropy(logits=logits, labels=labels))

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt = tx.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, rng, loss

    args = (params, tx.init(params), jax.random.key(1), images, classes())
    return PublicStep(update_fn, args, options={"batch_argnums": (3, 4)})


def linen_first_chunk() -> PublicStep:
    """big_vision/utils.py: the gradient of the first chunk, to which a loop adds the others."""
    count = 4
    model = _CNN()
    images = features(8, 8, 1)
    labels = jax.nn.one_hot(classes(), 10)
    params = model.init(jax.random.key(0), images)["params"]
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9))

    def loss_fn(params, images, labels):
        logits = model.apply({"params": params}, images)
        return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, labels).sum(-1))

    def update_fn(params, opt, images, labels):
        size = images.shape[0] // count

        def chunk_gradient(i):
            rows = (jax.lax.dynamic_slice_in_dim(x, i * size, size) for x in (images, labels))
            return jax.value_and_grad(loss_fn)(params, *rows)

        def add_chunk(i, sums):
            return jax.tree.map(jnp.add, sums, chunk_gradient(i))

        sums = jax.lax.fori_loop(1, count, add_chunk, chunk_gradient(0))
        loss, grads = jax.tree.map(lambda x: x / count, sums)
        updates, opt = tx.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, {"training_loss": loss}

    args = (params, tx.init(params), images, labels)
    return PublicStep(update_fn, args, options={"batch_argnums": (2, 3)})


class _Block(nn.Module):
    @nn.compact
    def __call__(self, x, mask, train):
        y = nn.LayerNorm()(x)
        y = nn.MultiHeadDotProductAttention(num_heads=4, dropout_rate=0.1)(
            y, mask=mask, deterministic=not train
        )
        x = x + nn.Dropout(0.1)(y, deterministic=not train)
        y = nn.Dense(32)(nn.gelu(nn.Dense(64)(nn.LayerNorm()(x))))
        return x + nn.Dropout(0.1)(y, deterministic=not train)


class _Decoder(nn.Module):
    @nn.compact
    def __call__(self, ids, train=True):
        x = nn.Embed(VOCABULARY, 32)(ids)
        x = x + self.param("positions", nn.initializers.normal(0.02), (1, LENGTH, 32))
        mask = nn.combine_masks(nn.make_attention_mask(ids > 0, ids > 0), nn.make_causal_mask(ids))
        for _ in range(2):
            x = _Block()(x, mask, train)
        return nn.Dense(VOCABULARY)(nn.LayerNorm()(x))


def linen_lm1b() -> PublicStep:
    """examples/lm1b: a weighted loss divided by the weights' sum, and metrics from the logits."""
    model = _Decoder()
    ids = tokens()
    params = model.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, ids)["params"]
    tx = optax.adamw(1e-3, b1=0.9, b2=0.98, eps=1e-9, weight_decay=0.1)
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    def weighted_cross_entropy(logits, targets, weights):
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return (losses * weights).sum(), weights.sum()

    def train_step(state, batch, dropout_rng):
        dropout_rng = jax.random.fold_in(dropout_rng, state.step)
        weights = jnp.where(batch["inputs"] > 0, 1, 0).astype(jnp.float32)

        def loss_fn(params):
            logits = state.apply_fn(
                {"params": params}, batch["inputs"], rngs={"dropout": dropout_rng}
            )
            loss, weight_sum = weighted_cross_entropy(logits, batch["targets"], weights)
            return loss / weight_sum, logits

        (_, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        loss, weight_sum = weighted_cross_entropy(logits, batch["targets"], weights)
        correct = ((jnp.argmax(logits, -1) == batch["targets"]) * weights).sum()
        metrics = {"loss": loss, "accuracy": correct, "denominator": weight_sum}
        return state.apply_gradients(grads=grads), metrics

    batch = {"inputs": ids, "targets": jnp.roll(ids, -1, 1)}
    return PublicStep(train_step, (state, batch, jax.random.key(2)))


def linen_accumulation() -> PublicStep:
    """t5x/trainer.py: a loop that adds the gradients of microbatches, with dropout in each."""
    count = 4
    model = _Decoder()
    ids = tokens()
    params = model.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, ids)["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adafactor(1e-3))

    def train_step(state, batch, dropout_rng):
        rows = batch["inputs"].shape[0] // count

        def loss_fn(params, batch, rng):
            logits = state.apply_fn({"params": params}, batch["inputs"], rngs={"dropout": rng})
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
            weights = (batch["inputs"] > 0).astype(jnp.float32)
            return (losses * weights).sum(), weights.sum()

        def per_microbatch(index, carry):
            rng, grads, metrics = carry
            rng, own = jax.random.split(rng)
            part = jax.tree.map(
                lambda x: jax.lax.dynamic_slice_in_dim(x, index * rows, rows), batch
            )
            grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
            (loss, weight_sum), grad = grad_fn(state.params, part, own)
            own_metrics = {"loss": loss, "weights": weight_sum}
            return rng, *jax.tree.map(jnp.add, (grads, metrics), (grad, own_metrics))

        zeros = jax.tree.map(jnp.zeros_like, state.params)
        carry = dropout_rng, zeros, {"loss": 0.0, "weights": 0.0}
        rng, grads, metrics = jax.lax.fori_loop(0, count, per_microbatch, carry)
        grads = jax.tree.map(lambda g: g / metrics["weights"], grads)
        return state.apply_gradients(grads=grads), metrics, rng

    batch = {"inputs": ids, "targets": jnp.roll(ids, -1, 1)}
    return PublicStep(train_step, (state, batch, jax.random.key(2)))


class _ActorCritic(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(features=8, kernel_size=(3, 3), strides=2)(x / 255.0))
        x = nn.relu(nn.Dense(features=32)(x.reshape((x.shape[0], -1))))
        return nn.log_softmax(nn.Dense(features=4)(x)), nn.Dense(features=1)(x)


def linen_ppo() -> PublicStep:
    """examples/ppo: the loss takes apply_fn, and a minibatch is a tuple of arrays."""
    model = _ActorCritic()
    images = features(8, 8, 4)
    params = model.init(jax.random.key(0), images)["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(2.5e-4))

    def loss_fn(params, apply_fn, minibatch, clip_param, vf_coeff, entropy_coeff):
        states, actions, old_log_probs, returns, advantages = minibatch
        log_probs, values = apply_fn({"params": params}, states)
        values = values[:, 0]
        probs = jnp.exp(log_probs)
        value_loss = jnp.mean(jnp.square(returns - values), axis=0)
        entropy = jnp.sum(-probs * log_probs, axis=1).mean()
        log_probs_act_taken = jax.vmap(lambda lp, a: lp[a])(log_probs, actions)
        ratios = jnp.exp(log_probs_act_taken - old_log_probs)
        pg_loss = ratios * advantages
        clipped_loss = advantages * jax.lax.clamp(1.0 - clip_param, ratios, 1.0 + clip_param)
        ppo_loss = -jnp.mean(jnp.minimum(pg_loss, clipped_loss), axis=0)
        return ppo_loss + vf_coeff * value_loss - entropy_coeff * entropy

    def train_step(state, minibatch, clip_param):
        loss, grads = jax.value_and_grad(loss_fn)(
            state.params, state.apply_fn, minibatch, clip_param, 0.5, 0.01
        )
        return state.apply_gradients(grads=grads), loss

    numbers = features(3, seed=3)
    batch = (images, classes(4), numbers[:, 0] - 1.5, numbers[:, 1], numbers[:, 2])
    return PublicStep(train_step, (state, batch, 0.1))


def linen_apply_fn() -> PublicStep:
    """A step that takes apply_fn as an argument, as jit users mark it static."""
    model = _CNN()
    images = features(8, 8, 1)
    params = model.init(jax.random.key(0), images)["params"]
    tx = optax.adam(1e-3)

    def train_step(params, batch, opt_state, apply_fn):
        def loss_fn(params):
            logits = apply_fn({"params": params}, batch["image"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    args = (params, {"image": images, "label": classes()}, tx.init(params), model.apply)
    return PublicStep(train_step, args, jit=lambda step: jax.jit(step, static_argnums=3))


class _FixedBatch(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(32)(x.reshape(BATCH, 64))
        return nn.Dense(10)(nn.relu(x)).reshape(BATCH, 10)


def linen_fixed_batch() -> PublicStep:
    """A model that knows its batch size."""
    return _image_step(_FixedBatch(), features(8, 8))


def _image_step(model: nn.Module, images: jax.Array) -> PublicStep:
    params = model.init(jax.random.key(0), images)["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))

    def train_step(state, batch):
        def loss_fn(params):
            logits = state.apply_fn({"params": params}, batch["image"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    return PublicStep(train_step, (state, {"image": images, "label": classes()}))


class _ScanBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        y = nn.Dense(64)(nn.LayerNorm()(x))
        return x + nn.Dense(32)(nn.gelu(y)), None


class _Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(32)(x)
        blocks = nn.scan(_ScanBlock, {"params": 0}, split_rngs={"params": True}, length=8)
        return nn.Dense(10)(blocks()(x, None)[0])


def linen_scan() -> PublicStep:
    """Eight blocks in nn.scan, as MaxText stacks its layers."""
    return _image_step(_Scanned(), features(16))


def _nnx_with_arrays(args: Any, change: Change) -> Any:
    graphdef, state = nnx.split(args)
    return nnx.merge(graphdef, with_arrays(state, change))


def _nnx_observed(args: Any, result: Any) -> Any:
    """Return the result and the state of the modules, which the step changes."""
    return result, nnx.to_pure_dict(nnx.state(args))


class _NnxCNN(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 8, kernel_size=(3, 3), rngs=rngs)
        self.dropout1 = nnx.Dropout(rate=0.1)
        self.conv2 = nnx.Conv(8, 16, kernel_size=(3, 3), rngs=rngs)
        self.linear1 = nnx.Linear(64, 32, rngs=rngs)
        self.dropout2 = nnx.Dropout(rate=0.1)
        self.linear2 = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x, rngs=None):
        x = nnx.avg_pool(nnx.relu(self.conv1(x)), window_shape=(2, 2), strides=(2, 2))
        x = self.dropout1(x, rngs=rngs)
        x = nnx.avg_pool(nnx.relu(self.conv2(x)), window_shape=(2, 2), strides=(2, 2))
        x = x.reshape(x.shape[0], -1)
        return self.linear2(self.dropout2(nnx.relu(self.linear1(x)), rngs=rngs))


def nnx_mnist() -> PublicStep:
    """docs/mnist_tutorial: model, optimizer and metrics are changed by the step."""
    rngs = nnx.Rngs(0)
    model = _NnxCNN(rngs)
    optimizer = nnx.Optimizer(model, optax.adamw(0.005, 0.9), wrt=nnx.Param)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))

    def loss_fn(model, rngs, batch):
        logits = model(batch["image"], rngs)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
        return loss, logits

    def train_step(model, optimizer, metrics, rngs, batch):
        grad_fn = nnx.value_and_grad(loss_fn, has_aux=True)
        (loss, logits), grads = grad_fn(model, rngs, batch)
        metrics.update(loss=loss, logits=logits, labels=batch["label"])
        optimizer.update(model, grads)

    batch = {"image": features(8, 8, 1), "label": classes()}
    args = (model, optimizer, metrics, rngs, batch)
    return PublicStep(
        train_step,
        args,
        jit=nnx.jit,
        with_arrays=_nnx_with_arrays,
        observed=_nnx_observed,
        options={"batch_argnums": 4},
    )


class _NnxBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm1 = nnx.LayerNorm(32, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, 32, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(32, rngs=rngs)
        self.linear1 = nnx.Linear(32, 64, rngs=rngs)
        self.linear2 = nnx.Linear(64, 32, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x, mask):
        x = x + self.dropout(self.attention(self.norm1(x), mask=mask))
        return x + self.dropout(self.linear2(nnx.gelu(self.linear1(self.norm2(x)))))


class _NnxDecoder(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCABULARY, 32, rngs=rngs)
        self.blocks = nnx.List([_NnxBlock(rngs) for _ in range(2)])
        self.head = nnx.Linear(32, VOCABULARY, rngs=rngs)

    def __call__(self, ids):
        x, mask = self.embed(ids), nnx.make_causal_mask(ids)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


def nnx_gpt() -> PublicStep:
    """docs/nnx_basics: a decoder whose dropout keeps its random stream in the model."""
    model = _NnxDecoder(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    def train_step(model, optimizer, batch):
        def loss_fn(model):
            logits = model(batch[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    return PublicStep(
        train_step,
        (model, optimizer, tokens()),
        jit=nnx.jit,
        with_arrays=_nnx_with_arrays,
        observed=_nnx_observed,
        options={"batch_argnums": 2},
    )


def nnx_functional() -> PublicStep:
    """docs/guides/performance: the modules are split outside of the step and merged inside."""
    model = _NnxDecoder(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    graphdef, state = nnx.split((model, optimizer))

    def train_step(state, batch):
        model, optimizer = nnx.merge(graphdef, state)

        def loss_fn(model):
            logits = model(batch[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), loss

    return PublicStep(train_step, (state, tokens()))
