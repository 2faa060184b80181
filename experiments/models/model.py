"""What the sweep asks of a model: a state, a batch and an ordinary training step."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

type Batch = dict[str, jax.Array]
type ValueAndGrad = Callable[..., Callable]


class Model(ABC):
    """A model to train, with every size fixed. Subclasses are frozen dataclasses whose fields are the sizes."""

    batch_size: int

    @abstractmethod
    def init_state(self, key: jax.Array) -> TrainState:
        """Parameters and Adam's moments."""

    @abstractmethod
    def make_batch(self, key: jax.Array) -> Batch:
        """One batch of made-up training data; dim 0 of every array is the batch."""

    @abstractmethod
    def train_step(
        self, state: TrainState, batch: Batch, value_and_grad: ValueAndGrad = jax.value_and_grad
    ) -> Any:
        """One step of training.

        `value_and_grad` is the seam for whoever wants more of the gradient than JAX gives: `autopar.value_and_grad` accumulates
        it over microbatches, the pmap strategy averages it over devices. Called as `jax.value_and_grad` is, `has_aux` included.
        """

    def abstract_args(self) -> tuple[TrainState, Batch]:
        """Shapes and dtypes of (state, batch); nothing is allocated."""
        key = jax.eval_shape(lambda: jax.random.key(0))
        return jax.eval_shape(self.init_state, key), jax.eval_shape(self.make_batch, key)

    @property
    def num_parameters(self) -> int:
        state, _ = self.abstract_args()
        return sum(leaf.size for leaf in jax.tree.leaves(state.params))

    @property
    def dtype(self) -> str:
        """What it computes in, in NumPy's spelling; parameters are float32."""
        return np.dtype(np.float32).name


def adam_state(apply: Callable, params: Any) -> TrainState:
    """A train state with the quickstart's optimizer."""
    return train_state(apply, params, optax.adam(learning_rate=1e-3))


def train_state(
    apply: Callable, params: Any, optimizer: optax.GradientTransformation
) -> TrainState:
    """A train state, all of it arrays."""
    state = TrainState.create(apply_fn=apply, params=params, tx=optimizer)
    return state.replace(
        step=jnp.zeros((), jnp.int32)
    )  # flax's own 0 is weakly typed until it has been on a device


def cross_entropy_step(
    state: TrainState, inputs: jax.Array, labels: jax.Array, value_and_grad: ValueAndGrad
) -> tuple[TrainState, jax.Array]:
    """A step on the mean cross-entropy of the logits that the model gives for `inputs`; labels are class numbers."""

    def loss(params: Any) -> jax.Array:
        logits = state.apply_fn(params, inputs)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    value, grads = value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), value


class NextToken(Model):
    """Next-token prediction with cross-entropy."""

    sequence_length: int
    vocab_size: int

    def make_batch(self, key: jax.Array) -> Batch:
        tokens = jax.random.randint(
            key, (self.batch_size, self.sequence_length + 1), 0, self.vocab_size
        )
        return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}

    def train_step(
        self, state: TrainState, batch: Batch, value_and_grad: ValueAndGrad = jax.value_and_grad
    ) -> tuple[TrainState, jax.Array]:
        return cross_entropy_step(state, batch["tokens"], batch["labels"], value_and_grad)
