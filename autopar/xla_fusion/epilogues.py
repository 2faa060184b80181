"""Epilogues: additions that a product does before it writes its result."""

from jax.extend.core import JaxprEqn, Literal, Var
from jax.extend.core.primitives import scatter_add_p

from autopar.ir.graph import aval_of
from autopar.ir.memo import memoized_on_step
from autopar.ir.step_graph import StepGraph
from autopar.primitives import record_of
from autopar.xla_fusion.step_values import Values


@memoized_on_step
def epilogues(step: StepGraph) -> dict[int, int]:
    """Return for each equation that is the epilogue of a product the number of the product."""
    return find_epilogues(Values(step))


def find_epilogues(values: Values) -> dict[int, int]:
    """Return for each epilogue the number of its product.

    A product adds a bias first, and then an array of the size of its result.
    """
    epilogues: dict[int, int] = {}
    for number, eqn in enumerate(values.eqns):
        if record_of(eqn).fusion != "contraction":
            continue
        result = eqn.outvars[0]
        biased = False
        while (reader := values.only_reader(result)) is not None and reader not in epilogues:
            other = _added(values, values.eqns[reader], result)
            if other is None:
                break
            source = values.unspread(other)
            if values.makers.get(values.base.get(source, source), -1) > number:
                break
            is_bias = aval_of(source).size <= max(aval_of(result).shape, default=1)
            is_whole = not is_bias and aval_of(other).size == aval_of(result).size
            if not is_whole and (biased or not is_bias):
                break
            epilogues[reader] = number
            if is_whole:
                break
            biased = True
            result = values.eqns[reader].outvars[0]
    return epilogues


def find_scattered(values: Values) -> set[Var]:
    """Return results of scatters that are only added to another value.

    XLA scatters onto that value in place.
    """
    scatters = (eqn.outvars[0] for eqn in values.eqns if eqn.primitive is scatter_add_p)
    return {var for var in scatters if values.only_adds(var)}


def _added(values: Values, eqn: JaxprEqn, result: Var) -> Var | None:
    """Return the other operand if `eqn` adds an array of the same dtype to `result`."""
    if not record_of(eqn).is_addition:
        return None
    others = [atom for atom in eqn.invars if values.shown(atom) is not values.shown(result)]
    if (
        len(others) != 1
        or isinstance(others[0], Literal)
        or aval_of(others[0]).dtype != aval_of(result).dtype
    ):
        return None
    return others[0] if aval_of(eqn.outvars[0]).size == aval_of(result).size else None
