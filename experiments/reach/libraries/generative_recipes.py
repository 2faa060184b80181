"""Training steps of generative models, as tutorials and the code of papers write them."""

from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import struct
from flax.training import train_state

from experiments.reach.public_step import PublicStep, features


class _Generator(nn.Module):
    @nn.compact
    def __call__(self, z):
        x = nn.relu(nn.Dense(4 * 4 * 16)(z)).reshape(-1, 4, 4, 16)
        x = nn.relu(nn.ConvTranspose(8, (4, 4), (2, 2))(x))
        return nn.tanh(nn.Conv(1, (3, 3))(x))


class _Discriminator(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.leaky_relu(nn.Conv(8, (4, 4), (2, 2))(x), 0.2)
        x = nn.leaky_relu(nn.Conv(16, (4, 4), (2, 2))(x), 0.2)
        return nn.Dense(1)(x.reshape(x.shape[0], -1))


def gan() -> PublicStep:
    """A GAN: one step updates the discriminator, and the generator against the new one."""
    generator, discriminator = _Generator(), _Discriminator()
    latent = 8

    def d_loss_fn(d_params, g_params, images, z):
        fake = jax.lax.stop_gradient(generator.apply(g_params, z))
        real_logits = discriminator.apply(d_params, images)
        fake_logits = discriminator.apply(d_params, fake)
        real = optax.sigmoid_binary_cross_entropy(real_logits, jnp.ones_like(real_logits))
        generated = optax.sigmoid_binary_cross_entropy(fake_logits, jnp.zeros_like(fake_logits))
        return jnp.mean(real) + jnp.mean(generated)

    def g_loss_fn(g_params, d_params, z):
        logits = discriminator.apply(d_params, generator.apply(g_params, z))
        return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, jnp.ones_like(logits)))

    def train_step(g_state, d_state, images, rng):
        z_rng_1, z_rng_2 = jax.random.split(rng)
        z = jax.random.normal(z_rng_1, (images.shape[0], latent))
        d_loss, d_grads = jax.value_and_grad(d_loss_fn)(d_state.params, g_state.params, images, z)
        d_state = d_state.apply_gradients(grads=d_grads)
        z = jax.random.normal(z_rng_2, (images.shape[0], latent))
        g_loss, g_grads = jax.value_and_grad(g_loss_fn)(g_state.params, d_state.params, z)
        g_state = g_state.apply_gradients(grads=g_grads)
        return g_state, d_state, {"d_loss": d_loss, "g_loss": g_loss}

    images = jnp.tanh(features(8, 8, 1))
    g_params = generator.init(jax.random.key(0), jnp.ones((1, latent)))
    d_params = discriminator.init(jax.random.key(1), images[:1])
    tx = optax.adam(2e-4, b1=0.5)
    create = train_state.TrainState.create
    g_state = create(apply_fn=generator.apply, params=g_params, tx=tx)
    d_state = create(apply_fn=discriminator.apply, params=d_params, tx=tx)
    return PublicStep(train_step, (g_state, d_state, images, jax.random.PRNGKey(3)))


