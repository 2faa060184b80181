"""Bodies of equations that stay whole, such as a shard_map: what they do for single examples.

The scaling of such an equation follows from its dims alone. That holds if its body does the same to
each example, whatever the size of the batch.
"""

from collections.abc import Iterator

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from autopar.ir.graph import Atom, constant
from autopar.microbatch.created_rows import ROWS_OF, dim_of_examples


def why_body_differs(eqn: JaxprEqn, larger: JaxprEqn) -> str | None:
    """Return what the body of an equation does that depends on the size of the batch, if anything.

    Args:
        eqn: an equation.
        larger: the same equation in the trace for a larger batch.
    """
    for mine, other in _inner(eqn, larger):
        if mine.primitive is not other.primitive or len(mine.invars) != len(other.invars):
            return "does other things inside its body for a larger batch"
        if mine.primitive in ROWS_OF and dim_of_examples(mine, other) is not None:
            return "draws random bits for examples, or counts them, inside its body"
        if not all(map(_is_alike, mine.invars, other.invars)):
            return "uses the size of the batch inside its body"
    return None


def _is_alike(atom: Atom, other: Atom) -> bool:
    """Return whether two operands are the same number, unless one is no number."""
    if not isinstance(atom, Literal) or not isinstance(other, Literal):
        return True
    return constant(atom.val).tobytes() == constant(other.val).tobytes()


def _inner(eqn: JaxprEqn, larger: JaxprEqn) -> Iterator[tuple[JaxprEqn, JaxprEqn]]:
    """Yield the equations in the bodies of two equations side by side, at any depth."""
    for key, body in eqn.params.items():
        other = larger.params[key]
        if isinstance(body, Jaxpr) and isinstance(other, Jaxpr):
            for pair in zip(body.eqns, other.eqns, strict=False):
                yield pair
                yield from _inner(*pair)
