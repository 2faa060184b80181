"""An LSTM language model (Hochreiter and Schmidhuber, 1997), a loop over time in each layer."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

from experiments.models.model import Batch, Model, ValueAndGrad, adam_state


class LanguageModel(nn.Module):
    """Token ids (batch, length) in, logits (batch, length, vocabulary) out."""

    num_layers: int
    hidden_size: int
    vocab_size: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(self.vocab_size, self.hidden_size, name="tokens")(tokens)
        for i in range(self.num_layers):
            x = nn.RNN(nn.OptimizedLSTMCell(self.hidden_size), name=f"layer_{i}")(x)
            assert isinstance(x, jax.Array)  # not (carry, x), which it returns when asked to
        return nn.Dense(self.vocab_size, name="head")(x)


@dataclass(frozen=True, slots=True)
class LSTM(Model):
    """Next-token prediction with cross-entropy."""

    num_layers: int
    hidden_size: int
    sequence_length: int
    vocab_size: int
    batch_size: int

    def init_state(self, key: jax.Array) -> TrainState:
        module = LanguageModel(self.num_layers, self.hidden_size, self.vocab_size)
        return adam_state(module.apply, module.init(key, jnp.zeros((1, self.sequence_length), jnp.int32)))

    def make_batch(self, key: jax.Array) -> Batch:
        tokens = jax.random.randint(key, (self.batch_size, self.sequence_length + 1), 0, self.vocab_size)
        return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}

    def train_step(
        self, state: TrainState, batch: Batch, value_and_grad: ValueAndGrad = jax.value_and_grad
    ) -> tuple[TrainState, jax.Array]:
        def loss(params: nn.FrozenDict) -> jax.Array:
            logits = state.apply_fn(params, batch["tokens"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

        value, grads = value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value
