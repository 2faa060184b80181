"""Steps of hand-written strategies equal the serial step, and have the collectives they write."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.by_hand import BY_HAND
from experiments.local_steps import initial_args
from experiments.models import GPT, MLP, Model
from experiments.models.model_sizes import SMALL
from simulator.hardware.cluster import Cluster
from tests.tiers import tiers

MLP_MODEL = MLP(dim=16, num_layers=6, batch_size=16)
GPT_MODEL = GPT(
    num_layers=2, hidden_size=16, num_heads=4, sequence_length=8, vocab_size=32, batch_size=8
)
MESHES: dict[str, dict[str, tuple[int, ...]]] = {
    "manual_data": {"mlp": (8,), "gpt": (8,)},
    "manual_fsdp": {"mlp": (8,), "gpt": (8,)},
    "manual_tensor_2d": {"mlp": (4, 2), "gpt": (2, 4)},
    "manual_megatron": {"mlp": (4, 2), "gpt": (2, 4)},
    "manual_pipeline": {"mlp": (2,), "gpt": (8,)},
}
"""A mesh for each model; the pipeline for GPT has more stages than blocks."""
COLLECTIVES = {
    "manual_data": {"all_reduce"},
    "manual_fsdp": {"all_gather", "reduce_scatter"},
    "manual_tensor_2d": {"all_reduce"},
    "manual_megatron": {"all_gather", "reduce_scatter", "all_reduce"},
    "manual_pipeline": {"collective_permute", "reduce_scatter", "all_gather"},
}
"""The collectives that a strategy writes, and their transposes."""
SPLIT_OVER = {"manual_fsdp": 8, "manual_tensor_2d": 8, "manual_megatron": 2, "manual_pipeline": 2}
"""Number of devices that the weights of an MLP are split over."""


@cache
def serial(model: Model) -> Any:
    """Return the arguments of a model's step on the host, and its result."""
    args = initial_args(model)
    return args, jax.device_get(jax.jit(model.train_step)(*args))


def assert_same_step(name: str, model: Model, mesh: tuple[int, ...]) -> None:
    args, expected = serial(model)
    runnable = BY_HAND[name].prepare(model, mesh, None, args)
    actual = runnable.gather(runnable.step(*runnable.args))
    (state, *loss), (expected_state, *expected_loss) = (
        r if type(r) is tuple else (r,) for r in (actual, expected)
    )
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    # The first moments are a tenth of the gradients, so a wrong factor or a missing term would
    # show.
    gradients = expected_state.opt_state[0].mu
    assert_close(state.opt_state[0].mu, gradients, rtol=1e-3, atol=1e-7)
    # Adam makes a full step of 1e-3 for a gradient that is only rounding, such as the keys'
    # biases'.
    significant = jax.tree.map(lambda g: np.abs(g) > 1e-6, gradients)
    params = (
        jax.tree.map(np.where, significant, s.params, serial(model)[0][0].params)
        for s in (state, expected_state)
    )
    assert_close(*params, rtol=0, atol=2e-4)
    assert jax.tree.structure(state) == jax.tree.structure(expected_state)
    assert runnable.memory_bytes > 0


