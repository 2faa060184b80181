"""Stochastic variational inference with numpyro, as in its examples."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.contrib.module import flax_module
from numpyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal

from experiments.reach.public_step import PublicStep, features


class _Recognition(nn.Module):
    @nn.compact
    def __call__(self, x):
        hidden = nn.softplus(nn.Dense(32)(x))
        return nn.Dense(8)(hidden), jnp.exp(nn.Dense(8)(hidden))


class _Generation(nn.Module):
    @nn.compact
    def __call__(self, z):
        return nn.Dense(16)(nn.softplus(nn.Dense(32)(z)))


def vae() -> PublicStep:
    """examples/vae.py: a variational autoencoder of Flax modules."""

    def model(batch):
        decode = flax_module("decoder", _Generation(), input_shape=(1, 8))
        with numpyro.plate("batch", batch.shape[0]):
            z = numpyro.sample("z", dist.Normal(0, 1).expand([8]).to_event(1))
            numpyro.sample("obs", dist.Bernoulli(logits=decode(z)).to_event(1), obs=batch)

    def guide(batch):
        encode = flax_module("encoder", _Recognition(), input_shape=(1, 16))
        mean, deviation = encode(batch)
        with numpyro.plate("batch", batch.shape[0]):
            numpyro.sample("z", dist.Normal(mean, deviation).to_event(1))

    svi = SVI(model, guide, optax.adam(1e-3), Trace_ELBO())
    batch = (features(16) > 0).astype(jnp.float32)
    return PublicStep(svi.update, (svi.init(jax.random.PRNGKey(0), batch), batch))


def regression() -> PublicStep:
    """A regression on a part of the data, with an automatic guide and two samples."""

    def model(x, y):
        weights = numpyro.sample("weights", dist.Normal(jnp.zeros(4), 1).to_event(1))
        deviation = numpyro.sample("deviation", dist.Exponential(1.0))
        with numpyro.plate("data", 1000, subsample_size=x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ weights, deviation), obs=y)

    svi = SVI(model, AutoNormal(model), optax.sgd(1e-4), TraceMeanField_ELBO(num_particles=2))
    x, y = features(4), features(seed=1)
    return PublicStep(svi.update, (svi.init(jax.random.PRNGKey(0), x, y), x, y))
