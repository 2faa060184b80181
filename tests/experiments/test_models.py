"""Models train, and are built from the sizes of a configuration, whose mistakes are errors."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from experiments.models import GPT, MLP, build_model

SMALL_GPT = GPT(
    num_layers=1, hidden_size=16, num_heads=2, sequence_length=8, vocab_size=32, batch_size=4
)


@pytest.fixture(scope="module")
def args() -> Any:
    """Return (state, batch) of the small GPT."""
    init = jax.jit(lambda key: (SMALL_GPT.init_state(key), SMALL_GPT.make_batch(key)))
    return init(jax.random.key(0))


def test_the_quickstart_mlp_has_its_published_sizes() -> None:
    widening = 2048 * 8192 + 8192
    narrowing = 8192 * 2048 + 2048
    model = MLP(dim=2048, num_layers=10, batch_size=2048)
    assert model.num_parameters == 5 * (widening + narrowing)
    _, batch = model.abstract_args()
    assert {name: value.shape for name, value in batch.items()} == {
        "x": (2048, 2048),
        "y": (2048, 2048),
    }


@pytest.mark.parametrize("tied_head", [True, False])
def test_gpt_125m_has_the_parameters_of_gpt2_small(tied_head: bool) -> None:
    model = GPT(
        12, 768, 12, sequence_length=1024, vocab_size=51200, batch_size=8, tied_head=tied_head
    )
    norm, attention = 2 * 768, 768 * 3 * 768 + 3 * 768 + 768 * 768 + 768
    feed_forward = 768 * 3072 + 3072 + 3072 * 768 + 768
    embeddings = (51200 + 1024) * 768
    head = 0 if tied_head else 768 * 51200
    assert (
        model.num_parameters
        == embeddings + 12 * (2 * norm + attention + feed_forward) + norm + head
    )


def test_a_prediction_does_not_see_the_future(args: Any) -> None:
    state, batch = args
    changed = batch["tokens"].at[:, 5:].set((batch["tokens"][:, 5:] + 1) % 32)
    apply = jax.jit(state.apply_fn)
    before, after = apply(state.params, batch["tokens"]), apply(state.params, changed)
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert not np.allclose(before[:, 5:], after[:, 5:])


def test_labels_are_the_next_tokens(args: Any) -> None:
    _, batch = args
    np.testing.assert_array_equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])


@pytest.mark.slow
def test_a_step_learns_its_batch(args: Any) -> None:
    state, batch = args
    step = jax.jit(SMALL_GPT.train_step)
    losses = []
    for _ in range(10):
        state, loss = step(state, batch)
        losses.append(float(loss))
    assert losses == sorted(losses, reverse=True)


@pytest.mark.slow
def test_rematerialization_changes_nothing_but_the_backward_pass(args: Any) -> None:
    state, batch = args
    remat = replace(SMALL_GPT, remat=True)
    same_state = state.replace(
        apply_fn=jax.eval_shape(remat.init_state, jax.random.key(0)).apply_fn
    )
    assert "remat" in str(jax.make_jaxpr(remat.train_step)(same_state, batch))
    expected, actual = (
        jax.jit(SMALL_GPT.train_step)(state, batch),
        jax.jit(remat.train_step)(same_state, batch),
    )
    for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_abstract_args_are_those_of_the_real_ones(args: Any) -> None:
    for one, other in zip(
        jax.tree.leaves(SMALL_GPT.abstract_args()), jax.tree.leaves(args), strict=True
    ):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)


def test_an_unknown_model_lists_the_known_ones() -> None:
    with pytest.raises(
        ValueError,
        match=r"unknown model 'mpl'; did you mean 'mlp'\? \(valid: bert, gpt, llama, lstm, ",
    ):
        build_model("mpl", {})


def test_a_misspelt_size_lists_the_valid_ones() -> None:
    with pytest.raises(
        ValueError,
        match=r"unknown size of mlp 'dims'; did you mean 'dim'\? \(valid: batch_size, ",
    ):
        build_model("mlp", {"dims": 3, "num_layers": 2, "batch_size": 4})


def test_a_missing_size_is_named() -> None:
    with pytest.raises(ValueError, match="'batch_size'"):
        build_model("mlp", {"dim": 3, "num_layers": 2})
