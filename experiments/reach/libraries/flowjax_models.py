"""Normalizing flows of flowjax."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import paramax
from flowjax.distributions import Normal
from flowjax.flows import masked_autoregressive_flow
from flowjax.train.losses import MaximumLikelihoodLoss
from flowjax.train.train_utils import step

from experiments.reach.public_step import PublicStep, features


def autoregressive() -> PublicStep:
    """A masked autoregressive flow, trained as `flowjax.train.fit_to_data` does."""
    flow = masked_autoregressive_flow(
        jax.random.key(0), base_dist=Normal(jnp.zeros(4)), flow_layers=2, nn_width=16
    )
    params, static = eqx.partition(
        flow, eqx.is_inexact_array, is_leaf=lambda leaf: isinstance(leaf, paramax.NonTrainable)
    )
    optimizer, loss = optax.adam(1e-3), MaximumLikelihoodLoss()

    def train_step(params, opt_state, x):
        return step(
            params,
            static,
            x,
            optimizer=optimizer,
            opt_state=opt_state,
            loss_fn=loss,
            key=jax.random.key(1),
        )

    return PublicStep(train_step, (params, optimizer.init(params), features(4)))
