"""Hand-written strategies: one step equals the serial one in loss, gradients and parameters, and clusters can be predicted."""

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.by_hand import BY_HAND
from experiments.models import BERT, GPT, MLP, Model
from experiments.scripts.measure import initial_args
from simulator.cluster import Cluster

MLP_MODEL = MLP(dim=16, num_layers=6, batch_size=16)
GPT_MODEL = GPT(num_layers=3, hidden_size=16, num_heads=4, sequence_length=8, vocab_size=32, batch_size=8)
MODELS: dict[str, Model] = {"mlp": MLP_MODEL, "gpt": GPT_MODEL}
MESHES = {"manual_data": (8,), "manual_fsdp": (8,), "manual_tensor_2d": (2, 4), "manual_megatron": (2, 4)}
V100S = Cluster.load("p3.16xlarge")


@cache
def serial(model: Model) -> Any:
    """Arguments of a model's step on the host, and its result."""
    args = initial_args(model)
    return args, jax.device_get(jax.jit(model.train_step)(*args))


def assert_same_step(name: str, model: Model, mesh: tuple[int, ...]) -> None:
    args, expected = serial(model)
    runnable = BY_HAND[name].prepare(model, mesh, None, args)
    actual = runnable.gather(runnable.step(*runnable.args))
    (state, *loss), (expected_state, *expected_loss) = (r if type(r) is tuple else (r,) for r in (actual, expected))
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    # The first moments are a tenth of the gradients: a factor of N, or a missing part, would show.
    gradients = expected_state.opt_state[0].mu
    assert_close(state.opt_state[0].mu, gradients, rtol=1e-3, atol=1e-7)
    # Adam makes a full step of a gradient that is nothing but rounding, such as those of the keys' biases.
    known = jax.tree.map(lambda g: np.abs(g) > 1e-6, gradients)
    kept = (jax.tree.map(np.where, known, s.params, serial(model)[0][0].params) for s in (state, expected_state))
    assert_close(*kept, rtol=0, atol=2e-4)  # of a step of 1e-3
    assert jax.tree.structure(state) == jax.tree.structure(expected_state)
    assert runnable.memory_bytes > 0


def assert_close(actual: Any, expected: Any, **tolerance: float) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), actual, expected)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", BY_HAND)
def test_each_strategy_equals_the_serial_step(name: str, model: str) -> None:
    assert_same_step(name, MODELS[model], MESHES.get(name, (4,)))