def wgan_gp() -> PublicStep:
    """The critic of a WGAN-GP: the norm of its gradient by each interpolated image is near one."""
    generator, critic = _Generator(), _Discriminator()

    def gradient_penalty(params, real, fake, rng):
        alpha = jax.random.uniform(rng, (real.shape[0], 1, 1, 1))
        mixed = alpha * real + (1 - alpha) * fake
        slopes = jax.grad(lambda x: critic.apply(params, x).sum())(mixed)
        norms = jnp.sqrt(jnp.sum(slopes**2, axis=(1, 2, 3)) + 1e-12)
        return jnp.mean((norms - 1.0) ** 2)

    @jax.jit
    def critic_step(params, opt_state, g_params, real, rng):
        z_rng, gp_rng = jax.random.split(rng)
        fake = generator.apply(g_params, jax.random.normal(z_rng, (real.shape[0], 8)))

        def loss_fn(params):
            wasserstein = critic.apply(params, fake).mean() - critic.apply(params, real).mean()
            penalty = gradient_penalty(params, real, fake, gp_rng)
            return wasserstein + 10.0 * penalty, (wasserstein, penalty)

        (loss, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss, aux

    tx = optax.adam(1e-4, b1=0.0, b2=0.9)
    real = jnp.tanh(features(8, 8, 1))
    params = critic.init(jax.random.key(1), real[:1])
    g_params = generator.init(jax.random.key(0), jnp.ones((1, 8)))
    return PublicStep(critic_step, (params, tx.init(params), g_params, real, jax.random.key(2)))


class _UNet(nn.Module):
    """Two levels with skip connections; the time step modulates each block."""

    @nn.compact
    def __call__(self, x, t):
        half = 8
        angles = t[:, None] * jnp.exp(-jnp.log(1e4) * jnp.arange(half) / half)
        emb = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
        emb = nn.Dense(32)(nn.swish(nn.Dense(32)(emb)))

        def block(x, width):
            h = nn.Conv(width, (3, 3))(nn.swish(nn.GroupNorm(4)(x)))
            scale, shift = jnp.split(nn.Dense(2 * width)(nn.swish(emb)), 2, axis=-1)
            h = nn.GroupNorm(4)(h) * (1 + scale[:, None, None]) + shift[:, None, None]
            h = nn.Conv(width, (3, 3), kernel_init=nn.initializers.normal(0.02))(nn.swish(h))
            return h + (x if x.shape[-1] == width else nn.Conv(width, (1, 1))(x))

        first = block(nn.Conv(8, (3, 3))(x), 8)
        x = nn.Conv(16, (3, 3), strides=(2, 2))(first)
        x = block(x, 16)
        b, h, w, c = x.shape
        tokens = nn.LayerNorm()(x.reshape(b, h * w, c))
        x = x + nn.SelfAttention(num_heads=2)(tokens).reshape(b, h, w, c)
        x = jax.image.resize(x, (b, 2 * h, 2 * w, c), method="nearest")
        x = block(jnp.concatenate([x, first], axis=-1), 8)
        return nn.Conv(1, (3, 3))(nn.swish(nn.GroupNorm(4)(x)))


class _EmaState(train_state.TrainState):
    ema_params: Any


def ddpm() -> PublicStep:
    """A diffusion model that predicts noise, with a moving average of its parameters."""
    model = _UNet()
    betas = jnp.linspace(1e-4, 0.02, 100)
    alphas_cumprod = jnp.cumprod(1.0 - betas)

    def q_sample(x, t, noise):
        scale = jnp.sqrt(alphas_cumprod[t])[:, None, None, None]
        sigma = jnp.sqrt(1 - alphas_cumprod[t])[:, None, None, None]
        return scale * x + sigma * noise

    def train_step(state, batch, rng):
        t_rng, noise_rng = jax.random.split(jax.random.fold_in(rng, state.step))
        images = batch["image"]
        t = jax.random.randint(t_rng, (images.shape[0],), 0, len(betas))
        noise = jax.random.normal(noise_rng, images.shape)

        def loss_fn(params):
            predicted = state.apply_fn({"params": params}, q_sample(images, t, noise), t)
            per_image = jnp.mean((predicted - noise) ** 2, axis=(1, 2, 3))
            snr = alphas_cumprod[t] / (1 - alphas_cumprod[t])
            return jnp.mean(per_image * jnp.minimum(snr, 5.0) / snr)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        state = state.apply_gradients(grads=grads)
        decay = jnp.minimum(0.999, (1 + state.step) / (10 + state.step))
        ema = jax.tree.map(lambda e, p: decay * e + (1 - decay) * p, state.ema_params, state.params)
        return state.replace(ema_params=ema), {"loss": loss, "norm": optax.global_norm(grads)}

    images = features(8, 8, 1)
    params = model.init(jax.random.key(0), images, jnp.zeros(8))["params"]
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4))
    ema = jax.tree.map(jnp.copy, params)
    state = _EmaState.create(apply_fn=model.apply, params=params, tx=tx, ema_params=ema)
    return PublicStep(train_step, (state, {"image": images}, jax.random.PRNGKey(1)))


