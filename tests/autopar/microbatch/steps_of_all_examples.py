"""Training steps whose losses need the outputs of the model for all examples."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

RNG = np.random.default_rng(0)


def normal(*shape):
    return (RNG.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)


PARAMS = {
    "image": [normal(12, 16), normal(16, 16), normal(16, 8)],
    "text": [normal(12, 16), normal(16, 16), normal(16, 8)],
    "scale": np.float32(1.5),
}
BATCH = {
    "image": RNG.standard_normal((16, 12)).astype(np.float32),
    "text": RNG.standard_normal((16, 12)).astype(np.float32),
    "label": RNG.integers(0, 4, 16),
}
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def encoded(weights, x):
    for w in weights[:-1]:
        x = jnp.tanh(x @ w)
    return x @ weights[-1]


def unit(x):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def both(params, batch):
    return [unit(encoded(params[name], batch[name])) for name in ("image", "text")]


def clip(params, batch):
    """Radford et al. 2021, arXiv:2103.00020, figure 3."""
    image, text = both(params, batch)
    logits = jnp.exp(params["scale"]) * image @ text.T
    labels = jnp.arange(len(logits))
    return (cross_entropy(logits, labels).mean() + cross_entropy(logits.T, labels).mean()) / 2


def siglip(params, batch):
    """Zhai et al. 2023, arXiv:2303.15343, algorithm 1."""
    image, text = both(params, batch)
    logits = jnp.exp(params["scale"]) * image @ text.T - 10
    signs = 2 * jnp.eye(len(logits)) - 1
    return -jax.nn.log_sigmoid(signs * logits).sum(-1).mean()


def simclr(params, batch):
    """Chen et al. 2020, arXiv:2002.05709, equation 1; the views are joined before the model."""
    views = jnp.concatenate([batch["image"], batch["text"]])
    z = unit(encoded(params["image"], views))
    similarity = jnp.where(jnp.eye(len(z), dtype=bool), -1e9, z @ z.T / 0.1)
    half = len(z) // 2
    other = jnp.concatenate([jnp.arange(half) + half, jnp.arange(half)])
    return cross_entropy(similarity, other).mean()


def hardest_triplets(params, batch):
    """Hermans et al. 2017, arXiv:1703.07737, equation 5."""
    z = encoded(params["image"], batch["image"])
    distance = ((z[:, None] - z[None]) ** 2).sum(-1)
    same = batch["label"][:, None] == batch["label"][None]
    farthest = jnp.where(same, distance, 0).max(1)
    nearest = jnp.where(same, 1e9, distance).min(1)
    return jax.nn.relu(farthest - nearest + 1).mean()


def vicreg(params, batch):
    """Bardes et al. 2022, arXiv:2105.04906, equation 6."""
    views = [encoded(params["image"], batch[name]) for name in ("image", "text")]

    def regularizer(z):
        z = z - z.mean(0)
        covariance = z.T @ z / (len(z) - 1)
        others = covariance - jnp.diag(jnp.diag(covariance))
        return jax.nn.relu(1 - jnp.sqrt(z.var(0) + 1e-4)).mean() + (others**2).sum() / 8

    return ((views[0] - views[1]) ** 2).mean() + sum(map(regularizer, views))


def balanced(params, batch):
    """A balance loss of experts (Fedus et al. 2021, arXiv:2101.03961, equation 4)."""
    hidden = jnp.tanh(batch["image"] @ params["image"][0])
    gates = jax.nn.softmax(hidden @ params["image"][2])
    load = jax.nn.one_hot(gates.argmax(-1), 8).mean(0)
    hidden = hidden + gates.max(-1, keepdims=True) * jnp.tanh(hidden @ params["image"][1])
    balance = 8 * (load * gates.mean(0)).sum()
    return (encoded(params["text"][1:], hidden) ** 2).mean() + 0.1 * balance


def ridge(params, batch):
    """A ridge regression on embeddings, in closed form.

    Bertinetto et al. 2019, arXiv:1805.08136, equation 5.
    """
    z, y = encoded(params["image"], batch["image"]), batch["text"]
    solution = jnp.linalg.solve(z.T @ z + jnp.eye(8), z.T @ y)
    return ((z @ solution - y) ** 2).mean()


LOSSES = {
    loss.__name__: loss
    for loss in (clip, siglip, simclr, hardest_triplets, vicreg, balanced, ridge)
}


def step_of(loss):
    def step(params, batch):
        value, gradients = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    return step


def alternating(params, batch):
    """Update a discriminator, then a generator against the new one, as a GAN does."""
    generator, discriminator = params["text"], [*params["image"][:-1], params["image"][-1][:, :1]]
    fake_of = [*generator[:-1], jnp.tile(generator[-1], (1, 2))[:, :12]]

    def d_loss(weights):
        real = encoded(weights, batch["image"])
        fake = encoded(weights, encoded(fake_of, batch["text"]))
        return jax.nn.softplus(-real).mean() + jax.nn.softplus(fake).mean()

    lost, gradients = jax.value_and_grad(d_loss)(discriminator)
    discriminator = jax.tree.map(lambda p, g: p - 0.1 * g, discriminator, gradients)

    def g_loss(weights):
        return jax.nn.softplus(-encoded(discriminator, encoded(weights, batch["text"]))).mean()

    value, gradients = jax.value_and_grad(g_loss)(fake_of)
    return jax.tree.map(lambda p, g: p - 0.1 * g, fake_of, gradients), discriminator, lost, value


def updated(loss, weights):
    """Return a value of a loss and the weights after a step along the clipped gradient."""
    value, gradients = jax.value_and_grad(loss)(weights)
    rate = 0.1 / jnp.maximum(optax.tree.norm(gradients), 1)
    return value, jax.tree.map(lambda w, g: w - rate * g, weights, gradients)


def weighted_by_new_critic(params, batch):
    """Weigh examples by a softmax over the batch of an updated critic's values.

    Nair et al. 2020, arXiv:2006.09359, equation 13.
    """

    def critic_loss(critic):
        return ((encoded(critic, batch["image"])[:, 0] - batch["label"]) ** 2).mean()

    lost, critic = updated(critic_loss, params["image"])
    weights = jax.nn.softmax(encoded(critic, batch["image"])[:, 0])

    def actor_loss(actor):
        return (weights[:, None] * encoded(actor, batch["text"]) ** 2).sum()

    return lost, critic, updated(actor_loss, params["text"])


def free_nats(params, batch):
    """Train a model with a bound on a mean, then another one that reads the new model's outputs.

    Hafner et al. 2023, arXiv:2301.04104, equation 5.
    """

    def outputs(model):
        weights, bias = model
        return encoded(weights, batch["image"]) + bias

    def model_loss(model):
        z = outputs(model)
        return (z[:, 1:] ** 2).mean() + jnp.maximum((z[:, 0] ** 2).mean(), 0.01)

    lost, model = updated(model_loss, (params["image"], params["scale"]))

    def actor_loss(actor):
        z = jnp.tile(outputs(model), (1, 2))[:, :12]
        return (encoded(actor, z) ** 2).mean()

    return lost, model, updated(actor_loss, params["text"])


def normalized_observations(params, batch):
    """Normalize inputs by running statistics, then outputs by statistics of the batch.

    Brax's PPO (Freeman et al. 2021, arXiv:2106.13281) does both.
    """
    count = 10 + len(batch["image"])
    mean = params["image"][0][:, 0]
    mean = mean + (batch["image"] - mean).sum(0) / count

    def loss(weights):
        z = encoded(weights, batch["image"] - mean)
        advantage = jax.lax.stop_gradient(batch["label"] - z[:, 0])
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
        return (advantage * z[:, 1]).mean() + (z[:, 0] ** 2).mean()

    return mean, updated(loss, params["text"])


def generated(params, batch):
    """Update a discriminator, then a generator with a loss that needs a mean of what it draws.

    Karras et al. 2020, arXiv:1912.04958, equation 4, has such a mean. The latents depend on a key
    alone, so the generator's layers do not depend on the batch.
    """
    latents = jax.random.normal(jax.random.key(0), batch["text"].shape)
    critic = params["image"]
    fake_of = [*params["text"][:-1], jnp.tile(params["text"][-1], (1, 2))[:, :12]]

    def critic_loss(critic):
        fake = encoded(critic, encoded(fake_of, latents))[:, 0]
        return jax.nn.softplus(fake).mean() - encoded(critic, batch["image"])[:, 0].mean()

    lost, critic = updated(critic_loss, critic)

    def generator_loss(weights):
        made = encoded(weights, latents)
        lengths = jnp.linalg.norm(made, axis=1)
        return ((lengths - lengths.mean()) ** 2).mean() - encoded(critic, made)[:, 0].mean()

    return lost, critic, updated(generator_loss, fake_of)


STEPS = {name: step_of(loss) for name, loss in LOSSES.items()} | {
    step.__name__: step
    for step in (
        alternating,
        weighted_by_new_critic,
        free_nats,
        normalized_observations,
        generated,
    )
}
