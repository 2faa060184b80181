"""Alpa's tutorial on pipelines, on autopar: an MLP with manual and with automatic stages.

At its default size it needs 8 GPUs. Without GPUs, run a smaller size on 8 virtual CPU devices:

    JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=8 \
        python -m experiments.tutorials.pipeshard --dim 128 --batch-size 128

Only the import, JAX's names and the default devices differ from Alpa's text: devices are those of
this process, unless `--cluster ray` is given.
"""

import argparse
import copy

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from jax import random

import autopar as alpa
from autopar.testing import assert_allclose

parser = argparse.ArgumentParser()
parser.add_argument("--dim", type=int, default=2048)
parser.add_argument("--batch-size", type=int, default=2048)
parser.add_argument("--cluster", choices=["local", "ray"], default="local")
parser.add_argument("--num-nodes", type=int)
parser.add_argument("--num-devices-per-node", type=int)
flags = parser.parse_args()
nodes = {"num_nodes": flags.num_nodes, "num_devices_per_node": flags.num_devices_per_node}

if flags.cluster == "ray":
    import ray

    ray.init()
alpa.init(cluster=flags.cluster, **nodes)

# --- Train an MLP on a single device --------------------------------------------------------------


class MLPModel(nn.Module):
    hidden_dim: int

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(features=self.hidden_dim * 4)(x)
        x = nn.relu(x)
        x = nn.Dense(features=self.hidden_dim)(x)
        x = nn.relu(x)
        x = nn.Dense(features=self.hidden_dim * 4)(x)
        x = nn.relu(x)
        x = nn.Dense(features=self.hidden_dim)(x)
        x = nn.relu(x)
        return x


dim = flags.dim
batch_size = flags.batch_size

# Generate ground truth W and b
rngkey = jax.random.PRNGKey(0)
k1, k2 = random.split(rngkey)
W = random.normal(k1, (dim, dim), jnp.float32)
b = random.normal(k2, (dim,), jnp.float32)

# Generate the training data
ksample, knoise = random.split(k1)
x = random.normal(ksample, (batch_size, dim), jnp.float32)
y = (x @ W + b) + 0.1 * random.normal(knoise, (batch_size, dim), jnp.float32)

# Initialize a train state, which includes the model parameters and the optimizer state.
model = MLPModel(hidden_dim=dim)
params = model.init(rngkey, x)
tx = optax.adam(learning_rate=1e-3)
state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)


# Define the training step
def train_step(state, batch):
    def loss_func(params):
        out = model.apply(params, batch["x"])
        loss = jnp.mean((out - batch["y"]) ** 2)
        return loss

    grads = jax.grad(loss_func)(state.params)
    new_state = state.apply_gradients(grads=grads)
    return new_state


batch = {"x": x, "y": y}
expected_state = train_step(state, batch)

# --- Pipeline parallelism with manual assignment --------------------------------------------------


# The model with a pipeline marker.
class ManualPipelineMLPModel(nn.Module):
    hidden_dim: int

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(features=self.hidden_dim * 4)(x)
        x = nn.relu(x)
        x = nn.Dense(features=self.hidden_dim)(x)
        x = nn.relu(x)
        # Use this boundary marker to separate the network into two stages.
        alpa.mark_pipeline_boundary()
        x = nn.Dense(features=self.hidden_dim * 4)(x)
        x = nn.relu(x)
        x = nn.Dense(features=self.hidden_dim)(x)
        x = nn.relu(x)
        return x


# Initialize the train state with the same parameters as the single-device model.
manual_pipeline_model = ManualPipelineMLPModel(hidden_dim=dim)
manual_pipeline_state = TrainState.create(
    apply_fn=manual_pipeline_model.apply, params=copy.deepcopy(params), tx=tx
)


# "alpa.PipeshardParallel" uses both pipeline parallelism and shard parallelism.
@alpa.parallelize(method=alpa.PipeshardParallel(num_micro_batches=16))
def manual_pipeline_train_step(state, batch):
    # Pipeline stages are assigned manually, by the markers.
    @alpa.manual_layer_construction
    def loss_func(params):
        out = state.apply_fn(params, batch["x"])
        loss = jnp.mean((out - batch["y"]) ** 2)
        return loss

    # `alpa.grad` separates the update from the forward and backward stages of the pipeline, so that
    # gradients are accumulated before the update.
    grads = alpa.grad(loss_func)(state.params)
    new_state = state.apply_gradients(grads=grads)
    return new_state


manual_pipeline_actual_state = manual_pipeline_train_step(manual_pipeline_state, batch)
assert_allclose(expected_state.params, manual_pipeline_actual_state.params, atol=5e-3)
print("Manual assignment: equal to the single device")

alpa.shutdown()

# --- Pipeline parallelism with automatic assignment -----------------------------------------------

alpa.init(cluster=flags.cluster, **nodes)


# The model and state are those of the single device; only the two decorators are new. Layers result
# from clustering operators, stages and their meshes from a search for the fastest step.
@alpa.parallelize(method=alpa.PipeshardParallel(num_micro_batches=16, stage_mode="auto"))
def auto_pipeline_train_step(state, batch):
    # `layer_num` is the number of layers.
    @alpa.automatic_layer_construction(layer_num=2)
    def loss_func(params):
        out = state.apply_fn(params, batch["x"])
        loss = jnp.mean((out - batch["y"]) ** 2)
        return loss

    grads = alpa.grad(loss_func)(state.params)
    new_state = state.apply_gradients(grads=grads)
    return new_state


# The first call compiles.
auto_pipeline_actual_state = auto_pipeline_train_step(state, batch)
assert_allclose(expected_state.params, auto_pipeline_actual_state.params, atol=5e-3)
print("Automatic assignment: equal to the single device")

alpa.shutdown()
