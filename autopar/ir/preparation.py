"""Prepared inputs: values that are computed from the arguments of a step before it runs."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
from jax.extend.core import Jaxpr, Var

from autopar.ir.evaluate import evaluate, unchanged


class TracedValue(NamedTuple):
    """The place of a value in the traces of a step, and how it is an input of the microbatches.

    Attributes:
        number: the number of its equation.
        result: the number of the value among the equation's results.
        blocks: if there are several, the dim of the examples consists of that many blocks, each
            with a row per example. The input has the dims (examples, blocks) in its place.
        dim: the dim of the examples, which is the first one of the input.
    """

    number: int
    result: int
    blocks: int = 1
    dim: int = 0


@dataclass(frozen=True, slots=True)
class Preparation:
    """What is computed for the whole batch before the first microbatch.

    Attributes:
        jaxpr: the equations that compute it, with all arguments of the step as inputs.
        places: the values in the traces of the step.
        lines: the lines of code that compute the values, as "FILE:LINE".
        reads: numbers of the arguments that it depends on.
    """

    jaxpr: Jaxpr = field(repr=False)
    places: tuple[TracedValue, ...]
    lines: tuple[str, ...]
    reads: tuple[int, ...]

    def compute(self, *operands: jax.Array) -> list[jax.Array]:
        """Return the values, from the arguments `reads`."""
        jaxpr = self.jaxpr
        env: dict[Var, Any] = dict(zip(jaxpr.constvars, jaxpr.consts, strict=True))
        env.update(zip((jaxpr.invars[i] for i in self.reads), operands, strict=True))
        evaluate(enumerate(jaxpr.eqns), env, before=unchanged, after=unchanged)
        return [env[var] for var in jaxpr.outvars if isinstance(var, Var)]
