"""Models of dm-haiku, trained as in its examples."""

from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import optax

from experiments.reach.public_step import LENGTH, VOCABULARY, PublicStep, classes, features, tokens


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * jax.nn.one_hot(labels, 10), axis=-1))


def mlp() -> PublicStep:
    """examples/mnist.py: an MLP with dropout and a weight decay in the loss."""

    @hk.transform
    def network(images, is_training):
        net = hk.nets.MLP([32, 32, 32, 10])
        return net(
            hk.Flatten()(images), dropout_rate=0.1 if is_training else None, rng=hk.next_rng_key()
        )

    optimizer = optax.adam(1e-3)
    batch = {"image": features(8, 8), "label": classes()}
    params = network.init(jax.random.key(0), batch["image"], True)

    def update(params, opt_state, batch, rng):
        def loss_fn(params):
            logits = network.apply(params, rng, batch["image"], True)
            l2 = sum(jnp.sum(jnp.square(p)) for p in jax.tree.leaves(params))
            return _cross_entropy(logits, batch["label"]) + 1e-4 * l2

        grads = jax.grad(loss_fn)(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state

    args = (params, optimizer.init(params), batch, jax.random.key(1))
    return PublicStep(update, args, options={"batch_argnums": 2})


def transformer() -> PublicStep:
    """examples/transformer: a decoder with dropout, and a loss over a mask of tokens."""

    def layer_norm(x):
        return hk.LayerNorm(axis=-1, create_scale=True, create_offset=True)(x)

    @hk.transform
    def language_model(inputs):
        mask = jnp.tril(jnp.ones((1, 1, LENGTH, LENGTH)))
        mask = (inputs > 0)[:, None, None, :] * mask
        positions = hk.get_parameter("positions", [LENGTH, 32], init=jnp.zeros)
        h = hk.Embed(VOCABULARY, 32)(inputs) + positions
        init = hk.initializers.VarianceScaling(1.0)
        for _ in range(2):
            attended = hk.MultiHeadAttention(4, 8, model_size=32, w_init=init)
            x = layer_norm(h)
            h = h + hk.dropout(hk.next_rng_key(), 0.1, attended(x, x, x, mask=mask))
            dense = hk.Sequential([hk.Linear(64), jax.nn.gelu, hk.Linear(32)])
            h = h + hk.dropout(hk.next_rng_key(), 0.1, dense(layer_norm(h)))
        return hk.Linear(VOCABULARY)(layer_norm(h))

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3, b1=0.9, b2=0.99))
    ids = tokens()
    batch = {"obs": ids, "target": jnp.roll(ids, -1, 1)}
    params = language_model.init(jax.random.key(0), ids)
    state = {
        "step": jnp.zeros([], jnp.int32),
        "rng": jax.random.key(1),
        "opt_state": optimizer.init(params),
        "params": params,
    }

    def loss_fn(params, rng, data):
        logits = language_model.apply(params, rng, data["obs"])
        targets = jax.nn.one_hot(data["target"], VOCABULARY)
        mask = data["obs"] > 0
        log_likelihood = jnp.sum(targets * jax.nn.log_softmax(logits), axis=-1)
        return -jnp.sum(log_likelihood * mask) / jnp.sum(mask)

    def update(state, data):
        rng, new_rng = jax.random.split(state["rng"])
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], rng, data)
        updates, opt_state = optimizer.update(grads, state["opt_state"])
        new_state = {
            "step": state["step"] + 1,
            "rng": new_rng,
            "opt_state": opt_state,
            "params": optax.apply_updates(state["params"], updates),
        }
        return new_state, {"step": state["step"], "loss": loss}

    return PublicStep(update, (state, batch))


def resnet18() -> PublicStep:
    """examples/imagenet: hk.nets.ResNet18 with batch normalization, its state in the step."""

    @hk.transform_with_state
    def forward(images):
        model = hk.nets.ResNet(
            blocks_per_group=(1, 1, 1, 1),
            num_classes=10,
            bottleneck=False,
            channels_per_group=(64, 64, 64, 64),
            use_projection=(False, True, True, True),
        )
        return model(images, is_training=True)

    return _with_state(forward, features(16, 16, 3), (1e-4, 0.9))


def _with_state(forward: Any, images: jax.Array, decay: tuple[float, float]) -> PublicStep:
    optimizer = optax.sgd(0.1, momentum=decay[1], nesterov=True)
    batch = {"images": images, "labels": classes()}
    params, state = forward.init(jax.random.key(0), images)

    def loss_fn(params, state, batch):
        logits, state = forward.apply(params, state, None, batch["images"])
        l2 = [jnp.sum(p**2) for p in jax.tree.leaves(params)]
        loss = _cross_entropy(logits, batch["labels"]) + decay[0] * 0.5 * sum(l2)
        return loss, (loss, state)

    def train_step(train_state, batch):
        params, state, opt_state = train_state
        grads, (loss, state) = jax.grad(loss_fn, has_aux=True)(params, state, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), state, opt_state), {"loss": loss}

    args = (params, state, optimizer.init(params)), batch
    return PublicStep(train_step, args, uses_batch_statistics=True)


def lstm() -> PublicStep:
    """examples/rnn: an LSTM over a sequence with the batch as its second dim."""

    @hk.transform
    def forward(sequence):
        core = hk.LSTM(32)
        output, _ = hk.dynamic_unroll(core, sequence, core.initial_state(sequence.shape[1]))
        return hk.BatchApply(hk.Linear(VOCABULARY))(output)

    optimizer = optax.adam(1e-3)
    ids = tokens().T
    batch = {"input": jax.nn.one_hot(ids, VOCABULARY), "target": jnp.roll(ids, -1, 0)}
    params = forward.init(jax.random.key(0), batch["input"])

    def update(params, opt_state, batch):
        def loss_fn(params):
            logits = forward.apply(params, None, batch["input"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["target"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    args = (params, optimizer.init(params), batch)
    return PublicStep(update, args, options={"batch_argnums": {2: 1}})


def vae() -> PublicStep:
    """examples/vae.py: a variational autoencoder that draws its latent variables."""

    @hk.transform
    def model(x):
        hidden = jax.nn.relu(hk.Linear(32)(hk.Flatten()(x)))
        mean, stddev = hk.Linear(8)(hidden), jnp.exp(hk.Linear(8)(hidden))
        z = mean + stddev * jax.random.normal(hk.next_rng_key(), mean.shape)
        logits = hk.Linear(64)(jax.nn.relu(hk.Linear(32)(z)))
        return mean, stddev, jnp.reshape(logits, (-1, 8, 8))

    optimizer = optax.adam(1e-3)
    batch = (features(8, 8) > 0).astype(jnp.float32)
    params = model.init(jax.random.key(0), batch)

    def update(state, batch, rng_key):
        params, opt_state = state

        def loss_fn(params):
            mean, stddev, logits = model.apply(params, rng_key, batch)
            log_likelihood = -jnp.sum(
                jnp.maximum(logits, 0) - logits * batch + jnp.log1p(jnp.exp(-jnp.abs(logits))),
                (1, 2),
            )
            kl = 0.5 * jnp.sum(-jnp.log(stddev**2) - 1.0 + stddev**2 + mean**2, axis=-1)
            return -jnp.mean(log_likelihood - kl)

        grads = jax.grad(loss_fn)(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state

    return PublicStep(update, ((params, optimizer.init(params)), batch, jax.random.key(1)))
