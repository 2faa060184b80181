"""The dims of gathers and scatters, for which JAX has a different set of names in each."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jax.extend.core import JaxprEqn


@dataclass(frozen=True, slots=True)
class IndexDims:
    """The dims of a gather or scatter.

    A window is what one index vector reads from the operand, or writes to it.

    Attributes:
        windows: the dims of windows in the result of a gather, or the updates of a scatter.
        dropped: the dims of the operand that windows lack, because they cover one element of each.
        indexed: the dim of the operand that each number of an index vector indexes.
        batched: for each batch dim of the operand, the batch dim of the indices.
    """

    windows: tuple[int, ...]
    dropped: tuple[int, ...]
    indexed: tuple[int, ...]
    batched: Mapping[int, int]

    @classmethod
    def of(cls, eqn: JaxprEqn) -> "IndexDims":
        """Return the dims of an equation, a gather or scatter."""
        windows, dropped, indexed, of_operand, of_indices = eqn.params["dimension_numbers"]
        batched = dict(zip(of_operand, of_indices, strict=True))
        return cls(tuple(windows), tuple(dropped), tuple(indexed), batched)

    def numbers(self, eqn: JaxprEqn) -> Any:
        """Return these dims as JAX's dimension numbers of `eqn`, a gather or scatter."""
        of_operand = tuple(sorted(self.batched))
        of_indices = tuple(self.batched[dim] for dim in of_operand)
        kind = type(eqn.params["dimension_numbers"])
        return kind(self.windows, self.dropped, self.indexed, of_operand, of_indices)
