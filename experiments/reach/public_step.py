"""A training step of a public model with its arguments, as its library documents them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

BATCH = 8
"""Number of examples in the batch of each step."""

LENGTH = 16
"""Number of tokens in an example of each language model."""

VOCABULARY = 64
"""Number of tokens that language models know."""


type Change = Callable[[jax.Array], jax.Array]
"""A function of an array, such as `jnp.copy`."""


def with_arrays(args: Any, change: Change) -> Any:
    """Return a pytree with its arrays changed; leaves that are no arrays stay."""
    return jax.tree.map(lambda leaf: change(leaf) if isinstance(leaf, jax.Array) else leaf, args)


def only_result(args: Any, result: Any) -> Any:
    """Return the result of a step that changes none of its arguments."""
    return result


@dataclass(frozen=True)
class PublicStep:
    """A training step and its arguments.

    Attributes:
        step: the function that `autopar.parallelize` gets.
        args: its arguments.
        jit: the decorator that the library's users write where `autopar.parallelize` is written.
        with_arrays: returns the arguments with each array changed by a function.
        observed: returns what is compared, from the arguments after the step and its result.
        options: further options of `autopar.parallelize`.
        uses_batch_statistics: whether the model normalizes by statistics of the batch. Its
            microbatches use their own. The step then has to be linear in the gradients, and its
            first argument has no examples, the others consist of examples.
        method_options: options that each method gets.
        computes_in: the narrowest type of numbers that the step computes in. Rounding to it is what
            results are compared up to.
    """

    step: Callable[..., Any]
    args: tuple[Any, ...]
    jit: Callable[[Callable[..., Any]], Callable[..., Any]] = jax.jit
    with_arrays: Callable[[Any, Change], Any] = with_arrays
    observed: Callable[[Any, Any], Any] = only_result
    options: dict[str, Any] = field(default_factory=dict)
    uses_batch_statistics: bool = False
    method_options: dict[str, Any] = field(default_factory=dict)
    computes_in: Any = jnp.float32

    def mean_over_microbatches(self, step: Callable[..., Any], args: Any, count: int) -> Any:
        """Return the means of what a step returns for each of `count` microbatches.

        Args:
            step: the step, linear in the gradients.
            args: its arguments, with the whole batch.
            count: number of microbatches; number k has the examples k, k + count, ...
        """
        state, *batch = args

        def examples(k: int) -> Any:
            return jax.tree.map(lambda rows: rows[k::count], batch)

        def mean(*values: jax.Array) -> jax.Array:
            return jnp.asarray(sum(values) / count, values[0].dtype)

        return jax.tree.map(mean, *(step(state, *examples(k)) for k in range(count)))


def tokens(seed: int = 0, length: int = LENGTH, vocabulary: int = VOCABULARY) -> jax.Array:
    """Return random tokens of shape (BATCH, length)."""
    return jnp.asarray(
        np.random.default_rng(seed).integers(3, vocabulary, (BATCH, length)), jnp.int32
    )


def features(*shape: int, seed: int = 0) -> jax.Array:
    """Return normally distributed numbers of shape (BATCH, *shape)."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=(BATCH, *shape)), jnp.float32)


def classes(count: int = 10, seed: int = 1) -> jax.Array:
    """Return a random class for each example of the batch."""
    return jnp.asarray(np.random.default_rng(seed).integers(0, count, BATCH), jnp.int32)
