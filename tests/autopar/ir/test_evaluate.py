"""Fourier transforms and collectives do not share threads on virtual CPU devices."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

import autopar
from autopar.ir.evaluate import FFT_OPTIONS, compiler_options

MESH = Mesh(np.array(jax.devices()[:2]), "x")
X = np.ones((4, 8), np.float32)


def test_only_a_program_with_a_fourier_transform_needs_options_and_only_on_a_cpu():
    @partial(jax.shard_map, mesh=MESH, in_specs=PartitionSpec("x"), out_specs=PartitionSpec("x"))
    def inside(x):
        return jnp.fft.rfft(x).real

    for function, options in (jnp.fft.rfft, FFT_OPTIONS), (inside, FFT_OPTIONS), (jnp.sin, None):
        eqns = jax.make_jaxpr(function)(X).eqns
        assert compiler_options(eqns, MESH) == options
        assert compiler_options(eqns, AbstractMesh((2,), ("x",))) is None


def convolution_step(kernels, batch):
    """Run a step whose layers convolve sequences with long kernels."""

    @autopar.manual_layer_construction
    def loss(kernels):
        x = batch
        for number, kernel in enumerate(kernels):
            if number:
                autopar.mark_pipeline_boundary()
            x = jnp.fft.irfft(
                jnp.fft.rfft(x, n=128) * jnp.fft.rfft(jnp.tanh(kernel), n=128), n=128
            )[..., :64]
        return jnp.mean((x - 1) ** 2)

    value, gradients = autopar.value_and_grad(loss)(kernels)
    return jax.tree.map(lambda k, g: k - 0.1 * g, kernels, gradients), value


@pytest.mark.parametrize(
    "method",
    [autopar.Zero3Parallel(8), autopar.PipeshardParallel(4, 1)],
    ids=["zero3", "pipeline"],
)
def test_a_step_with_a_fourier_transform_is_compiled_with_them(method, monkeypatch):
    given, jit = [], jax.jit

    def spy(*args, compiler_options=None, **kwargs):
        given.append(compiler_options)
        return jit(*args, compiler_options=compiler_options, **kwargs)

    args = [np.full((32, 64), 1 / 64, np.float32)] * 2, np.ones((16, 32, 64), np.float32)
    monkeypatch.setattr(jax, "jit", spy)
    planned = autopar.parallelize(convolution_step, method=method, donate_argnums=())
    planned.get_executable(*args)
    assert FFT_OPTIONS in given