class _DiT(nn.Module):
    """A diffusion transformer, conditioned by adaptive layer norms that start at zero."""

    width: int = 16

    @nn.compact
    def __call__(self, x, t, label, train: bool):
        b = x.shape[0]
        x = x.reshape(b, 4, 2, 4, 2, 1).transpose(0, 1, 3, 2, 4, 5).reshape(b, 16, 4)
        positions = self.param("pos", nn.initializers.normal(0.02), (1, 16, self.width))
        x = nn.Dense(self.width)(x) + positions
        angles = t[:, None] * 2.0 ** jnp.arange(4)
        c = nn.Dense(self.width)(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1))
        if train:  # classifier-free guidance drops labels
            drop = jax.random.bernoulli(self.make_rng("dropout"), 0.1, (b,))
            label = jnp.where(drop, 10, label)
        c = nn.silu(c + nn.Embed(11, self.width)(label))
        for _ in range(2):
            adapted = nn.Dense(6 * self.width, kernel_init=nn.initializers.normal(0.02))(c)
            s1, b1, g1, s2, b2, g2 = jnp.split(adapted[:, None], 6, axis=-1)
            h = nn.LayerNorm(use_scale=False, use_bias=False)(x) * (1 + s1) + b1
            x = x + g1 * nn.MultiHeadDotProductAttention(2)(h, h)
            h = nn.LayerNorm(use_scale=False, use_bias=False)(x) * (1 + s2) + b2
            x = x + g2 * nn.Dense(self.width)(nn.gelu(nn.Dense(4 * self.width)(h)))
        x = nn.Dense(4)(nn.LayerNorm()(x))
        return x.reshape(b, 4, 4, 2, 2, 1).transpose(0, 1, 3, 2, 4, 5).reshape(b, 8, 8, 1)


@struct.dataclass
class _FlowState:
    params: Any
    ema: Any
    opt_state: Any
    step: jax.Array
    rng: jax.Array


def flow_matching() -> PublicStep:
    """Rectified flow with a diffusion transformer; the state carries its own random key."""
    model = _DiT()
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 10, 100)
    tx = optax.adamw(schedule, weight_decay=0.01)

    def train_step(state: _FlowState, images, labels):
        rng, t_rng, noise_rng, drop_rng = jax.random.split(state.rng, 4)
        t = jax.nn.sigmoid(jax.random.normal(t_rng, (len(images),)))
        noise = jax.random.normal(noise_rng, images.shape, images.dtype)
        x_t = jax.vmap(lambda t, x, e: (1 - t) * e + t * x)(t, images, noise)

        def loss_fn(params):
            velocity = model.apply(params, x_t, t, labels, train=True, rngs={"dropout": drop_rng})
            return jnp.square(velocity - (images - noise)).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        state = state.replace(
            params=params,
            ema=optax.incremental_update(params, state.ema, 1e-3),
            opt_state=opt_state,
            step=state.step + 1,
            rng=rng,
        )
        return state, {"loss": loss, "lr": schedule(state.step)}

    images = features(8, 8, 1)
    labels = jnp.arange(8) % 10
    params = model.init(jax.random.key(0), images, jnp.zeros(8), labels, train=False)
    ema = jax.tree.map(jnp.copy, params)
    state = _FlowState(params, ema, tx.init(params), jnp.zeros((), jnp.int32), jax.random.key(4))
    return PublicStep(train_step, (state, images, labels))


class _Codebook(NamedTuple):
    vectors: jax.Array  # (codes, width)
    counts: jax.Array
    sums: jax.Array


