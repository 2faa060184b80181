"""Bodies of equations that stay whole, such as a shard_map: what they do for single examples.

The scaling of such an equation follows from its dims alone. That holds if its body does the same to
each example, whatever the size of the batch.
"""

from collections.abc import Iterator

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from autopar.ir.graph import Atom, constant, sources, sources_of
from autopar.microbatch.created_rows import ROWS_OF, dim_of_examples


def why_body_differs(eqn: JaxprEqn, larger: JaxprEqn) -> str | None:
    """Return what the body of an equation does that depends on the size of the batch, if anything.

    Args:
        eqn: an equation.
        larger: the same equation in the trace for a larger batch.
    """
    for body, other in _bodies(eqn, larger):
        if reason := _why_differs(body, other):
            return reason
    return None


def _bodies(eqn: JaxprEqn, larger: JaxprEqn) -> Iterator[tuple[Jaxpr, Jaxpr]]:
    """Yield the bodies of two equations of the same primitive side by side, at any depth."""
    for key, body in eqn.params.items():
        other = larger.params[key]
        if isinstance(body, Jaxpr) and isinstance(other, Jaxpr):
            yield body, other
            for mine, their in zip(body.eqns, other.eqns, strict=False):
                if mine.primitive is their.primitive:
                    yield from _bodies(mine, their)


def _why_differs(body: Jaxpr, other: Jaxpr) -> str | None:
    """Return what a body does that depends on the size of the batch, if anything."""
    otherwise = "does other things inside its body for a larger batch"
    if len(body.eqns) != len(other.eqns):
        return otherwise
    known, others = (sources(each, each.eqns) for each in (body, other))
    for mine, their in zip(body.eqns, other.eqns, strict=True):
        if mine.primitive is not their.primitive:
            return otherwise
        if sources_of(mine.invars, known) != sources_of(their.invars, others):
            return otherwise
        if mine.primitive in ROWS_OF and dim_of_examples(mine, their) is not None:
            return "draws random bits for examples, or counts them, inside its body"
        if not all(map(_is_alike, mine.invars, their.invars)):
            return "uses the size of the batch inside its body"
    if sources_of(body.outvars, known) != sources_of(other.outvars, others):
        return otherwise
    return None


def _is_alike(atom: Atom, other: Atom) -> bool:
    """Return whether two operands are the same number, unless they are no numbers."""
    if not isinstance(atom, Literal) or not isinstance(other, Literal):
        return True
    return constant(atom.val).tobytes() == constant(other.val).tobytes()
