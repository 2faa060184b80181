"""Steps with a `jax.checkpoint` around the whole loss.

Their backward pass begins by recomputing the whole forward pass, so the checkpoint saves no memory.
A pipeline would run all layers in its last stage, where the backward pass begins. Without the
checkpoint, each layer runs in its own stage.
"""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from autopar.ir.equation_groups import Unit, units
from autopar.ir.flatten import value_number
from autopar.ir.graph import (
    Atom,
    is_forward,
    is_outer_backward,
    renamed,
    variables,
    without_elements,
)
from autopar.layering.gradient_layers import forward_pass
from autopar.layering.recomputed_layers import begins_recomputation
from autopar.primitives import is_product

_RECOMPUTATION = "rematted_computation"


def without_loss_checkpoint(jaxpr: Jaxpr) -> Jaxpr:
    """Return a flat step that does not recompute its forward pass, if it recomputed all of it.

    A step whose backward pass reads a product of the forward pass is returned unchanged.
    """
    if not any(map(begins_recomputation, jaxpr.eqns)):
        return jaxpr
    groups = units(enumerate(jaxpr.eqns))
    if any(map(_has_product, forward_pass(groups))):
        return jaxpr
    names: dict[Var, Atom] = {}
    known: dict[Any, Sequence[Var]] = {}
    late: set[Var] = set()  # what depends on gradients
    eqns: list[JaxprEqn] = []
    for unit in groups:
        first = unit.eqns[0][1]
        own = [eqn.replace(invars=renamed(eqn.invars, names)) for _, eqn in unit.eqns]
        if begins_recomputation(first):
            names.update(zip(first.outvars, own[0].invars, strict=True))
            continue
        reads_late = any(not late.isdisjoint(variables(eqn.invars)) for eqn in own)
        if reads_late or any(is_outer_backward(eqn) and not is_forward(eqn) for eqn in own):
            late.update(unit.makes)
        else:
            own = [_in_forward_pass(eqn) for eqn in own]
        number = unit_number(own)
        if number is not None and number in known:
            names.update(zip(first.outvars, known[number], strict=True))
            continue
        if number is not None:
            known[number] = first.outvars
        eqns += own
    return jaxpr.replace(eqns=eqns, outvars=renamed(jaxpr.outvars, names))


def _has_product(unit: Unit) -> bool:
    return any(is_product(eqn) for _, eqn in unit.eqns)


def unit_number(eqns: Sequence[JaxprEqn]) -> Any:
    """Return a key of what a unit computes; None if it may not be merged with an equal one.

    Equations that read literals alone are merged only within one call, as in `flatten`.
    """
    if len(eqns) > 1:
        return None
    (eqn,) = eqns
    is_constant = all(isinstance(atom, Literal) for atom in eqn.invars)
    number = value_number(eqn)
    return (number, id(eqn.source_info.traceback)) if is_constant and number else number


def _in_forward_pass(eqn: JaxprEqn) -> JaxprEqn:
    """Return an equation without the scopes of a recomputation, if it has them."""
    is_recomputed = any(
        element.name == _RECOMPUTATION for element in eqn.source_info.name_stack.stack
    )
    return without_elements(eqn, ("transpose", _RECOMPUTATION)) if is_recomputed else eqn