def vq_vae() -> PublicStep:
    """A VQ-VAE whose codebook is a moving average of the encodings of each code."""
    codes, width = 16, 8
    encoder, decoder = nn.Dense(width), nn.Dense(12)
    hidden_in, hidden_out = nn.Dense(32), nn.Dense(32)
    tx = optax.adam(3e-4)

    def quantize(codebook, z):
        flat = z.reshape(-1, width)
        distances = (
            jnp.sum(flat**2, 1, keepdims=True)
            - 2 * flat @ codebook.vectors.T
            + jnp.sum(codebook.vectors**2, 1)
        )
        indices = jnp.argmin(distances, axis=1)
        quantized = codebook.vectors[indices].reshape(z.shape)
        return quantized, jax.nn.one_hot(indices, codes), flat

    def train_step(params, codebook, opt_state, x):
        def loss_fn(params):
            z = encoder.apply(params["encoder"], nn.relu(hidden_in.apply(params["in"], x)))
            quantized, one_hot, flat = quantize(codebook, z)
            commitment = jnp.mean((z - jax.lax.stop_gradient(quantized)) ** 2)
            straight = z + jax.lax.stop_gradient(quantized - z)
            output = decoder.apply(
                params["decoder"], nn.relu(hidden_out.apply(params["out"], straight))
            )
            reconstruction = jnp.mean((output - x) ** 2)
            usage = one_hot.mean(0)
            perplexity = jnp.exp(-jnp.sum(usage * jnp.log(usage + 1e-10)))
            aux = (one_hot, flat, {"reconstruction": reconstruction, "perplexity": perplexity})
            return reconstruction + 0.25 * commitment, aux

        (loss, (one_hot, flat, metrics)), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state)
        params = optax.apply_updates(params, updates)
        counts = 0.99 * codebook.counts + 0.01 * one_hot.sum(0)
        sums = 0.99 * codebook.sums + 0.01 * one_hot.T @ jax.lax.stop_gradient(flat)
        total = counts.sum()
        smoothed = (counts + 1e-5) / (total + codes * 1e-5) * total
        codebook = _Codebook(sums / smoothed[:, None], counts, sums)
        return params, codebook, opt_state, {"loss": loss, **metrics}

    x = features(4, 12)
    keys = jax.random.split(jax.random.key(0), 5)
    params = {
        "in": hidden_in.init(keys[0], jnp.ones((1, 12))),
        "encoder": encoder.init(keys[1], jnp.ones((1, 32))),
        "out": hidden_out.init(keys[2], jnp.ones((1, width))),
        "decoder": decoder.init(keys[3], jnp.ones((1, 32))),
    }
    vectors = jax.random.normal(keys[4], (codes, width))
    codebook = _Codebook(vectors, jnp.ones(codes), jnp.copy(vectors))
    return PublicStep(train_step, (params, codebook, tx.init(params), x))


def beta_vae() -> PublicStep:
    """A VAE written for one image and mapped over images and keys; the loss is a sum."""

    def init_layer(key, rows, columns):
        return jax.random.normal(key, (rows, columns)) * rows**-0.5, jnp.zeros(columns)

    keys = jax.random.split(jax.random.PRNGKey(0), 4)
    sizes = [(24, 32), (32, 8), (4, 32), (32, 24)]
    params = [init_layer(key, *size) for key, size in zip(keys, sizes, strict=True)]

    def elbo(params, rng, x, beta):
        (w1, b1), (w2, b2), (w3, b3), (w4, b4) = params
        mean, log_var = jnp.split(jnp.tanh(x @ w1 + b1) @ w2 + b2, 2)
        z = mean + jnp.exp(0.5 * log_var) * jax.random.normal(rng, mean.shape)
        logits = jnp.tanh(z @ w3 + b3) @ w4 + b4
        log_px = -jnp.sum(jnp.logaddexp(0.0, jnp.where(x > 0, -1.0, 1.0) * logits))
        kl = 0.5 * jnp.sum(jnp.exp(log_var) + mean**2 - 1.0 - log_var)
        return log_px - beta * kl

    def loss(params, rng, images, beta):
        rngs = jax.random.split(rng, images.shape[0])
        return -jnp.mean(jax.vmap(elbo, in_axes=(None, 0, 0, None))(params, rngs, images, beta))

    def run_step(i, params, momentum, images):
        rng = jax.random.fold_in(jax.random.PRNGKey(1), i)
        beta = jnp.minimum(1.0, i / 100.0)
        value, grads = jax.value_and_grad(loss)(params, rng, images, beta)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
        params = jax.tree.map(lambda p, m: p - 1e-3 * m, params, momentum)
        return i + 1, params, momentum, value

    momentum = jax.tree.map(jnp.zeros_like, params)
    images = (features(24) > 0).astype(jnp.float32)
    return PublicStep(run_step, (jnp.asarray(7), params, momentum, images))


