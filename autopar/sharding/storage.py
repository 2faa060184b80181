"""Which values of a step are written to device memory, and which a fusion keeps in registers."""

from jax.extend.core import Var

from autopar.sharding.rules import PASS_THROUGH, POINTWISE
from autopar.trace import StepGraph

_FUSIBLE = POINTWISE | {"broadcast_in_dim", "iota", "reshape", "squeeze", "slice", "transpose"}
"""Primitives whose results a fusion keeps in registers when only other fusible equations or reductions read them."""


def is_fusible(name: str) -> bool:
    """Whether equations of the primitive become part of others' kernels."""
    return name in _FUSIBLE or name in PASS_THROUGH


def stored_values(step: StepGraph) -> set[Var]:
    """The values that are written to memory: inputs, outputs, and what a kernel other than a fusion writes or reads."""
    stored = {*step.jaxpr.invars, *step.jaxpr.constvars, *(a for a in step.jaxpr.outvars if isinstance(a, Var))}
    for eqn in step.jaxpr.eqns:
        name = eqn.primitive.name
        if not is_fusible(name):
            stored.update(eqn.outvars)
            if not name.startswith("reduce_"):
                stored.update(atom for atom in eqn.invars if isinstance(atom, Var))
    return stored
