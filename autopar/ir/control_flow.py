"""Control flow in a flat jaxpr: markers around the equations of loop bodies and branches.

    t      = loop[length=12]
    w'     = loop_const w t            the same value in every iteration
    c      = loop_carry init t         the carry at the beginning of an iteration
    x      = loop_slice xs t           one slice per iteration
    ...                                the body
    final  = loop_result c next t      `next` is the next carry, `final` the last one
    ys     = loop_stack y t            one slice per iteration
    end t

A while loop has no length. The equations of its condition are between its carries and its body, and
end with `loop_test`. A `switch` has the equations of each branch after a `branch` marker, and
`switch_result`s that return the value of one branch. So every equation of the step occurs once in
one list, and every value of a body is a variable of that list. The token `t` identifies the region
that a marker belongs to.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from jax.core import ShapedArray
from jax.extend.core import JaxprEqn, Primitive, Var
from jax.extend.core.primitives import (
    igamma_grad_a_p,
    igamma_p,
    igammac_p,
    random_gamma_p,
    regularized_incomplete_beta_p,
)

loop_p = Primitive("loop")
loop_const_p = Primitive("loop_const")
loop_carry_p = Primitive("loop_carry")
loop_slice_p = Primitive("loop_slice")
loop_test_p = Primitive("loop_test")
loop_result_p = Primitive("loop_result")
loop_stack_p = Primitive("loop_stack")
switch_p = Primitive("switch")
branch_p = Primitive("branch")
switch_result_p = Primitive("switch_result")
end_p = Primitive("end")

OPENING = frozenset({loop_p, switch_p})
ENTERING = frozenset({loop_const_p, loop_carry_p, loop_slice_p})
"""Markers that bring values into a body."""

LEAVING = frozenset({loop_result_p, loop_stack_p, switch_result_p})
"""Markers that bring values out of a body or branch."""

MARKERS = OPENING | ENTERING | LEAVING | {loop_test_p, branch_p, end_p}
SHIFTS = {loop_const_p: 0, loop_stack_p: 1, loop_slice_p: -1}
"""By how much the dims of a value shift when it enters or leaves a loop."""

BOUND = frozenset({loop_test_p, loop_result_p, branch_p, end_p})
"""Markers that a region needs even if their results are unused."""

TOKEN = ShapedArray((), bool)


def token_of(eqn: JaxprEqn) -> Var:
    """Return the token of the region that a marker belongs to."""
    token = eqn.outvars[0] if eqn.primitive in OPENING else eqn.invars[-1]
    assert isinstance(token, Var)
    return token


def end_of(eqns: Sequence[tuple[int, JaxprEqn]], start: int) -> int:
    """Return the position of the `end` of the region that opens at position `start`.

    Args:
        eqns: numbered equations.
        start: a position in `eqns`, not the number of an equation.
    """
    token = token_of(eqns[start][1])
    return next(
        position
        for position in range(start + 1, len(eqns))
        if eqns[position][1].primitive is end_p and token_of(eqns[position][1]) is token
    )


def spans(eqns: Sequence[JaxprEqn]) -> dict[Var, tuple[int, int]]:
    """Return the numbers of the equations that open and end each region, by its token."""
    opened = {token_of(eqn): number for number, eqn in enumerate(eqns) if eqn.primitive in OPENING}
    return {
        token_of(eqn): (opened[token_of(eqn)], number)
        for number, eqn in enumerate(eqns)
        if eqn.primitive is end_p
    }


_LOOPING = frozenset({
    igamma_grad_a_p,
    igamma_p,
    igammac_p,
    random_gamma_p,
    regularized_incomplete_beta_p,
})  # fmt: skip
"""Primitives that XLA computes in a loop until it converges or accepts a sample."""


def endless_loops(eqns: Iterable[JaxprEqn]) -> Counter[str]:
    """Return the names and numbers of loops of unknown length, "while_loop" among them."""
    return Counter(
        "while_loop" if eqn.primitive is loop_p else eqn.primitive.name
        for eqn in eqns
        if eqn.primitive in _LOOPING or (eqn.primitive is loop_p and eqn.params["length"] is None)
    )


def repeats(eqns: Sequence[JaxprEqn]) -> list[float]:
    """Return how often each equation runs.

    That is the product of the lengths of the loops around it. The length of a while loop is unknown
    and counts as one. An equation in one of n branches runs 1 / n times.
    """
    counts: list[float] = []
    enclosing = [1.0]
    for eqn in eqns:
        if eqn.primitive is end_p:
            enclosing.pop()
        counts.append(enclosing[-2] if eqn.primitive in ENTERING else enclosing[-1])
        if eqn.primitive is loop_p:
            enclosing.append(enclosing[-1] * (eqn.params["length"] or 1))
        elif eqn.primitive is switch_p:
            enclosing.append(enclosing[-1] / eqn.params["branches"])
    return counts
