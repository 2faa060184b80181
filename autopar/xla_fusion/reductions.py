"""Reductions: which are part of the kernel of their rows, and which take two kernels."""

from collections.abc import Sequence
from math import prod

from jax.extend.core import JaxprEqn, Var
from jax.extend.core.primitives import exp_p
from jax.lax import split_p

from autopar.ir.graph import aval_of
from autopar.primitives import record_of
from autopar.xla_fusion.step_values import Values

_LONGEST_ROW = 16384
"""Longest row that one kernel reduces; longer rows take two kernels, with partial sums between."""

_LONGEST_COLUMN = 4096
"""Longest column that one kernel reduces."""


def is_reduction(eqn: JaxprEqn) -> bool:
    """Return whether XLA compiles an equation as a reduction."""
    return record_of(eqn).fusion == "reduction"


def is_cheap(eqn: JaxprEqn) -> bool:
    """Return whether kernels that read the result compute it; sums over unit dims do."""
    if is_reduction(eqn) and len(eqn.outvars) == 1:
        return aval_of(eqn.invars[0]).size == aval_of(eqn.outvars[0]).size
    return record_of(eqn).is_inlined or eqn.primitive is split_p


def takes_two_kernels(eqn: JaxprEqn, shape: Sequence[int]) -> bool:
    """Return whether a reduction of an operand of `shape` takes two kernels.

    This is XLA's tree reduction, for rows of more than 16384 elements and columns of more than
    4096. Images are stored with channels last, which makes their reductions rows.
    """
    if not is_reduction(eqn) or not shape:
        return False
    axes = eqn.params.get("axes", ())
    length = prod(shape[axis] for axis in axes)
    is_row = len(shape) - 1 in axes
    return length > _LONGEST_ROW if is_row else length > _LONGEST_COLUMN and len(shape) < 4


def fused_rows(
    values: Values, cheap: Sequence[bool], row_padding: float
) -> tuple[set[int], set[Var]]:
    """Return the reductions in kernels of their rows, and exponentials that such kernels write.

    Args:
        values: the values of the step.
        cheap: for each equation, whether it `is_cheap`.
        row_padding: `MeshCosts.row_padding`.
    """
    rows: set[int] = set()
    written: set[Var] = set()
    for number, eqn in enumerate(values.eqns):
        (result, *_) = (*eqn.outvars, None)
        if row_padding and _is_inside_row(values, cheap, eqn):
            if written.isdisjoint(_behind(values, cheap, eqn)):
                rows.add(number)
        elif eqn.primitive is exp_p and aval_of(result).shape:
            (*_, length) = aval_of(result).shape
            behind = map(values.makers.get, _behind(values, cheap, eqn))
            if _power_of_two(length) > row_padding * length and not rows.isdisjoint(behind):
                written.add(result)
    return rows, written


def _behind(values: Values, cheap: Sequence[bool], eqn: JaxprEqn) -> set[Var]:
    """Return the values that a kernel of rows has on the way to an equation.

    Args:
        values: the values of the step.
        cheap: for each equation, whether it `is_cheap`.
        eqn: an equation on rows, of the kernel.
    """
    found: set[Var] = set()
    rows = aval_of(eqn.invars[0]).shape[:-1]
    left = list(eqn.invars)
    while left:
        atom = left.pop()
        if not isinstance(atom, Var) or atom in found:
            continue
        found.add(atom)
        maker = values.makers.get(atom)
        if maker is not None and cheap[maker] and aval_of(atom).size >= prod(rows):
            left += values.eqns[maker].invars
    return found


def _is_inside_row(values: Values, cheap: Sequence[bool], eqn: JaxprEqn) -> bool:
    """Return whether a reduction of rows may be part of the kernel of the rows.

    It may if only one equation on the elements of the rows reads its broadcast result.
    """
    if not is_reduction(eqn) or len(eqn.outvars) != 1 or is_cheap(eqn):
        return False
    whole, axes = aval_of(eqn.invars[0]).shape, tuple(eqn.params.get("axes", ()))
    if axes != (len(whole) - 1,) or not 1 < whole[-1] <= _LONGEST_ROW or len(whole) < 2:
        return False
    var = eqn.outvars[0]
    while (reader := values.only_reader(var)) is not None:
        after = values.eqns[reader]
        if not cheap[reader]:
            return False
        if aval_of(after.outvars[0]).size == prod(whole):
            return True
        var = after.outvars[0]
    return False


def _power_of_two(number: int) -> int:
    """Return the least power of two that is no less than a number from 1."""
    return 1 << (number - 1).bit_length()
