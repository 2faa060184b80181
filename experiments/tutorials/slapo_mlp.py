"""Slapo's tutorial "Optimize MLP Module on Multi-Device", with directives on a Flax model.

    python -m experiments.tutorials.slapo_mlp --devices 2

It runs on 1, 2, 4 or 8 devices, by default on all of this machine. Without GPUs these are 8 virtual
devices that share the CPU.

Differences from Slapo's text:

- There is no launcher, since one process has all devices. The number of devices is printed in place
  of rank and world size.
- `create_schedule` also takes the shapes of parameters and inputs, which the tree of modules shows.
- Flax stores a kernel as (in, out), so "weight", axis=0 becomes "kernel", axis=1.
- Flax's activations are functions, so the tree has no module `activation`, and a match lists the
  equations of gelu.
- Modules keep their class, with directives listed below them, where Slapo replaces them by
  `LinearWithSyncFunc` or `LinearWithSeparateBias`.
- `Verify`, which Slapo's text only mentions, runs around shard and sync, and on the whole schedule
  before it is built.
- Fused equations are compiled by XLA, compiler="xla", instead of TorchScript.
- `build` returns one value instead of a pair. Its `init` creates the parameters in shards, where
  Slapo has init_weights=False.
"""
# ruff: noqa: E402 (devices are set up before JAX starts)

import argparse
import os

# It sets the number of CPU devices, which JAX uses without GPUs.
VIRTUAL = "--xla_force_host_platform_device_count"
if VIRTUAL not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {VIRTUAL}=8"

import jax
from flax import linen as nn

import autopar

parser = argparse.ArgumentParser()
parser.add_argument("--devices", type=int, default=len(jax.devices()))
parser.add_argument("--hidden-size", type=int, default=1024)
parser.add_argument("--sequence-length", type=int, default=512)
flags = parser.parse_args()
print(f"devices: {flags.devices} of {len(jax.devices())}")

# --- Model definition -----------------------------------------------------------------------------


class MLP(nn.Module):
    hidden_size: int

    def setup(self):
        self.linear1 = nn.Dense(self.hidden_size)
        self.linear2 = nn.Dense(self.hidden_size)

    def __call__(self, data):
        out = self.linear1(data)
        out = nn.gelu(out, approximate=False)
        out = self.linear2(out)
        return out


model = MLP(flags.hidden_size)

# --- Create model schedule ------------------------------------------------------------------------

data = jax.random.normal(jax.random.key(0), (2, flags.sequence_length, flags.hidden_size))
shapes = jax.eval_shape(model.init, jax.random.key(1), data)
sch = autopar.create_schedule(model, shapes, [data], mesh=flags.devices)
print(sch.mod)

# --- Tensor parallelism ---------------------------------------------------------------------------

# The first linear layer is split by columns, the second by rows (Megatron-LM). The forward pass
# all_reduces the partial sums of the second layer, the backward pass the gradients of the first
# layer's input.
with autopar.Verify(sch, [data]):
    sch["linear1"].shard("kernel", axis=1)
    sch["linear1"].shard("bias", axis=0)
    sch["linear2"].shard("kernel", axis=0)
    sch["linear2"].sync(mode="fwd_post", sync_op_or_fn="all_reduce")
    sch["linear1"].sync(mode="bwd_post", sync_op_or_fn="all_reduce")
print(sch.mod)
print("verified: the loss and every gradient are those of the model")

# --- Operator fusion ------------------------------------------------------------------------------

# To fuse the bias of the first layer with the activation, it has to be separate from the product.
sch["linear1"].decompose()
print(sch.mod)

# `find` searches a graph of equations. With flatten=True that is the graph of the whole model
# instead of single modules.
sch.trace(flatten=True)
print(sch.mod)


def pattern(x, bias):
    x = nn.gelu(bias + x, approximate=False)
    return x


subgraph = sch.find(pattern)
print(*subgraph)

sch.fuse(subgraph, compiler="xla", name="BiasGeLU")
print(sch.mod)

# --- Build the optimized model --------------------------------------------------------------------

autopar.Verify(sch, [data]).check()
opt_model = autopar.build(sch)
params = opt_model.init(model.init, jax.random.key(1), data)  # creates shards
kernel = params["params"]["linear1"]["kernel"]
print(f"linear1/kernel: {kernel.shape}, {kernel.addressable_shards[0].data.shape} on each device")
compiled = jax.jit(opt_model.apply).lower(params, data).compile()
print(f"all_reduces in the forward pass: {str(compiled.as_text()).count(' all-reduce(')}")
autopar.testing.assert_allclose(
    compiled(params, data), model.apply(jax.device_get(params), data), rtol=1e-3, atol=1e-3
)
