"""The interface of the sweep's models: a state, a batch and an ordinary training step."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from typing import Any, ClassVar, Literal, override

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

type Batch = dict[str, jax.Array]
ComputeDtype = Literal["float32", "float16", "bfloat16"]
type ValueAndGrad = Callable[..., Callable]


class Model(ABC):
    """A model to train, of fixed sizes.

    Subclasses are frozen dataclasses whose fields are the sizes.
    """

    batch_size: int

    @abstractmethod
    def init_state(self, key: jax.Array) -> TrainState:
        """Return the initial parameters and optimizer state."""

    @abstractmethod
    def make_batch(self, key: jax.Array) -> Batch:
        """Return a batch of random training data; dim 0 of every array is the batch."""

    @abstractmethod
    def train_step(
        self, state: TrainState, batch: Batch, value_and_grad: ValueAndGrad = jax.value_and_grad
    ) -> Any:
        """Return the next state, or the next state and the loss.

        Args:
            state: from `init_state`, or of the step before.
            batch: from `make_batch`.
            value_and_grad: a function with the interface of `jax.value_and_grad`, `has_aux`
                included, that takes its place. `autopar.value_and_grad` accumulates gradients over
                microbatches, the pmap strategy averages them over devices.
        """

    def abstract_args(self) -> tuple[TrainState, Batch]:
        """Return the shapes and dtypes of (state, batch), without allocating them.

        They are the same for every call. The trees of two states differ, because an optimizer has
        functions of its own, and `autopar.shared_traces` shares nothing between them.
        """
        return _abstract_args(self)

    def module[M: nn.Module](self, module: type[M]) -> M:
        """Return a module whose fields are those of the model, with `dtype` for activations."""
        names = [field.name for field in fields(module) if hasattr(self, field.name)]
        values = {name: getattr(self, name) for name in names}
        if "dtype" in names:
            values["dtype"] = jnp.dtype(self.dtype)
        return module(**values)

    @property
    def num_parameters(self) -> int:
        """Number of parameters."""
        state, _ = self.abstract_args()
        return sum(leaf.size for leaf in jax.tree.leaves(state.params))

    @property
    def dtype(self) -> str:
        """Name of the dtype of activations; parameters are float32."""
        return getattr(self, "compute_dtype", "float32")


@cache
def _abstract_args(model: Model) -> tuple[TrainState, Batch]:
    key = jax.eval_shape(lambda: jax.random.key(0))
    return jax.eval_shape(model.init_state, key), jax.eval_shape(model.make_batch, key)


def adam_state(apply: Callable, params: Any) -> TrainState:
    """Return a train state with the optimizer of Alpa's quickstart."""
    return train_state(apply, params, optax.adam(learning_rate=1e-3))


def train_state(
    apply: Callable, params: Any, optimizer: optax.GradientTransformation
) -> TrainState:
    """Return a train state whose leaves are all arrays."""
    state = TrainState.create(apply_fn=apply, params=params, tx=optimizer)
    # Flax's own step, 0, is weakly typed until it has been on a device, so the step would retrace.
    return state.replace(step=jnp.zeros((), jnp.int32))


def cross_entropy_step(
    state: TrainState, inputs: jax.Array, labels: jax.Array, value_and_grad: ValueAndGrad
) -> tuple[TrainState, jax.Array]:
    """Run a training step on the mean cross-entropy of the model's logits.

    Args:
        state: the train state, whose `apply_fn` returns logits.
        inputs: what the model takes.
        labels: class numbers.
        value_and_grad: as of `Model.train_step`.
    """

    def loss(params: Any) -> jax.Array:
        logits = state.apply_fn(params, inputs)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    value, grads = value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), value


class TokenModel(Model):
    """A model of sequences of tokens, with the same fields as `network`."""

    network: ClassVar[type[nn.Module]]
    sequence_length: int
    vocab_size: int

    @override
    def init_state(self, key: jax.Array) -> TrainState:
        module = self.module(self.network)
        return adam_state(
            module.apply, module.init(key, jnp.zeros((1, self.sequence_length), jnp.int32))
        )


class NextToken(TokenModel):
    """A model that predicts the next token, with cross-entropy."""

    @override
    def make_batch(self, key: jax.Array) -> Batch:
        tokens = jax.random.randint(
            key, (self.batch_size, self.sequence_length + 1), 0, self.vocab_size
        )
        return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}

    @override
    def train_step(
        self, state: TrainState, batch: Batch, value_and_grad: ValueAndGrad = jax.value_and_grad
    ) -> tuple[TrainState, jax.Array]:
        return cross_entropy_step(state, batch["tokens"], batch["labels"], value_and_grad)


class Classification(Model):
    """A classifier of square images with three colour channels."""

    image_size: int
    num_classes: int

    @override
    def make_batch(self, key: jax.Array) -> Batch:
        pixels, classes = jax.random.split(key)
        shape = (self.batch_size, self.image_size, self.image_size, 3)
        return {
            "images": jax.random.normal(pixels, shape),
            "labels": jax.random.randint(classes, (self.batch_size,), 0, self.num_classes),
        }