def energy_langevin() -> PublicStep:
    """An energy model: Langevin steps from a replay buffer give the negative examples."""
    energy = nn.Sequential([nn.Dense(32), nn.swish, nn.Dense(32), nn.swish, nn.Dense(1)])
    tx = optax.chain(optax.clip(0.1), optax.adam(1e-4))

    def langevin(params, x, rng, steps=5):
        def body(x, rng):
            slope = jax.grad(lambda x: energy.apply(params, x).sum())(x)
            noise = jax.random.normal(rng, x.shape)
            x = x - 0.1 * jnp.clip(slope, -0.03, 0.03) + 0.005 * noise
            return jnp.clip(x, -1.0, 1.0), None

        return jax.lax.scan(body, x, jax.random.split(rng, steps))[0]

    @jax.jit
    def train_step(params, opt_state, real, buffer, rng):
        noise_rng, chain_rng = jax.random.split(rng)
        fake = jax.lax.stop_gradient(langevin(params, buffer, chain_rng))
        real = real + 0.005 * jax.random.normal(noise_rng, real.shape)

        def loss_fn(params):
            real_e = energy.apply(params, real)[:, 0]
            fake_e = energy.apply(params, fake)[:, 0]
            contrastive = real_e.mean() - fake_e.mean()
            return contrastive + 0.1 * (real_e**2 + fake_e**2).mean(), contrastive

        (loss, gap), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, fake, {"loss": loss, "gap": gap}

    real = jnp.clip(features(12), -1, 1)
    params = energy.init(jax.random.key(0), real)
    buffer = jnp.clip(features(12, seed=5), -1, 1)
    return PublicStep(train_step, (params, tx.init(params), real, buffer, jax.random.key(9)))


def hash_grid_nerf() -> PublicStep:
    """A radiance field on hashed grids: rays are sampled, looked up and composited."""
    levels, table_size, width = 3, 64, 2
    primes = jnp.array([1, 2654435761, 805459861], jnp.uint32)
    mlp = nn.Sequential([nn.Dense(32), nn.relu, nn.Dense(32), nn.relu, nn.Dense(4)])

    def encode(tables, point):
        encoded = []
        for level in range(levels):
            scaled = point * 4 * 2**level
            low = jnp.floor(scaled).astype(jnp.uint32)
            part = scaled - low
            total = 0.0
            for corner in range(8):
                offset = jnp.array([(corner >> i) & 1 for i in range(3)], jnp.uint32)
                mixed = (low + offset) * primes
                index = (mixed[0] ^ mixed[1] ^ mixed[2]) % table_size
                weight = jnp.prod(jnp.where(offset == 1, part, 1 - part))
                total = total + weight * tables[level, index]
            encoded.append(total)
        return jnp.concatenate(encoded)

    def render(params, origin, direction, rng, samples=6):
        edges = jnp.linspace(0.1, 1.0, samples + 1)
        depths = edges[:-1] + jax.random.uniform(rng, (samples,)) * (edges[1:] - edges[:-1])
        points = origin + depths[:, None] * direction
        inputs = jax.vmap(partial(encode, params["tables"]))(jnp.abs(points) % 1.0)
        raw = mlp.apply(params["mlp"], inputs)
        color, density = jax.nn.sigmoid(raw[:, :3]), jax.nn.softplus(raw[:, 3])
        spacing = jnp.diff(depths, append=1.1)
        alpha = 1 - jnp.exp(-density * spacing)
        through = jnp.cumprod(jnp.concatenate([jnp.ones(1), 1 - alpha[:-1] + 1e-10]))
        weights = alpha * through
        return weights @ color + (1 - weights.sum())

    def train_step(params, opt_state, rays, colors, key):
        def loss_fn(params):
            keys = jax.random.split(key, rays.shape[0])
            rendered = jax.vmap(render, (None, 0, 0, 0))(params, rays[:, 0], rays[:, 1], keys)
            return jnp.mean((rendered - colors) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        psnr = -10.0 * jnp.log10(loss)
        return optax.apply_updates(params, updates), opt_state, loss, psnr

    tx = optax.adam(1e-2, b2=0.99, eps=1e-10)
    params = {
        "tables": jax.random.uniform(jax.random.key(0), (levels, table_size, width), minval=-0.1),
        "mlp": mlp.init(jax.random.key(1), jnp.ones((1, levels * width))),
    }
    rays, colors = features(2, 3), jax.nn.sigmoid(features(3, seed=2))
    return PublicStep(train_step, (params, tx.init(params), rays, colors, jax.random.key(2)))
