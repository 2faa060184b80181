"""Alpa's quickstart, on autopar: an MLP on one device, parallelized automatically, and with pmap.

At its default size it needs 8 GPUs. Without GPUs, run a smaller size on 8 virtual CPU devices:

    JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=8 \
        python -m experiments.tutorials.quickstart --dim 128 --batch-size 128

It differs from Alpa's text only where JAX has changed: `jax.device_put` replicates and splits
arrays, `memory_analysis()` reports memory, and the arguments of the serial step are on one device,
since `jax.jit` runs on the devices of its arguments. With `--cluster ray` the parallelized step
runs on the hosts of a Ray cluster.
"""

import argparse
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from jax import random

import autopar as alpa
from autopar.testing import assert_allclose

parser = argparse.ArgumentParser()
parser.add_argument("--dim", type=int, default=2048)
parser.add_argument("--batch-size", type=int, default=2048)
parser.add_argument("--num-layers", type=int, default=10)
parser.add_argument("--cluster", choices=["local", "ray"], default="local")
parser.add_argument("--num-nodes", type=int)
parser.add_argument("--num-devices-per-node", type=int)
flags = parser.parse_args()

if flags.cluster == "ray":
    import ray

    ray.init()
    alpa.init(
        cluster="ray", num_nodes=flags.num_nodes, num_devices_per_node=flags.num_devices_per_node
    )

# --- Train an MLP on a single device --------------------------------------------------------------


class MLPModel(nn.Module):
    hidden_dim: int
    num_layers: int

    @nn.compact
    def __call__(self, x):
        for i in range(self.num_layers):
            if i % 2 == 0:
                x = nn.Dense(features=self.hidden_dim * 4)(x)
            else:
                x = nn.Dense(features=self.hidden_dim)(x)
            x = nn.relu(x)
        return x


dim = flags.dim
batch_size = flags.batch_size
num_layers = flags.num_layers

# Generate ground truth W and b
rngkey = jax.random.PRNGKey(0)
k1, k2 = random.split(rngkey)
W = random.normal(k1, (dim, dim))
b = random.normal(k2, (dim,))

# Generate the training data
ksample, knoise = random.split(k1)
x = random.normal(ksample, (batch_size, dim))
y = (x @ W + b) + 0.1 * random.normal(knoise, (batch_size, dim))

# Initialize a train state, which includes the model parameters and the optimizer state.
model = MLPModel(hidden_dim=dim, num_layers=num_layers)
params = model.init(rngkey, x)
tx = optax.adam(learning_rate=1e-3)
state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)


# Define the training function and execute one step
def train_step(state, batch):
    def loss_func(params):
        out = state.apply_fn(params, batch["x"])
        loss = jnp.mean((out - batch["y"]) ** 2)
        return loss

    grads = jax.grad(loss_func)(state.params)
    new_state = state.apply_gradients(grads=grads)
    return new_state


batch = {"x": x, "y": y}
expected_state = train_step(state, batch)

# --- Auto-parallelization with alpa.parallelize ---------------------------------------------------


# The body of this function is the same as the ``train_step`` above.
# The only difference is the decorator.
@alpa.parallelize
def alpa_train_step(state, batch):
    def loss_func(params):
        out = state.apply_fn(params, batch["x"])
        loss = jnp.mean((out - batch["y"]) ** 2)
        return loss

    grads = jax.grad(loss_func)(state.params)
    new_state = state.apply_gradients(grads=grads)
    return new_state


# Test correctness
actual_state = alpa_train_step(state, batch)
assert_allclose(expected_state.params, actual_state.params, atol=5e-3)

print("Input parameter type:", type(state.params["params"]["Dense_0"]["kernel"]))
print("Output parameter type:", type(actual_state.params["params"]["Dense_0"]["kernel"]))

# We can use `np.array` to convert a distributed array back to a numpy array.
kernel_np = np.array(actual_state.params["params"]["Dense_0"]["kernel"])

