"""Optimal transport of ott."""

import flax.linen as nn
import jax
import optax
from flax.training.train_state import TrainState
from ott.geometry import pointcloud
from ott.solvers import linear

from experiments.reach.public_step import PublicStep, features


def sinkhorn() -> PublicStep:
    """A generator trained by the transport cost between its batch and the data."""
    model = nn.Sequential([nn.Dense(32), nn.relu, nn.Dense(4)])
    noise, data = features(4), features(4, seed=1)
    params = model.init(jax.random.key(0), noise)
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))

    def train_step(state, noise, data):
        def loss_fn(params):
            geometry = pointcloud.PointCloud(state.apply_fn(params, noise), data, epsilon=0.5)
            return linear.solve(geometry, max_iterations=20, min_iterations=20).reg_ot_cost

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    return PublicStep(train_step, (state, noise, data))
