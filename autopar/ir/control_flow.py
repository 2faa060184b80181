"""Control flow in a flat jaxpr: the bodies of loops and branches as runs of equations between markers.

    t      = loop[length=12]
    w'     = loop_const w t            the same in every iteration
    c      = loop_carry init t         what an iteration hands to the next
    x      = loop_slice xs t           one slice per iteration
    ...                                the body
    final  = loop_result c next t      `next` is what c becomes; `final` what it is after the last iteration
    ys     = loop_stack y t            one slice per iteration
    end t

A while loop has no length, and between its carries and its body the equations of its condition, ended by `loop_test`. A `switch`
has a run of equations after each `branch`, and `switch_result`s that take the value of one of them. Every value of a body has
so a name, a number and a place of its own, like any other of the step: whoever reads the list from top to bottom sees each
equation once. The token `t` says what belongs together.
"""

from collections.abc import Sequence

from jax.core import ShapedArray
from jax.extend.core import JaxprEqn, Primitive, Var

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
"""What brings values into a body."""
LEAVING = frozenset({loop_result_p, loop_stack_p, switch_result_p})
"""What brings values out of one."""
MARKERS = OPENING | ENTERING | LEAVING | {loop_test_p, branch_p, end_p}
BOUND = frozenset({loop_test_p, loop_result_p, branch_p, end_p})
"""Markers that a region can't do without, whether or not their results are used."""

TOKEN = ShapedArray((), bool)


def token_of(eqn: JaxprEqn) -> Var:
    """The token of the region that a marker belongs to."""
    token = eqn.outvars[0] if eqn.primitive in OPENING else eqn.invars[-1]
    assert isinstance(token, Var)
    return token


def end_of(eqns: Sequence[tuple[int, JaxprEqn]], start: int) -> int:
    """The position of the `end` of the region that opens at position `start` of numbered equations."""
    token = token_of(eqns[start][1])
    return next(
        position
        for position in range(start + 1, len(eqns))
        if eqns[position][1].primitive is end_p and token_of(eqns[position][1]) is token
    )


def spans(eqns: Sequence[JaxprEqn]) -> dict[Var, tuple[int, int]]:
    """For each region, by its token, the numbers of the equations that open and end it."""
    opened = {token_of(eqn): number for number, eqn in enumerate(eqns) if eqn.primitive in OPENING}
    return {
        token_of(e): (opened[token_of(e)], number)
        for number, e in enumerate(eqns)
        if e.primitive is end_p
    }


def repeats(eqns: Sequence[JaxprEqn]) -> list[float]:
    """How often each equation runs: the lengths of the loops around it; a branch counts as one of its switch's.

    The number of iterations of a while loop is not known; it counts as one.
    """
    counts, around = [], [1.0]
    for eqn in eqns:
        if eqn.primitive is end_p:
            around.pop()
        counts.append(around[-2] if eqn.primitive in ENTERING else around[-1])
        if eqn.primitive is loop_p:
            around.append(around[-1] * (eqn.params["length"] or 1))
        elif eqn.primitive is switch_p:
            around.append(around[-1] / eqn.params["branches"])
    return counts