# --- Execution speed comparison -------------------------------------------------------------------

# We need this assignment because the original `state` is "donated" and freed.
state = jax.device_put(jax.tree.map(np.array, actual_state), jax.devices()[0])
from autopar.util import benchmark_func  # noqa: E402

# Benchmark serial execution with jax.jit
jit_train_step = jax.jit(train_step, donate_argnums=(0,))
jit_executable = jit_train_step.lower(state, batch).compile()


def sync_func():
    jax.block_until_ready(state)


def serial_execution():
    global state
    state = jit_train_step(state, batch)


costs = benchmark_func(serial_execution, sync_func, warmup=5, number=10, repeat=5) * 1e3
print(f"Serial execution time. Mean: {np.mean(costs):.2f} ms, Std: {np.std(costs):.2f} ms")

# Benchmark parallel execution with alpa
# We distribute arguments in advance for the benchmarking purpose.
state, batch = alpa_train_step.preshard_dynamic_args(state, batch)


def alpa_execution():
    global state
    state = alpa_train_step(state, batch)


alpa_costs = benchmark_func(alpa_execution, sync_func, warmup=5, number=10, repeat=5) * 1e3
print(
    f"Alpa execution time.   Mean: {np.mean(alpa_costs):.2f} ms, Std: {np.std(alpa_costs):.2f} ms"
)

# --- Memory usage comparison ----------------------------------------------------------------------

GB = 1024**3


def total_allocation_size(executable):
    memory = executable.memory_analysis()
    kept = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return kept + memory.temp_size_in_bytes


print(f"Serial execution per GPU memory usage: {total_allocation_size(jit_executable) / GB:.2f} GB")

alpa_executable = alpa_train_step.get_executable(state, batch)
print(
    "Alpa execution per GPU memory usage:  "
    f" {alpa_executable.get_total_allocation_size() / GB:.2f} GB"
)

# --- Comparison against data parallelism (or jax.pmap) --------------------------------------------


@partial(jax.pmap, axis_name="batch")
def pmap_train_step(state, batch):
    def loss_func(params):
        out = model.apply(params, batch["x"])
        loss = jnp.mean((out - batch["y"]) ** 2)
        return loss

    grads = jax.grad(loss_func)(state.params)
    # all-reduce gradients
    grads = jax.lax.pmean(grads, axis_name="batch")
    new_state = state.apply_gradients(grads=grads)
    return new_state


# Replicate model and distribute batch
devices = jax.local_devices()
per_device = jax.sharding.NamedSharding(jax.sharding.Mesh(devices, ("batch",)), jax.P("batch"))
state = jax.tree.map(
    lambda x: jax.device_put(np.stack([np.array(x)] * len(devices)), per_device), state
)


def shard_batch(x):
    x = np.array(x).reshape((len(devices), -1, *x.shape[1:]))
    return jax.device_put(x, per_device)


batch = jax.tree.map(shard_batch, batch)


# Benchmark data parallel execution
def data_parallel_execution():
    global state
    state = pmap_train_step(state, batch)  # pyright: ignore[reportGeneralTypeIssues]


costs = benchmark_func(data_parallel_execution, sync_func, warmup=5, number=10, repeat=5) * 1e3
print(f"Data parallel execution time. Mean: {np.mean(costs):.2f} ms, Std: {np.std(costs):.2f} ms")
print(
    f"Alpa execution time.          Mean: {np.mean(alpa_costs):.2f} ms,"
    f" Std: {np.std(alpa_costs):.2f} ms\n"
)

executable = pmap_train_step.lower(state, batch).compile()
print(
    f"Data parallel execution per GPU memory usage: {total_allocation_size(executable) / GB:.2f} GB"
)
print(
    "Alpa execution per GPU memory usage:         "
    f" {alpa_executable.get_total_allocation_size() / GB:.2f} GB"
)