@pytest.fixture(scope="module", autouse=True)
def _compiled_fast() -> Iterator[None]:
    """Compile fast, since each program runs once."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def assert_close(actual: Any, expected: Any, **tolerance: float) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), actual, expected)


def meshes(name: str, model: Model) -> st.SearchStrategy[tuple[int, ...]]:
    """Return meshes of up to 8 devices that a strategy runs on."""
    return st.sampled_from(
        [m for m in ((4, 2), (8,), (2, 4), (2,), (4,), (2, 2)) if BY_HAND[name].runs_on(model, m)]
    )


@pytest.mark.parametrize("name", BY_HAND)
@settings(max_examples=1)
@given(data=st.data())
def test_an_mlp_step_equals_the_serial_one(name: str, data: st.DataObject) -> None:
    mesh = data.draw(meshes(name, MLP_MODEL))
    model = MLP(
        dim=8 * data.draw(st.integers(1, 3)),
        num_layers=2 * data.draw(st.integers(1, 3)),
        batch_size=prod(mesh) * data.draw(st.integers(1, 3)),
    )
    assert_same_step(name, model, mesh)


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_HAND)
@settings(max_examples=2)
@given(data=st.data())
def test_a_gpt_step_equals_the_serial_one(name: str, data: st.DataObject) -> None:
    """Sizes are divisible by the devices, but for the blocks of the pipeline."""
    mesh = data.draw(meshes(name, GPT_MODEL))
    model = GPT(
        num_layers=data.draw(st.integers(1, 2)),
        hidden_size=16,
        num_heads=data.draw(st.sampled_from([4, 8])),
        sequence_length=8,
        vocab_size=8 * data.draw(st.integers(2, 5)),
        batch_size=prod(mesh) * data.draw(st.integers(1, 2)),
        remat=data.draw(st.booleans()),
        tied_head=data.draw(st.booleans()),
    )
    assert_same_step(name, model, mesh)


@pytest.mark.parametrize("name", tiers(list(BY_HAND)))
def test_predictions_hold_the_collectives_that_are_written_and_parts_of_the_state(
    name: str,
) -> None:
    model, mesh = MLP(dim=512, num_layers=4, batch_size=256), MESHES[name]["mlp"]
    timeline = BY_HAND[name].predict(model, mesh, None, Cluster.load("p3.16xlarge")).timeline
    assert {
        span.category for span in timeline.spans if span.stream == "communication"
    } == COLLECTIVES[name]
    state_bytes = sum(
        leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(model.abstract_args()[0])
    )
    part, memory = state_bytes / SPLIT_OVER.get(name, 1), timeline.memory[0]
    assert memory.aliased == pytest.approx(part, rel=0.05)
    assert memory.arguments == pytest.approx(part, rel=0.1)  # the batch is small


@pytest.mark.parametrize(
    ("name", "model", "mesh", "message"),
    [
        (
            "manual_fsdp",
            replace(MLP_MODEL, batch_size=12),
            (8,),
            r"argument 1/x: dim 0 of .* can't be split over the 8 devices",
        ),
        (
            "manual_data",
            MLP_MODEL,
            (2, 2),
            r"DataParallel has the mesh axes data; given a mesh of 2 axes, \(2, 2\)",
        ),
        (
            "manual_megatron",
            MLP_MODEL,
            (2, 2, 2),
            r"Megatron has the mesh axes data, tensor; given a mesh of 3 axes",
        ),
        (
            "manual_megatron",
            replace(GPT_MODEL, num_heads=2),
            (2, 4),
            "2 heads can't be split over the 4 devices along tensor",
        ),
        (
            "manual_fsdp",
            replace(MLP_MODEL, num_layers=3),
            (2,),
            "go in pairs; given num_layers=3, make it even",
        ),
        ("manual_data", replace(GPT_MODEL, scan_layers=True), (2,), "give it scan_layers=False"),
        (
            "manual_data",
            SMALL["bert"],
            (2,),
            "MLP and GPT are written by hand; given BERT, use an automatic strategy",
        ),
    ],
)
def test_what_can_not_be_split_is_refused(
    name: str, model: Model, mesh: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        BY_HAND[name].predict(model, mesh, None, Cluster.load("p3.16xlarge"))


def test_strategies_are_for_models_that_are_written_by_hand() -> None:
    runs = {
        type(model): BY_HAND["manual_data"].runs_on(model, (8,))
        for model in (MLP_MODEL, GPT_MODEL, SMALL["bert"])
    }
    assert list(runs.values()) == [True, True, False]


def test_strategies_run_on_meshes_of_their_axes() -> None:
    meshes = [(1,), (2,), (8,), (2, 4), (1, 1), (2, 2, 2)]
    on = {
        name: [mesh for mesh in meshes if strategy.runs_on(MLP_MODEL, mesh)]
        for name, strategy in BY_HAND.items()
    }
    assert on["manual_data"] == on["manual_fsdp"] == on["manual_pipeline"] == [(2,), (8,)]
    assert on["manual_tensor_2d"] == on["manual_megatron"] == [(2, 4)]
