"""Equations that call another jaxpr once: which parameter it is, and whether it is differentiated.

Loops, branches and `shard_map` regions are no calls.
"""

from functools import partial

import jax
from jax.extend.core import Jaxpr, JaxprEqn
from jax.extend.core.primitives import (
    closed_call_p,
    custom_jvp_call_p,
    custom_vjp_call_p,
    jit_p,
    remat_p,
)

from autopar.ir.graph import aval_of

_CALLED = {
    jit_p: "jaxpr",
    remat_p: "jaxpr",
    closed_call_p: "call_jaxpr",
    custom_jvp_call_p: "call_jaxpr",
    custom_vjp_call_p: "call_jaxpr",
}
"""Primitives that call a jaxpr, with the parameter that is the jaxpr."""

_MAPPED = "vprim"
"""Name of a primitive of Equinox's `create_vprim` under `jax.vmap`, such as lineax's solvers.

It calls its implementation, which is a function of JAX.
"""


def called_jaxpr(eqn: JaxprEqn) -> Jaxpr | None:
    """Return the jaxpr that an equation calls; None if it is no call."""
    if eqn.primitive.name == _MAPPED:
        implementation = partial(eqn.primitive.impl, **eqn.params)
        return jax.make_jaxpr(implementation)(*map(aval_of, eqn.invars))
    param = _CALLED.get(eqn.primitive)
    return None if param is None else eqn.params[param]


def has_derivative_rule(eqn: JaxprEqn) -> bool:
    """Return whether a call has a derivative of its own, `jax.custom_jvp` or `jax.custom_vjp`."""
    return eqn.primitive in (custom_jvp_call_p, custom_vjp_call_p)
