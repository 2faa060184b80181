"""Running a step in microbatches: the body in a loop, and what it accumulates."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Var

from autopar import graph
from autopar.evaluate import Hook
from autopar.microbatch import Microbatching


def accumulate(
    micro: Microbatching, batch: Sequence[Var], env: dict[Var, Any], evaluate: Callable[..., None], pin: Hook
) -> None:
    """Run the body for one microbatch after the other and add to `env` what they accumulate.

    Microbatch i has the examples i, i + count, i + 2 count...: every device finds its part of each in its own shard.
    """
    pinned = [
        value
        for number, eqn in micro.marks
        for value in pin(number, [jnp.zeros(graph.aval_of(v).shape, graph.aval_of(v).dtype) for v in eqn.outvars])
    ]

    def rows(whole: jax.Array) -> jax.Array:
        return whole.reshape(-1, micro.count, *whole.shape[1:]).swapaxes(0, 1)

    def add(totals: list[jax.Array], parts: list[jax.Array]) -> tuple[list[jax.Array], None]:
        inner = env | dict(zip(batch, parts, strict=True))
        evaluate(micro.body, inner)
        values = [
            v for number, eqn in micro.marks for v in pin(number, [graph.read(atom, inner) for atom in eqn.invars])
        ]
        kept = zip(micro.combine, totals, values, strict=True)
        return [value.astype(t.dtype) if how == "same" else t + value for how, t, value in kept], None

    totals, _ = jax.lax.scan(add, pinned, [rows(env[var]) for var in batch])
    accumulated = [var for _, eqn in micro.marks for var in eqn.outvars]
    for how, var, total in zip(micro.combine, accumulated, totals, strict=True):
        env[var] = (total / micro.count).astype(total.dtype) if how == "mean" else total
