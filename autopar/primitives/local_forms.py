"""Rules that apply a primitive to shards, with the shape of a shard in its parameters."""

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import JaxprEqn

from autopar.ir.evaluate import bind
from autopar.ir.spec import Spec

type Shapes = Sequence[tuple[int, ...]]

type LocalRule = Callable[
    [JaxprEqn, Sequence[Spec], Sequence[Spec], Shapes, Sequence[Any]], list[Any]
]
"""Computes the shards of an equation's results on one device.

Takes the equation, the specs of its operands and of its results (before partial sums are
completed), the shapes of the results' shards, and the shards of the operands.
"""


def with_shape(parameter: str) -> LocalRule:
    """Return the rule of a primitive that has the shape of its result as a parameter."""
    return lambda eqn, _in, _out, shapes, shards: bind(eqn, shards, **{parameter: shapes[0]})
