"""Scalars of the forward pass that the backward pass would recompute.

Inside `jax.checkpoint`, the backward pass computes the divisor of a masked mean a second time, and
behind an `optimization_barrier` it seems to depend on all inputs of the checkpoint. To keep a
scalar takes no memory, and one scalar for both passes may be completed before the model runs.
"""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Var

from autopar.ir.equation_groups import units
from autopar.ir.graph import Atom, aval_of, is_outer_backward, renamed, rewired
from autopar.layering.loss_checkpoints import unit_number
from autopar.layering.recomputed_layers import begins_recomputation


def without_recomputed_scalars(jaxpr: Jaxpr) -> Jaxpr:
    """Return a flat step whose backward pass reads the scalars that it else recomputes."""
    if not any(map(begins_recomputation, jaxpr.eqns)):
        return jaxpr
    equal: dict[Var, Atom] = {}  # values behind a barrier, and the same values before it
    known: dict[Any, Sequence[Var]] = {}
    kept: dict[Var, Atom] = {}
    eqns: list[JaxprEqn] = []
    for unit in units(enumerate(jaxpr.eqns)):
        own = [eqn for _, eqn in unit.eqns]
        if begins_recomputation(own[0]):
            equal.update(zip(own[0].outvars, renamed(own[0].invars, equal), strict=True))
        else:
            number = unit_number([rewired(eqn, equal) for eqn in own])
            if number is not None and number in known:
                pairs = dict(zip(unit.makes, known[number], strict=True))
                equal.update(pairs)
                if is_outer_backward(own[0]) and not any(aval_of(var).shape for var in pairs):
                    kept.update(pairs)
                    continue
            elif number is not None:
                known[number] = unit.makes
        eqns += [rewired(eqn, kept) for eqn in own]
    return jaxpr.replace(eqns=eqns, outvars=renamed(jaxpr.outvars, kept))
