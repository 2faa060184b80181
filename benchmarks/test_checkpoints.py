"""Seconds of saving and restoring a checkpoint of 128 MiB, with and without checksums."""

import itertools
import shutil

import jax
import numpy as np
import pytest

import autopar

MEBIBYTES = 128


@pytest.fixture(scope="module")
def state():
    """Return arrays of noise, which does not compress."""
    noise = np.random.default_rng(0).normal(size=(MEBIBYTES, 512, 512)).astype(np.float32)
    return {f"w{i}": jax.device_put(noise[i : i + 4]) for i in range(0, MEBIBYTES, 4)}


@pytest.mark.benchmark(group="saving 128 MiB")
@pytest.mark.parametrize("verify", [False, True])
def test_saving(benchmark, state, tmp_path, verify):
    steps = itertools.count()

    def save() -> None:
        autopar.save_checkpoint(tmp_path, state, next(steps), keep=1, verify=verify)

    benchmark.pedantic(save, rounds=8, warmup_rounds=2)
    shutil.rmtree(tmp_path)


@pytest.mark.benchmark(group="restoring 128 MiB")
@pytest.mark.parametrize("verify", [False, True])
def test_restoring(benchmark, state, tmp_path, verify):
    autopar.save_checkpoint(tmp_path, state, 0)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), state
    )

    def restore() -> None:
        jax.block_until_ready(autopar.restore_checkpoint(tmp_path, 0, target, verify=verify))

    benchmark.pedantic(restore, rounds=8, warmup_rounds=2)
    shutil.rmtree(tmp_path)
