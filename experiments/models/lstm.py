"""An LSTM language model (Hochreiter and Schmidhuber, 1997) with a loop over time in each layer."""

from dataclasses import dataclass
from typing import ClassVar

import jax
from flax import linen as nn

from experiments.models.model import NextToken


class LanguageModel(nn.Module):
    """Maps token ids (batch, length) to logits (batch, length, vocabulary)."""

    num_layers: int
    hidden_size: int
    vocab_size: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(self.vocab_size, self.hidden_size, name="tokens")(tokens)
        for i in range(self.num_layers):
            x = nn.RNN(nn.OptimizedLSTMCell(self.hidden_size), name=f"layer_{i}")(x)
            assert isinstance(x, jax.Array)  # not (carry, x), which is optional
        return nn.Dense(self.vocab_size, name="head")(x)


@dataclass(frozen=True, slots=True)
class LSTM(NextToken):
    """An LSTM with next-token prediction."""

    network: ClassVar = LanguageModel
    num_layers: int
    hidden_size: int
    sequence_length: int
    vocab_size: int
    batch_size: int
