"""Slapo's tutorial "Optimize MLP Module on Multi-Device", on Flax: a schedule apart from the model, on 1, 2, 4 or 8 devices.

    python -m experiments.tutorials.slapo_mlp --devices 2

Without --devices on all that are here; on a machine without GPUs these are 8 virtual ones that share its CPU.

What differs from Slapo's text:

- There is no launcher, as one process has all devices: neither rank nor world size is printed, but how many devices are used.
- A model is scheduled together with the shapes of its parameters and inputs, which its tree shows.
- Flax keeps a kernel as (in, out), so that "weight", axis=0 is "kernel", axis=1.
- Flax's activations are functions: there is no module `activation` in the tree, and a match lists the equations of gelu.
- Modules stay what they are, with their directives below them, where Slapo puts `LinearWithSyncFunc` or `LinearWithSeparateBias`.
- `Verify`, of which Slapo only speaks, is run: around shard and sync, and on the whole schedule before it is built.
- Fused equations are compiled by XLA, compiler="xla", in place of TorchScript.
- `build` returns one value, whose `init` makes the parameters in parts, in place of a pair and of init_weights=False.
"""
# ruff: noqa: E402 (devices are set up before JAX starts)

import argparse
import os

VIRTUAL = (
    "--xla_force_host_platform_device_count"  # of the CPU, which JAX takes where there is no GPU
)
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

# --- Model definition ----------------------------------------------------------------------------------------------------


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

# --- Create model schedule -----------------------------------------------------------------------------------------------

data = jax.random.normal(jax.random.key(0), (2, flags.sequence_length, flags.hidden_size))
shapes = jax.eval_shape(model.init, jax.random.key(1), data)
sch = autopar.create_schedule(model, shapes, [data], mesh=flags.devices)
print(sch.mod)

# --- Tensor parallelism --------------------------------------------------------------------------------------------------

# The first linear layer by column, the second by row (Megatron-LM): each device has its part of both, and the partial sums
# that the second makes are added up, as are, in the backward pass, the gradients of what goes into the first.
with autopar.Verify(sch, [data]):
    sch["linear1"].shard("kernel", axis=1)
    sch["linear1"].shard("bias", axis=0)
    sch["linear2"].shard("kernel", axis=0)
    sch["linear2"].sync(mode="fwd_post", sync_op_or_fn="all_reduce")
    sch["linear1"].sync(mode="bwd_post", sync_op_or_fn="all_reduce")
print(sch.mod)
print("verified: the loss and every gradient are those of the model")

# --- Operator fusion -----------------------------------------------------------------------------------------------------

# The bias of the first layer is to be fused with the activation: it has to be seen apart from the product.
sch["linear1"].decompose()
print(sch.mod)

# `find` sees a graph of equations: those of the whole model, not of single modules, if it is flattened.
sch.trace(flatten=True)
print(sch.mod)


def pattern(x, bias):
    x = nn.gelu(bias + x, approximate=False)
    return x


subgraph = sch.find(pattern)
print(*subgraph)

sch.fuse(subgraph, compiler="xla", name="BiasGeLU")
print(sch.mod)

# --- Build the optimized model -------------------------------------------------------------------------------------------

autopar.Verify(sch, [data]).check()
opt_model = autopar.build(sch)
params = opt_model.init(model.init, jax.random.key(1), data)  # each device makes its own part
kernel = params["params"]["linear1"]["kernel"]
print(f"linear1/kernel: {kernel.shape}, {kernel.addressable_shards[0].data.shape} on each device")
compiled = jax.jit(opt_model.apply).lower(params, data).compile()
print(f"all_reduces in the forward pass: {str(compiled.as_text()).count(' all-reduce(')}")
autopar.testing.assert_allclose(
    compiled(params, data), model.apply(jax.device_get(params), data), rtol=1e-3, atol=1e-3
)
