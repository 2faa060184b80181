"""A normalizing flow of distrax, trained as in its examples."""

import distrax
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.reach.public_step import PublicStep, features


def _conditioner(size: int, parameters: int) -> hk.Sequential:
    return hk.Sequential([
        hk.nets.MLP([32, 32], activate_final=True),
        hk.Linear(size * parameters, w_init=jnp.zeros, b_init=jnp.zeros),
        hk.Reshape((size, parameters)),
    ])  # fmt: skip


def flow() -> PublicStep:
    """examples/flow.py: masked couplings with rational quadratic splines."""
    size, bins = 8, 4
    parameters = 3 * bins + 1

    def flow_model():
        mask = jnp.arange(0, np.prod(size)) % 2 == 0
        layers = []
        for _ in range(2):
            layers.append(
                distrax.MaskedCoupling(
                    mask=mask,
                    bijector=lambda params: distrax.RationalQuadraticSpline(params, 0.0, 1.0),
                    conditioner=_conditioner(size, parameters),
                )
            )
            mask = jnp.logical_not(mask)
        base = distrax.Independent(distrax.Uniform(jnp.zeros(size), jnp.ones(size)), 1)
        return distrax.Transformed(base, distrax.Inverse(distrax.Chain(layers)))

    log_prob = hk.without_apply_rng(hk.transform(lambda data: flow_model().log_prob(data)))
    optimizer = optax.adam(1e-3)
    data = jax.nn.sigmoid(features(size))
    params = log_prob.init(jax.random.key(0), data)

    def update(params, opt_state, batch, prng_key):
        def loss_fn(params):
            noise = jax.random.uniform(prng_key, batch.shape)
            return -jnp.mean(log_prob.apply(params, (batch * 255 + noise) / 256))

        grads = jax.grad(loss_fn)(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state

    args = (params, optimizer.init(params), data, jax.random.key(1))
    return PublicStep(update, args, options={"batch_argnums": 2})


def vae() -> PublicStep:
    """examples/vae.py: distributions as the encoder's and decoder's results."""

    @hk.transform
    def elbo(x):
        hidden = jax.nn.relu(hk.Linear(32)(hk.Flatten()(x)))
        posterior = distrax.MultivariateNormalDiag(
            hk.Linear(8)(hidden), jnp.exp(hk.Linear(8)(hidden))
        )
        z = posterior.sample(seed=hk.next_rng_key())
        logits = hk.Linear(64)(jax.nn.relu(hk.Linear(32)(z))).reshape(-1, 8, 8)
        likelihood = distrax.Independent(distrax.Bernoulli(logits=logits), 2)
        prior = distrax.MultivariateNormalDiag(jnp.zeros(8), jnp.ones(8))
        return likelihood.log_prob(x) - posterior.kl_divergence(prior)

    optimizer = optax.adam(1e-3)
    batch = (features(8, 8) > 0).astype(jnp.float32)
    params = elbo.init(jax.random.key(0), batch)

    def update(state, batch, rng_key):
        params, opt_state = state
        grads = jax.grad(lambda params: -jnp.mean(elbo.apply(params, rng_key, batch)))(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state

    return PublicStep(update, ((params, optimizer.init(params)), batch, jax.random.key(1)))
