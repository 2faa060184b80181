"""The traces of one step for batches of several sizes, by which its split is decided."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple, Self

from jax.extend.core import Jaxpr


class SizedTraces(NamedTuple):
    """The traces of one step for batches of several sizes.

    They are three pairs of a trace for a microbatch and a trace for as many examples as all
    microbatches have. Usually all pairs are the same two traces.

    Attributes:
        micro: the trace for a microbatch that runs.
        whole: the trace for the batch that runs.
        part: a trace like `small` for as many examples as `micro`.
        full: a trace like `large` for as many examples as `whole`.
        small: the trace for a microbatch, of more examples where those of `micro` are too few, that
            says with `large` how values scale with the batch.
        large: the trace for as many times the examples of `small` as there are microbatches.
    """

    micro: Jaxpr
    whole: Jaxpr
    part: Jaxpr
    full: Jaxpr
    small: Jaxpr
    large: Jaxpr

    @classmethod
    def of_pairs(cls, pairs: Sequence[tuple[Jaxpr, Jaxpr]]) -> Self:
        """Return the traces of three pairs."""
        return cls(*chain(*pairs))

    @property
    def pairs(self) -> list[tuple[Jaxpr, Jaxpr]]:
        """The traces for a microbatch, each with that for the batch."""
        return [(self.micro, self.whole), (self.part, self.full), (self.small, self.large)]

    def map(self, change: Callable[[Jaxpr], Jaxpr]) -> "SizedTraces":
        """Return changed traces; equal ones are changed once."""
        changed = {trace: change(trace) for trace in dict.fromkeys(self)}
        return SizedTraces(*(changed[trace] for trace in self))

    @property
    def have_same_primitives(self) -> bool:
        """Whether the equations of all traces correspond one to one."""
        names = [eqn.primitive for eqn in self.micro.eqns]
        return all([eqn.primitive for eqn in trace.eqns] == names for trace in self)
